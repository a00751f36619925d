"""Host memory that the training process shares with its Adam worker.

It is an anonymous file (memfd). Unlike a file in /dev/shm it needs no room there, has no name that could be left behind, and ends with the
last process that maps it.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import Any

import torch

from superoffload.errors import OffloadError


class SharedMemory:
    """Zeroed memory of one size, mapped in this process. Its pages are allocated by the memory policy of whoever first touches them.

    Args:
        name: Shown in /proc for its descriptor and mappings.
        size_bytes: Its size.
        what: What it is for, in messages.

    Raises:
        OffloadError: If the host refuses it (``host-memory-limit``).
    """

    def __init__(self, name: str, size_bytes: int, what: str) -> None:
        self.bytes = size_bytes
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        """Negative once it is closed."""
        try:
            os.ftruncate(self.descriptor, size_bytes)
            self.mapping = mmap.mmap(self.descriptor, size_bytes)
        except OSError as error:
            os.close(self.descriptor)
            raise OffloadError(
                f"Allocating {gigabytes(size_bytes)} of host memory for {what} failed: {error}. "
                "Check the limits of this job or shell (`ulimit -a`).",
                code="host-memory-limit",
            ) from error
        prefer_huge_pages(self.mapping)
        self._all = torch.frombuffer(self.mapping, dtype=torch.uint8)

    def range(self) -> tuple[int, int]:
        """Return address and size."""
        return self._all.data_ptr(), self.bytes

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a part of it as a tensor, which keeps it mapped."""
        return self._all.narrow(0, offset, numel * dtype.itemsize).view(dtype)

    def close(self) -> None:
        """Release this process's hold on the memory, which is freed with its last tensor and the worker. Safe to call twice."""
        if self.descriptor < 0:
            return
        os.close(self.descriptor)
        self.descriptor = -1
        # Unmapped when the last reference goes: a tensor that is still in use must not point to unmapped memory.
        del self._all, self.mapping


def host_available_bytes() -> int | None:
    """Return how much memory this host can still allocate without swapping; None where /proc does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next(
        (int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None
    )


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


def prefer_huge_pages(memory: mmap.mmap) -> None:
    """Ask for huge pages, which make address translation cheaper. A kernel that is set to refuse them costs only speed."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        try:
            memory.madvise(advice)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: a kernel without huge pages
                raise
