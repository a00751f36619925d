"""Layer inputs in host memory between forward and backward: what activation checkpointing keeps takes no GPU memory.

A layer's input is copied to the host while the layer computes. Backward copies each back while the layer after it is recomputed. The GPU
holds two at a time, and the host never waits: streams wait for each other.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from so_tui_trainer.failures import TrainingError
from superoffload.shared_memory import pin, prefer_huge_pages, unpin

Checkpoint = Callable[..., Any]
"""torch's ``checkpoint`` with its options: runs a function on arguments, and again in backward."""


@dataclass(eq=False)
class _Kept:
    """A layer's input from the layer's first pass until its recomputation."""

    slot: int
    host: Tensor
    on_gpu: Tensor | None
    """Until its copy is complete and the next layer begins, and again before its own backward."""
    copied: Any
    """Event after which the newest copy is complete, in either direction."""


class HostInputs:
    """Host memory for the inputs of all layers of one micro-batch, reused by the next."""

    def __init__(self, layers: int, input_bytes: int, device: torch.device) -> None:
        """Allocate, on this process's NUMA node as its memory policy says, and pin.

        Args:
            layers: How many inputs are kept at a time.
            input_bytes: Of the largest one.
            device: Where layers compute. Without a GPU the same copies are made, at once.

        Raises:
            OffloadError: The memory cannot be pinned (``pinning``).
        """
        self._device, cuda = device, device.type == "cuda"
        # Not shared, as Python's default is: the kernel grants huge pages for shared memory more rarely.
        memory = mmap.mmap(-1, max(1, layers * input_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        prefer_huge_pages(memory)
        self._slots = torch.frombuffer(memory, dtype=torch.uint8).view(layers, input_bytes)
        if cuda:
            pin(self._slots.data_ptr(), self._slots.nbytes)
            weakref.finalize(self, unpin, self._slots.data_ptr())
        self._copies: Any = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self._free = list(range(layers))
        self._kept: list[_Kept] = []
        """Oldest first. Backward takes the newest."""

    def checkpoint(self, checkpoint: Checkpoint, layer: Callable[..., Any], inputs: Tensor, *others: Any) -> Any:
        """Run a layer by torch's ``checkpoint``, with its input kept here.

        Raises:
            TrainingError: There is no room, since layers run more often in a pass than there are layers (``layer-inputs-unforeseen``).
        """
        if not torch.is_grad_enabled():
            return layer(inputs, *others)
        kept, first = self._keep(inputs), [inputs]

        def run(*others: Any) -> Any:
            # The first pass takes the tensor that belongs to the graph. The list lets go of it, or the input would stay on the GPU.
            return layer(first.pop() if first else self._take(kept).requires_grad_(), *others)

        return checkpoint(run, *others)

    def _keep(self, inputs: Tensor) -> _Kept:
        if self._kept:
            self._let_go(self._kept[-1])
        if not self._free:
            reason = f"more than {len(self._kept)} inputs of layers are to be kept in host memory, one of each layer is planned"
            suggestion = "A layer runs several times in a pass, or a pass had no backward. Set model.activation_offload to off."
            raise TrainingError("layer-inputs-unforeseen", reason, suggestion)
        slot = self._free.pop()
        host = self._slots[slot, : inputs.nbytes].view(inputs.dtype).view(inputs.shape)
        kept = _Kept(slot, host, inputs.detach(), None)
        kept.copied = self._copy(host, inputs.detach())
        self._kept.append(kept)
        return kept

    def _take(self, kept: _Kept) -> Tensor:
        """Return an input on the GPU, and begin to fetch the one that backward takes next."""
        if kept.on_gpu is None:
            self._fetch(kept)
        self._wait(kept)
        inputs, kept.on_gpu = kept.on_gpu, None
        self._kept.remove(kept)
        # Copies keep their order, so whatever is written there next is written after this one was read.
        self._free.append(kept.slot)
        if self._kept and self._kept[-1].on_gpu is None:
            self._fetch(self._kept[-1])
        assert inputs is not None
        return inputs

    def _fetch(self, kept: _Kept) -> None:
        # Allocated on the stream that computes: the copy waits for what used that memory before.
        kept.on_gpu = torch.empty_like(kept.host, device=self._device)
        kept.copied = self._copy(kept.on_gpu, kept.host)

    def _let_go(self, kept: _Kept) -> None:
        self._wait(kept)
        kept.on_gpu = None

    def _wait(self, kept: _Kept) -> None:
        if kept.copied is not None:
            torch.cuda.current_stream().wait_event(kept.copied)

    def _copy(self, target: Tensor, source: Tensor) -> Any:
        """Copy behind what the current stream computes, and return the event of its end; None where it is complete."""
        if self._copies is None:
            target.copy_(source)
            return None
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)
        return self._copies.record_event()
