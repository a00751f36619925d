"""The optimizer states of every CPU sub-group, in memory that the training process and its Adam worker share, allocated once.

Only the staging buffers are pinned, 2 bytes a parameter: nothing else is copied to or from the GPU.
A sub-group that speculates has everything twice: a second set of states, and a second buffer for its new weights unless the weights are in
host memory. One with room for a copy, from which a checkpoint is written, has one more set of states.
Pages are allocated by the memory policy of whichever process first writes to them. That is the worker, which inherits the training
process's policy.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from superoffload import kernel
from superoffload.adam import Kernel
from superoffload.errors import OffloadError
from superoffload.memory_layout import MemorySize, Moments, layout
from superoffload.shared_memory import SharedMemory, gigabytes, host_available_bytes, pin, unpin

MEMORY_NAME = "superoffload-states"
"""Shown in /proc for the memory's descriptor and mappings."""


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
        self._memory = SharedMemory(
            MEMORY_NAME, self._layout.bytes, "the optimizer states of this rank"
        )
        self._kernel: Kernel | None = None
        """Decodes and encodes compact moments in this process; None if they are fp32."""
        self._pin = pin
        self._is_pinned = False

    @property
    def bytes(self) -> int:
        return self._layout.bytes

    @property
    def descriptor(self) -> int:
        return self._memory.descriptor

    @property
    def progress(self) -> int:
        """A counter that grows while the worker computes."""
        return int.from_bytes(self._memory.mapping[:8], "little")

    def staging(self, index: int) -> torch.Tensor:
        return self._view(self._layout.staging, index, self._dtype)

    def new_weights(self, index: int) -> torch.Tensor:
        """Return the buffer with the weights of a speculative step, of a sub-group that speculates."""
        return self._view(self._layout.new_weights, index, self._dtype)

    def master_weights(self, index: int, which: int = 0) -> torch.Tensor:
        """Return the master weights of one set (``StatesSet``)."""
        return self._view(self._layout.states[which].master_weights, index, torch.float32)

    def load_kernel(self, library: Path) -> None:
        """Load the compiled functions that ``moments`` and ``set_moments`` need where moments are compact."""
        if self.size.moments is not Moments.FP32:
            with kernel.opened(library) as descriptor:
                self._kernel = Kernel(kernel.loadable(descriptor), self._memory.mapping, self.size)

    def moments(self, index: int, which: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first and second moment of one set, in fp32: the state itself, or copies of compact moments."""
        if self._kernel is None:
            regions = self._layout.states[which]
            return self._view(regions.first_moment, index, torch.float32), self._view(
                regions.second_moment, index, torch.float32
            )
        first, second = torch.empty(self._numels[index]), torch.empty(self._numels[index])
        self._kernel.decode(index, which, first.data_ptr(), second.data_ptr())
        return first, second

    def set_moments(
        self, index: int, which: int, first: torch.Tensor, second: torch.Tensor
    ) -> None:
        """Set the first and second moment of one set. Compact ones are rounded to nearest; they cannot hold what is not a number."""
        if self._kernel is None:
            for target, values in zip(self.moments(index, which), (first, second), strict=True):
                if values.data_ptr() != target.data_ptr():
                    target.copy_(values)
            return
        first, second = (values.to("cpu", torch.float32).contiguous() for values in (first, second))
        self._kernel.encode(index, which, first.data_ptr(), second.data_ptr())

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
        if self._is_pinned:
            unpin(self._staging_range()[0])
            self._is_pinned = False
        self._kernel = None  # which keeps the memory mapped
        self._memory.close()

    def _staging_range(self) -> tuple[int, int]:
        address, _ = self._memory.range()
        return address + self._layout.staging_start, self._layout.staging_bytes

    def _view(self, offsets: tuple[int, ...], index: int, dtype: torch.dtype) -> torch.Tensor:
        return self._memory.view(offsets[index], self._numels[index], dtype)


def _check_available(needed_bytes: int, available_bytes: int | None) -> None:
    """Raise before allocating: touching shared memory that the host lacks ends the process by SIGBUS or the out-of-memory killer."""
    if available_bytes is not None and needed_bytes > available_bytes:
        raise OffloadError(
            f"The optimizer states of this rank need {gigabytes(needed_bytes)} of host memory, but only {gigabytes(available_bytes)} are "
            "available to this process. Lower offload.ratio, use more GPUs, or train a smaller model.",
            code="host-memory",
        )
