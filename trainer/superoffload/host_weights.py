"""Weights in host memory: those of every CPU sub-group, from which each layer is copied to the GPU when it is needed.

The Adam worker writes new weights here itself, so they need no copy when a step is over. It may, because a sub-group's gradients arrive
only after the last use of its weights in a step, and the next forward waits until the worker is done.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from superoffload.memory_layout import weights_layout
from superoffload.shared_memory import SharedMemory, pin, unpin

MEMORY_NAME = "superoffload-weights"


class HostWeights:
    """The weights of one rank's CPU sub-groups, shared with its Adam worker. Pages are allocated as they are filled.

    Args:
        numels: Elements of each sub-group.
        dtype: Type of the weights.
        pinned: Whether to pin them in ``pin``; False without a GPU.

    Raises:
        OffloadError: If the host refuses the memory (``host-memory-limit``).
    """

    def __init__(self, numels: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> None:
        self._numels, self._dtype, self._pinned = tuple(numels), dtype, pinned
        self._offsets, size_bytes = weights_layout(self._numels, dtype.itemsize)
        self._memory = SharedMemory(MEMORY_NAME, size_bytes, "the weights of this rank")
        self._address = 0
        """Of the pinned memory; 0 while it is not pinned."""

    @property
    def descriptor(self) -> int:
        return self._memory.descriptor

    def weights(self, slot: int) -> torch.Tensor:
        """Return the weights of a CPU sub-group, by its position among them."""
        return self._memory.view(self._offsets[slot], self._numels[slot], self._dtype)

    def pin(self) -> None:
        """Pin the memory, so that layers are copied at the full rate of the bus. Call it once, when it is filled.

        Raises:
            OffloadError: If CUDA refuses (``pinning``).
        """
        if self._pinned and not self._address:
            address, size_bytes = self._memory.range()
            pin(address, size_bytes)
            self._address = address

    def close(self) -> None:
        """Unpin the memory and release this process's hold on it; no copy may be using it. Safe to call twice."""
        if self._address:
            unpin(self._address)
            self._address = 0
        self._memory.close()
