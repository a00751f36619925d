"""Activation checkpointing: which activations a layer saves for its backward pass, and which it
recomputes.

``full`` saves a layer's input and repeats its whole forward pass. ``attention`` also saves
attention's results, which cost the most where documents are long. ``selective`` saves those of
matrix products as well, and repeats only norms, rotary embedding and activation functions. ``none``
saves everything.

The contexts that torch's checkpointing opens around both passes decide whether a result is saved or
reused. torch's own selective checkpointing counts the operations of both passes and requires equal
counts; with ZeRO-3, which all-gathers weights inside a layer with a varying number of copies, they
never are.
"""

from __future__ import annotations

import inspect
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._nn import linear
from torch.utils.checkpoint import checkpoint

from so_tui_trainer.failures import TrainingError
from so_tui_trainer.model import Gradients, apply
from so_tui_trainer.model.weights import decoder_of
from superoffload.shared_states import pin, prefer_huge_pages, unpin

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# What checkpointed layers keep, in host memory between forward and backward: it takes no GPU
# memory meanwhile.
#
# That is each layer's input, and attention's results where the policy ``attention`` keeps them. A
# tensor is copied to the host while the GPU computes on, until the next layer has its own.
# Backward copies each back while the layer after it is recomputed and differentiated. The GPU
# holds two of each kind at a time, and the host never waits: streams wait for each other.


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
    """Until its copy is complete and the next one is kept, and again before its own layer's
    backward.
    """
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
        copies = None
        if device.type == "cuda":
            # One stream for all copies: they keep their order.
            copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._inputs = None if inputs is None else _Slots(inputs, device, copies)
        self.results = [_Slots(room, device, copies) for room in results]

    def checkpoint(
        self, checkpoint: Checkpoint, layer: Callable[..., Any], inputs: Tensor, *others: Any
    ) -> Any:
        """Run a layer by torch's ``checkpoint``, with its input kept here where there is room for
        inputs.

        Raises:
            TrainingError: There is no room, since layers run more often in a pass than there are
                layers (``layer-inputs-unforeseen``).
        """
        if (slots := self._inputs) is None:
            return checkpoint(layer, inputs, *others)
        if not torch.is_grad_enabled():
            return layer(inputs, *others)
        kept, first = slots.keep(inputs.detach()), [inputs]

        def run(*others: Any) -> Any:
            # The first pass takes the tensor that belongs to the graph. The list lets go of it, or
            # the input would stay on the GPU.
            return layer(first.pop() if first else slots.take(kept).requires_grad_(), *others)

        return checkpoint(run, *others)


class _Slots:
    """Pinned memory for the tensors of one kind. Forward keeps them one after the other, and
    backward takes the newest first.
    """

    def __init__(self, room: Room, device: torch.device, copies: Any) -> None:
        self._device, self._copies = device, copies
        # Not shared, as Python's default is: the kernel grants huge pages for shared memory more
        # rarely.
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

    def keep(self, tensor: Tensor) -> _Kept:
        """Copy a tensor to the host; the one before it leaves the GPU."""
        if self._kept:
            self._wait(self._kept[-1])
            self._kept[-1].on_gpu = None
        if not self._free or tensor.nbytes > self._slots.shape[1]:
            raise TrainingError(
                "layer-inputs-unforeseen",
                f"layers keep more in host memory than is planned: {len(self._slots)} tensors of "
                f"{self._slots.shape[1]} bytes",
                "A layer runs several times in a pass, or a pass had no backward. Set "
                "model.activation_offload to off.",
            )
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
        # Copies keep their order, so whatever is written there next is written after this one was
        # read.
        self._free.append(kept.slot)
        if self._kept and self._kept[-1].on_gpu is None:
            self._fetch(self._kept[-1])
        assert tensor is not None
        return tensor

    def _fetch(self, kept: _Kept) -> None:
        # Allocated on the stream that computes: the copy waits for what used that memory before.
        kept.on_gpu = torch.empty_like(kept.host, device=self._device)
        kept.copied = self._copy(kept.on_gpu, kept.host)

    def _wait(self, kept: _Kept) -> None:
        if kept.copied is not None:
            torch.cuda.current_stream().wait_event(kept.copied)

    def _copy(self, target: Tensor, source: Tensor) -> Any:
        """Copy behind what the current stream computes, and return the event of its end; None where
        it is complete.
        """
        if self._copies is None:
            target.copy_(source)
            return None
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)
        return self._copies.record_event()


Policy = Literal["full", "attention", "selective", "none"]
Operation = Literal["attention", "product"]
"""Operations whose results a policy may save; ``product`` includes what belongs to products, such
as the routing of experts.
"""
Results = tuple[Tensor, ...]
"""What an operation computes."""
ResultStore = Callable[[Operation, Callable[[], Results]], Results]
"""Runs an operation in the first pass; returns its saved results in the recomputation, if the
policy saves them.
"""

_SAVED: dict[Policy, frozenset[Operation]] = {
    "full": frozenset(),
    "attention": frozenset({"attention"}),
    "selective": frozenset({"attention", "product"}),
}


class _Local(threading.local):
    store: ResultStore | None = None
    """The store of the pass that this thread runs. Forward runs in the caller's thread, the
    recomputation in autograd's.
    """


_local = _Local()


def checkpointed_layers(causal: PreTrainedModel) -> list[nn.Module]:
    """Return the layers that can be checkpointed."""
    return [
        module
        for module in causal.modules()
        if hasattr(module, "gradient_checkpointing") and module is not decoder_of(causal)
    ]


def install(causal: PreTrainedModel, policy: Policy, host: HostActivations | None = None) -> None:
    """Make every layer of ``causal`` save what ``policy`` says, and in ``host``, if given, its
    input and what else that has room for.
    """
    if policy == "none":
        return
    # Not reentrant, which would run ZeRO-3's end-of-backward work several times per backward pass.
    # There is no dropout to repeat, but some routers draw random numbers. The tests check that both
    # passes save equal shapes.
    run = partial(
        checkpoint,
        use_reentrant=False,
        # Routers draw random numbers in training: noise (Mixtral, if asked for), or the experts
        # themselves (Phi-3.5-MoE).
        preserve_rng_state=any(
            value for name, value in causal.config.to_dict().items() if "jitter" in name
        ),
        determinism_check="none",
        context_fn=partial(_contexts, _SAVED[policy], host.results if host else ()),
    )
    for layer in checkpointed_layers(causal):
        inner, ending = _linear_layers(layer)
        for module in ending:
            module.forward = partial(_plain_linear, module)  # type: ignore[method-assign]
        for module in inner if policy == "selective" else ():
            module.forward = partial(_saved_linear, module)  # type: ignore[method-assign]
    causal._set_gradient_checkpointing(True, partial(host.checkpoint, run) if host else run)


def save_or_reuse(operation: Operation, compute: Callable[[], Results]) -> Results:
    """Return the result of ``compute``, or its result in the first pass if a layer is being
    recomputed that saves such results.

    To be called from the forward of an ``autograd.Function``.
    """
    store = _local.store
    return compute() if store is None else store(operation, compute)


def in_checkpointed_layer() -> bool:
    """Return whether the caller runs in a checkpointed layer, in the first pass or the
    recomputation.
    """
    return _local.store is not None


class _SavedLinear(torch.autograd.Function):
    """``torch.nn.functional.linear`` whose result ``selective`` saves."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute a linear layer.

        Args:
            inputs: [..., in]
            weight: [out, in]
            bias: [out]

        Returns:
            [..., out]
        """
        ctx.save_for_backward(inputs, weight)
        ctx.has_bias = bias is not None
        (result,) = save_or_reuse("product", lambda: (linear(inputs, weight, bias),))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        (gradient,) = gradients
        inputs, weight = ctx.saved_tensors
        flat = gradient.flatten(0, -2)
        of_inputs = (flat @ weight).view_as(inputs) if ctx.needs_input_grad[0] else None
        of_weight = flat.t() @ inputs.flatten(0, -2) if ctx.needs_input_grad[1] else None
        of_bias = flat.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return of_inputs, of_weight, of_bias


def _contexts(
    saved: frozenset[Operation], slots: Sequence[_Slots]
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts around a layer's first pass and around its recomputation, which also mark
    the layer as checkpointed.

    Args:
        saved: The operations whose results are saved.
        slots: Host memory for each tensor of attention's results; nothing keeps them on the device.
    """
    kept: deque[Any] = deque()

    def first(operation: Operation, compute: Callable[[], Results]) -> Results:
        computed = compute()
        if operation in saved:
            # Detached, since the returned tensors join the graph, which holds these contexts: a
            # reference cycle.
            results = tuple(tensor.detach() for tensor in computed)
            kept.append(
                [slot.keep(result) for slot, result in zip(slots, results, strict=True)]
                if slots
                else results
            )
        return computed

    def again(operation: Operation, compute: Callable[[], Results]) -> Results:
        if operation not in saved:
            return compute()
        results = kept.popleft()
        if slots:
            results = tuple(slot.take(one) for slot, one in zip(slots, results, strict=True))
        found: Results = results
        return found

    return _with_store(first), _with_store(again)


@contextmanager
def _with_store(store: ResultStore) -> Iterator[None]:
    before, _local.store = _local.store, store
    try:
        yield
    finally:
        _local.store = before


def _linear_layers(layer: nn.Module) -> tuple[list[nn.Linear], list[nn.Linear]]:
    """Return the linear layers within a layer, and the one that ends it, if any.

    The last linear layer beside attention, which some list after it (Falcon-H1), ends it if it
    belongs to a feed-forward block of its own.
    """
    found = [
        (name.rpartition(".")[0], module)
        for name, module in layer.named_modules()
        if type(module) is nn.Linear
    ]
    within = mixing_blocks(layer)
    ending = (
        [module for block, module in found if not f"{block}.".startswith(within)][-1:]
        if len(dict(found)) > 1
        else []
    )
    return [module for _, module in found if module not in ending], ending


def mixing_blocks(layer: nn.Module) -> tuple[str, ...]:
    """Return how names in a layer's blocks begin where tokens meet: transformers tells what has a
    cache its layer's number.

    It tells some feed-forward blocks, too (HunYuan), but these take hidden states alone, neither
    cache nor mask.
    """
    return tuple(
        f"{name}."
        for name, module in layer.named_modules()
        if name
        and hasattr(module, "layer_idx")
        # Its own code, whatever replaces it, takes more than itself and hidden states.
        and len(inspect.signature(type(module).forward).parameters) > 2
    )


def _saved_linear(module: nn.Linear, inputs: Tensor) -> Tensor:
    return apply(_SavedLinear, inputs, module.weight, module.bias)


def _plain_linear(module: nn.Linear, inputs: Tensor) -> Tensor:
    """Compute the linear layer that ends a layer.

    Only an addition follows it, so the recomputation can stop where this layer's inputs are saved.
    torch's own function saves them before it computes. DeepSpeed's, which replaces
    ``nn.functional.linear`` under ZeRO-3, saves them afterwards.
    """
    return linear(inputs, module.weight, module.bias)
