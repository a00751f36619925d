"""What checkpointed layers keep, in host memory between forward and backward: it takes no GPU memory meanwhile.

That is each layer's input, and attention's results where the policy ``attention`` keeps them. A tensor is copied to the host while the GPU
computes on, until the next layer has its own. Backward copies each back while the layer after it is recomputed and differentiated. The GPU
holds two of each kind at a time, and the host never waits: streams wait for each other.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from so_tui_trainer.failures import TrainingError
from superoffload.shared_memory import pin, prefer_huge_pages, unpin

Checkpoint = Callable[..., Any]
"""torch's ``checkpoint`` with its options: runs a function on arguments, and again in backward."""


class Room(NamedTuple):
    """What one kind of tensor needs in a pass: a layer's input, or one of attention's results."""

    tensors: int
    tensor_bytes: int
    """Of the largest one."""


@dataclass(eq=False)
class _Kept:
    """A tensor from a layer's first pass until its recomputation."""

    slot: int
    host: Tensor
    on_gpu: Tensor | None
    """Until its copy is complete and the next one is kept, and again before its own layer's backward."""
    copied: Any
    """Event after which the newest copy is complete, in either direction."""


class HostActivations:
    """Host memory for what all layers keep of one micro-batch, reused by the next."""

    def __init__(self, inputs: Room | None, results: Sequence[Room], device: torch.device) -> None:
        """Allocate, on this process's NUMA node as its memory policy says, and pin.

        Args:
            inputs: The layers' inputs; None where they are not kept here.
            results: Each tensor of attention's results; nothing where they are not kept here.
            device: Where layers compute. Without a GPU the same copies are made, at once.

        Raises:
            OffloadError: The memory cannot be pinned (``pinning``).
        """
        # One stream for all copies: they keep their order.
        copies: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._inputs = None if inputs is None else _Slots(inputs, device, copies)
        self._results = [_Slots(room, device, copies) for room in results]

    @property
    def nbytes(self) -> int:
        return sum(slots.nbytes for slots in (self._inputs, *self._results) if slots)

    @property
    def keeps_results(self) -> bool:
        """Whether there is room for attention's results."""
        return bool(self._results)

    def checkpoint(
        self, checkpoint: Checkpoint, layer: Callable[..., Any], inputs: Tensor, *others: Any
    ) -> Any:
        """Run a layer by torch's ``checkpoint``, with its input kept here where there is room for inputs.

        Raises:
            TrainingError: There is no room, since layers run more often in a pass than there are layers (``layer-inputs-unforeseen``).
        """
        if (slots := self._inputs) is None:
            return checkpoint(layer, inputs, *others)
        if not torch.is_grad_enabled():
            return layer(inputs, *others)
        kept, first = slots.keep(inputs.detach()), [inputs]

        def run(*others: Any) -> Any:
            # The first pass takes the tensor that belongs to the graph. The list lets go of it, or the input would stay on the GPU.
            return layer(first.pop() if first else slots.take(kept).requires_grad_(), *others)

        return checkpoint(run, *others)

    def results(self) -> LayerResults:
        """Return what keeps the results of one layer's attention."""
        return LayerResults(self._results)


class LayerResults:
    """The results of one layer's attention from its first pass until its recomputation."""

    def __init__(self, slots: Sequence[_Slots]) -> None:
        self._slots = slots
        self._kept: deque[list[_Kept]] = deque()

    def save(self, results: tuple[Tensor, ...]) -> None:
        """Keep results. Raises TrainingError as ``HostActivations.checkpoint``."""
        self._kept.append(
            [slots.keep(result) for slots, result in zip(self._slots, results, strict=True)]
        )

    def reuse(self) -> tuple[Tensor, ...]:
        """Return the results that were saved first, on the GPU, and let go of them."""
        return tuple(
            slots.take(kept) for slots, kept in zip(self._slots, self._kept.popleft(), strict=True)
        )


class _Slots:
    """Pinned memory for the tensors of one kind. Forward keeps them one after the other, and backward takes the newest first."""

    def __init__(self, room: Room, device: torch.device, copies: Any) -> None:
        self._device, self._copies = device, copies
        # Not shared, as Python's default is: the kernel grants huge pages for shared memory more rarely.
        memory = mmap.mmap(
            -1,
            max(1, room.tensors * room.tensor_bytes),
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
        )
        prefer_huge_pages(memory)
        self._slots = torch.frombuffer(memory, dtype=torch.uint8).view(
            room.tensors, room.tensor_bytes
        )
        if copies is not None:
            pin(self._slots.data_ptr(), self._slots.nbytes)
            weakref.finalize(self, unpin, self._slots.data_ptr())
        self._free = list(range(room.tensors))
        self._kept: list[_Kept] = []
        """Oldest first."""

    @property
    def nbytes(self) -> int:
        return self._slots.nbytes

    def keep(self, tensor: Tensor) -> _Kept:
        """Copy a tensor to the host; the one before it leaves the GPU."""
        if self._kept:
            self._let_go(self._kept[-1])
        if not self._free or tensor.nbytes > self._slots.shape[1]:
            reason = f"layers keep more in host memory than is planned: {len(self._slots)} tensors of {self._slots.shape[1]} bytes"
            suggestion = "A layer runs several times in a pass, or a pass had no backward. Set model.activation_offload to off."
            raise TrainingError("layer-inputs-unforeseen", reason, suggestion)
        slot = self._free.pop()
        host = self._slots[slot, : tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        kept = _Kept(slot, host, tensor, self._copy(host, tensor))
        self._kept.append(kept)
        return kept

    def take(self, kept: _Kept) -> Tensor:
        """Return a tensor on the GPU, and begin to fetch the one that backward takes next."""
        if kept.on_gpu is None:
            self._fetch(kept)
        self._wait(kept)
        tensor, kept.on_gpu = kept.on_gpu, None
        self._kept.remove(kept)
        # Copies keep their order, so whatever is written there next is written after this one was read.
        self._free.append(kept.slot)
        if self._kept and self._kept[-1].on_gpu is None:
            self._fetch(self._kept[-1])
        assert tensor is not None
        return tensor

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
