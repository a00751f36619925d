"""The optimizer states of every CPU sub-group, in memory that the training process and its Adam
worker share, allocated once.

Only the staging buffers are pinned, 2 bytes a parameter: nothing else is copied to or from the GPU.
A sub-group that speculates has everything twice: a second set of states, and a second buffer for
its new weights unless the weights are in host memory. One with room for a copy, from which a
checkpoint is written, has one more set of states.
Pages are allocated by the memory policy of whichever process first writes to them. That is the
worker, which inherits the training process's policy.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from superoffload import kernel
from superoffload.errors import OffloadError
from superoffload.worker import Kernel, MemorySize, Moments, layout, region_layout

# Host memory that the training process shares with its Adam worker.
#
# It is an anonymous file (memfd). Unlike a file in /dev/shm it needs no room there, has no name
# that could be left behind, and ends with the last process that maps it.


class _SharedMemory:
    """Zeroed memory of one size, mapped in this process. Its pages are allocated by the memory
    policy of whoever first touches them.

    Args:
        name: Shown in /proc for its descriptor and mappings.
        size_bytes: Its size.
        what: What it is for, in messages.

    Raises:
        OffloadError: If the host refuses it (``host-memory-limit``, ``file-size-limit``).
    """

    def __init__(self, name: str, size_bytes: int, what: str) -> None:
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        """Negative once it is closed."""
        try:
            os.ftruncate(self.descriptor, size_bytes)
            self.mapping = mmap.mmap(self.descriptor, size_bytes)
        except OSError as error:
            os.close(self.descriptor)
            if error.errno == errno.EFBIG:
                raise OffloadError(
                    f"Allocating {_gigabytes(size_bytes)} of host memory for {what} failed, "
                    "because it is more than the largest file allowed, which holds for shared "
                    "memory, too. Raise that limit of this job or shell (`ulimit -f unlimited`).",
                    code="file-size-limit",
                ) from error
            raise OffloadError(
                f"Allocating {_gigabytes(size_bytes)} of host memory for {what} failed: {error}. "
                "Check the limits of this job or shell (`ulimit -a`).",
                code="host-memory-limit",
            ) from error
        prefer_huge_pages(self.mapping)
        self._all = torch.frombuffer(self.mapping, dtype=torch.uint8)
        self._copied = 0, size_bytes
        """First byte and length of what is copied to and from the GPU."""
        self._pinned = 0
        """Address of what is pinned; 0 for nothing."""

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a part of it as a tensor, which keeps it mapped."""
        return self._all.narrow(0, offset, numel * dtype.itemsize).view(dtype)

    def pin(self) -> None:
        """Pin what is copied to and from the GPU, so that copies run at the full rate of the bus
        and concurrently with computation. Call it once, after the pages were touched. Raises
        OffloadError (``pinning``).
        """
        begin, size_bytes = self._copied
        address = self._all.data_ptr() + begin
        pin(address, size_bytes)
        self._pinned = address

    def close(self) -> None:
        """Unpin the memory, which no copy may be using, and release this process's hold on it. It
        is freed with its last tensor and the worker. Safe to call twice.
        """
        if self.descriptor < 0:
            return
        if self._pinned:
            unpin(self._pinned)
        os.close(self.descriptor)
        self.descriptor = -1
        # Unmapped when the last reference goes: a tensor that is still in use must not point to
        # unmapped memory.
        del self._all, self.mapping


def host_available_bytes() -> int:
    """Return how much memory this host can still allocate without swapping."""
    return int(psutil.virtual_memory().available)


def _gigabytes(size_bytes: int) -> str:
    """Format a size: ``206.7 GB``."""
    return f"{size_bytes / 1e9:.1f} GB"


def pin(address: int, size_bytes: int) -> None:
    """Pin host memory at its exact size, where torch's own allocator may round up. Raises
    OffloadError (``pinning``).
    """
    code = int(_cuda_runtime().cudaHostRegister(address, size_bytes, 0))
    if code != 0:
        raise OffloadError(
            f"Pinning {_gigabytes(size_bytes)} of host memory failed (CUDA error {code}). Check "
            "the memory limit of the container or job.",
            code="pinning",
        )


def unpin(address: int) -> None:
    """Unpin what ``pin`` pinned; no copy may be using it."""
    _cuda_runtime().cudaHostUnregister(address)


def _cuda_runtime() -> Any:
    # With ROCm this is HIP's runtime, whose functions torch calls by CUDA's names.
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def prefer_huge_pages(memory: mmap.mmap) -> None:
    """Ask for huge pages, which make address translation cheaper. A kernel that is set to refuse
    them costs only speed.
    """
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: a kernel without huge pages
            raise


# Weights in host memory: those of every CPU sub-group, from which each layer is copied to the GPU
# when it is needed.
#
# The Adam worker writes new weights here itself, so they need no copy when a step is over. It may,
# because a sub-group's gradients arrive only after the last use of its weights in a step, and the
# next forward waits until the worker is done.


WEIGHTS_MEMORY_NAME = "superoffload-weights"


class HostWeights(_SharedMemory):
    """The weights of one rank's CPU sub-groups, shared with its Adam worker. Pages are allocated as
    they are filled.

    Args:
        numels: Elements of each sub-group; 0 for those whose states are on the GPU.
        dtype: Type of the weights.

    Raises:
        OffloadError: If the host refuses the memory (``host-memory-limit``).
    """

    def __init__(self, numels: Sequence[int], dtype: torch.dtype) -> None:
        self._numels, self._dtype = tuple(numels), dtype
        self._offsets, size_bytes = region_layout(self._numels, dtype.itemsize)
        super().__init__(WEIGHTS_MEMORY_NAME, size_bytes, "the weights of this rank")

    def weights(self, index: int) -> Tensor:
        """Return the weights of a sub-group whose states are in host memory."""
        return self.view(self._offsets[index], self._numels[index], self._dtype)


STATES_MEMORY_NAME = "superoffload-states"
"""Shown in /proc for the memory's descriptor and mappings."""


class SharedStates(_SharedMemory):
    """The arrays of all CPU sub-groups of one rank.

    Args:
        size: What decides their layout.
        dtype: Type of the weights, and with them of the staging buffers.
        available_bytes: Returns how much memory this process can still allocate, None if unknown.
        library: The compiled functions, which compact moments need.

    Raises:
        OffloadError: If the host has less memory than needed (``host-memory``), or refuses it
            (``host-memory-limit``).
    """

    def __init__(
        self,
        size: MemorySize,
        dtype: torch.dtype,
        available_bytes: Callable[[], int | None],
        library: Path,
    ) -> None:
        self.size = size
        self._dtype = dtype
        self._numels = size.numels
        self._layout = layout(size)
        available = available_bytes()
        # Before allocating: touching shared memory that the host lacks ends the process by SIGBUS
        # or the out-of-memory killer.
        if available is not None and self._layout.bytes > available:
            raise OffloadError(
                f"The optimizer states of this rank need {_gigabytes(self._layout.bytes)} of host "
                f"memory, but only {_gigabytes(available)} are available to this process. Lower "
                "offload.ratio, use more GPUs, or train a smaller model.",
                code="host-memory",
            )
        super().__init__(
            STATES_MEMORY_NAME, self._layout.bytes, "the optimizer states of this rank"
        )
        self._copied = self._layout.staging[0], self._layout.staging_bytes
        self._kernel: Kernel | None = None
        """Decodes and encodes compact moments in this process; None if they are fp32."""
        if size.moments is not Moments.FP32:
            try:
                with kernel.opened(library) as descriptor:
                    self._kernel = Kernel(kernel.loadable(descriptor), self.mapping, size)
            except BaseException:
                self.close()
                raise

    @property
    def progress(self) -> int:
        """A counter that grows while the worker computes."""
        return int.from_bytes(self.mapping[:8], "little")

    def staging(self, index: int) -> Tensor:
        return self._view(self._layout.staging, index, self._dtype)

    def new_weights(self, index: int) -> Tensor:
        """Return the buffer with the weights of a speculative step, of a sub-group that
        speculates.
        """
        return self._view(self._layout.new_weights, index, self._dtype)

    def master_weights(self, index: int, which: int = 0) -> Tensor:
        """Return the master weights of one set (``StatesSet``)."""
        return self._view(self._layout.states[which].master_weights, index, torch.float32)

    def moments(self, index: int, which: int = 0) -> tuple[Tensor, Tensor]:
        """Return the first and second moment of one set, in fp32: the state itself, or copies of
        compact moments.
        """
        if self._kernel is None:
            regions = self._layout.states[which]
            return self._view(regions.first_moment, index, torch.float32), self._view(
                regions.second_moment, index, torch.float32
            )
        first = torch.empty(self._numels[index])
        second = torch.empty(self._numels[index])
        self._kernel.decode(index, which, first.data_ptr(), second.data_ptr())
        return first, second

    def set_moments(self, index: int, which: int, first: Tensor, second: Tensor) -> None:
        """Set the first and second moment of one set. Compact ones are rounded to nearest; they
        cannot hold what is not a number.
        """
        if self._kernel is None:
            for target, values in zip(self.moments(index, which), (first, second), strict=True):
                if values.data_ptr() != target.data_ptr():
                    target.copy_(values)
            return
        first, second = (values.to("cpu", torch.float32).contiguous() for values in (first, second))
        self._kernel.encode(index, which, first.data_ptr(), second.data_ptr())

    def close(self) -> None:
        self._kernel = None  # which keeps the memory mapped
        super().close()

    def _view(self, offsets: tuple[int, ...], index: int, dtype: torch.dtype) -> Tensor:
        return self.view(offsets[index], self._numels[index], dtype)
