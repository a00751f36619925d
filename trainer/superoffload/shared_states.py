"""Host memory that the training process and its Adam worker share: every CPU sub-group's arrays, allocated once.

It is an anonymous file (memfd). Unlike a file in /dev/shm it needs no room there, has no name that could be left behind, and ends with the
last process that maps it. Only the staging buffers are pinned, 2 bytes a parameter: nothing else is copied to or from the GPU.
A sub-group that speculates has everything twice: a second set of states, and a second buffer for its new weights. One with room for a copy,
from which a checkpoint is written, has one more set of states.
Pages are allocated by the memory policy of whichever process first writes to them. That is the worker, which inherits the training
process's policy.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from superoffload.errors import OffloadError
from superoffload.worker import Kernel, MemorySize, layout

MEMORY_NAME = "superoffload-states"
"""Shown in /proc for the memory's descriptor and mappings."""


def host_available_bytes() -> int | None:
    """Return how much memory this host can still allocate without swapping; None where /proc does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)


class SharedStates:
    """The arrays of all CPU sub-groups of one rank.

    Args:
        size: What decides their layout.
        dtype: Type of the weights, and with them of the staging buffers.
        pin: Whether ``pin_staging`` pins the staging buffers; False without a GPU.
        available_bytes: Returns how much memory this process can still allocate, None if unknown.

    Raises:
        OffloadError: If the host has less memory than needed (``host-memory``), or refuses it (``host-memory-limit``).
    """

    def __init__(
        self,
        size: MemorySize,
        dtype: torch.dtype,
        *,
        pin: bool,
        available_bytes: Callable[[], int | None] = host_available_bytes,
    ) -> None:
        self.size = size
        self._dtype = dtype
        self._numels = size.numels
        self._layout = layout(size)
        _check_available(self._layout.bytes, available_bytes())
        self.descriptor = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, self._layout.bytes)
            self._memory = mmap.mmap(self.descriptor, self._layout.bytes)
        except OSError as error:
            os.close(self.descriptor)
            raise OffloadError(
                f"Allocating {gigabytes(self._layout.bytes)} of host memory for the optimizer states of this rank failed: {error}. "
                "Check the limits of this job or shell (`ulimit -a`).",
                code="host-memory-limit",
            ) from error
        prefer_huge_pages(self._memory)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._pin = pin
        self._is_pinned = False

    @property
    def bytes(self) -> int:
        return self._layout.bytes

    @property
    def progress(self) -> int:
        """A counter that grows while the worker computes."""
        return int.from_bytes(self._memory[:8], "little")

    def staging(self, index: int) -> torch.Tensor:
        return self._view(self._layout.staging, index, self._dtype)

    def new_weights(self, index: int) -> torch.Tensor:
        """Return the buffer with the weights of a speculative step, of a sub-group that speculates."""
        return self._view(self._layout.new_weights, index, self._dtype)

    def states(self, index: int, which: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the master weights, first and second moment of one set (``worker.StatesSet``), if the moments are fp32."""
        regions = self._layout.states[which][:3]
        weights, first, second = (self._view(region, index, torch.float32) for region in regions)
        return weights, first, second

    def master_weights(self, index: int, which: int = 0) -> torch.Tensor:
        """Return the master weights of one set (``worker.StatesSet``)."""
        return self._view(self._layout.states[which].master_weights, index, torch.float32)

    def kernel(self, library: str) -> Kernel:
        """Return the compiled functions, bound to this memory in this process."""
        return Kernel(library, self._memory, self.size)

    def pin_staging(self) -> None:
        """Pin the staging buffers, so that copies run at the full rate of the bus and concurrently with computation.

        Call it once, after the worker has touched the pages.

        Raises:
            OffloadError: If CUDA refuses (``pinning``).
        """
        if not self._pin:
            return
        pin(*self._staging_range())
        self._is_pinned = True

    def close(self) -> None:
        """Release this process's hold on the memory, which is freed with its last tensor and the worker. Safe to call twice."""
        if self.descriptor < 0:
            return
        if self._is_pinned:
            unpin(self._staging_range()[0])
            self._is_pinned = False
        os.close(self.descriptor)
        self.descriptor = -1
        # Unmapped when the last reference goes: a tensor that is still in use must not point to unmapped memory.
        del self._bytes, self._memory

    def _staging_range(self) -> tuple[int, int]:
        return self._bytes.data_ptr() + self._layout.staging_start, self._layout.staging_bytes

    def _view(self, offsets: tuple[int, ...], index: int, dtype: torch.dtype) -> torch.Tensor:
        return self._bytes.narrow(0, offsets[index], self._numels[index] * dtype.itemsize).view(dtype)


def gigabytes(size_bytes: int) -> str:
    """Format a size: ``206.7 GB``."""
    return f"{size_bytes / 1e9:.1f} GB"


def pin(address: int, size_bytes: int) -> None:
    """Pin host memory at its exact size, where torch's own allocator may round up. Raises OffloadError (``pinning``)."""
    code = int(_cuda_runtime().cudaHostRegister(address, size_bytes, 0))
    if code != 0:
        raise OffloadError(
            f"Pinning {gigabytes(size_bytes)} of host memory failed (CUDA error {code}). Check the memory limit of the container or job.",
            code="pinning",
        )


def unpin(address: int) -> None:
    """Unpin what ``pin`` pinned; no copy may be using it."""
    _cuda_runtime().cudaHostUnregister(address)


def _cuda_runtime() -> Any:
    # With ROCm this is HIP's runtime, whose functions torch calls by CUDA's names.
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _check_available(needed_bytes: int, available_bytes: int | None) -> None:
    """Raise before allocating: touching shared memory that the host lacks ends the process by SIGBUS or the out-of-memory killer."""
    if available_bytes is not None and needed_bytes > available_bytes:
        raise OffloadError(
            f"The optimizer states of this rank need {gigabytes(needed_bytes)} of host memory, but only {gigabytes(available_bytes)} are "
            "available to this process. Lower offload.ratio, use more GPUs, or train a smaller model.",
            code="host-memory",
        )


def prefer_huge_pages(memory: mmap.mmap) -> None:
    """Ask for huge pages, which make address translation cheaper. A kernel that is set to refuse them costs only speed."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        try:
            memory.madvise(advice)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: a kernel without huge pages
                raise
