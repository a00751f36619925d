"""The memory that the training process and its Adam worker share: every CPU sub-group's arrays, allocated once, exact in size.

It is an anonymous file (memfd), so it needs no room in /dev/shm, has no name that could be left behind, and ends with its last process.
Only the exchange, where gradients arrive and weights leave, is pinned: 2 of 14 bytes per parameter; the rest never meets the GPU.
The pages lie where the process's memory policy puts them when the worker first writes to them (shared memory follows the policy of
whoever touches it first, and the worker inherits the policy of the training process).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any

import torch

from so_tui.machine.memory import available_bytes
from so_tui.machine.system_files import SystemFiles
from so_tui.units import disk_size
from superoffload.errors import OffloadError
from superoffload.worker import layout


class Arena:
    """Shared arrays of the sub-groups with ``numels`` elements; ``dtype`` is that of the weights.

    Raises OffloadError when the host, whose /proc and /sys ``tree`` reads, has less memory than they need, or allows this process less.
    """

    def __init__(
        self, numels: Sequence[int], dtype: torch.dtype, *, accumulate: bool, page_lock: bool, tree: SystemFiles | None = None
    ) -> None:
        self.numels = tuple(numels)
        self.dtype = dtype
        self.accumulate = accumulate
        self._places = layout(self.numels, dtype.itemsize, accumulate)
        _check_room(self._places.bytes, tree or SystemFiles())
        self.descriptor = os.memfd_create("so-tui-offload", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, self._places.bytes)
            self._memory = mmap.mmap(self.descriptor, self._places.bytes)
        except OSError as error:
            os.close(self.descriptor)
            raise OffloadError(
                f"{disk_size(self._places.bytes)} of host memory for the optimizer states of this rank could not be had: {error}. "
                "Look at the limits of this job or shell (`ulimit -a`)."
            ) from error
        _prefer_huge_pages(self._memory)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._page_locked = page_lock

    @property
    def bytes(self) -> int:
        return self._places.bytes

    @property
    def progress(self) -> int:
        """Counts up while the worker computes."""
        return int.from_bytes(self._memory[:8], "little")

    def exchange(self, index: int) -> torch.Tensor:
        return self._view(self._places.exchange, index, self.dtype)

    def master(self, index: int) -> torch.Tensor:
        return self._view(self._places.master, index, torch.float32)

    def first_moment(self, index: int) -> torch.Tensor:
        return self._view(self._places.first_moment, index, torch.float32)

    def second_moment(self, index: int) -> torch.Tensor:
        return self._view(self._places.second_moment, index, torch.float32)

    def lock_pages(self) -> None:
        """Page-locks the exchange, so that copies run at the full rate of the bus and beside computing. Once, after construction."""
        if self._page_locked:
            code = int(_cuda_runtime().cudaHostRegister(*self._exchange_range(), 0))
            if code != 0:
                self._page_locked = False
                raise OffloadError(
                    f"Page-locking {disk_size(self._places.exchange_bytes)} of host memory failed (CUDA error {code}). "
                    "Check the memory limit of the container or job."
                )

    def close(self) -> None:
        """Gives up this process's hold on the memory; it is freed when the last tensor in it and the worker are gone."""
        if self.descriptor < 0:
            return
        if self._page_locked:
            _cuda_runtime().cudaHostUnregister(self._exchange_range()[0])
            self._page_locked = False
        os.close(self.descriptor)
        self.descriptor = -1
        # Unmapped with the last reference, not by force: a tensor that is still around must not point into nothing.
        del self._bytes, self._memory

    def _exchange_range(self) -> tuple[int, int]:
        return self._bytes.data_ptr() + self._places.exchange_start, self._places.exchange_bytes

    def _view(self, offsets: tuple[int, ...], index: int, dtype: torch.dtype) -> torch.Tensor:
        return self._bytes.narrow(0, offsets[index], self.numels[index] * dtype.itemsize).view(dtype)


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _check_room(needed_bytes: int, tree: SystemFiles) -> None:
    """Shared memory that is not there ends a process with SIGBUS or the OOM killer: better to say so before."""
    available = available_bytes(tree)
    if available is not None and needed_bytes > available:
        raise OffloadError(
            f"The optimizer states of this rank need {disk_size(needed_bytes)} of host memory, but only {disk_size(available)} are "
            "available here (to this control group, where it has a limit). Lower offload.ratio, use more GPUs, or a smaller model."
        )


def _prefer_huge_pages(memory: mmap.mmap) -> None:
    """Fewer address translations for arrays of gigabytes. The kernel may be set to refuse it for shared memory, which costs only speed."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        try:
            memory.madvise(advice)
        except OSError as error:
            if error.errno != 22:  # EINVAL: this kernel has none
                raise
