"""Which activations a layer keeps for its backward pass, and which it computes again.

``full`` keeps a layer's input and repeats its whole forward. ``selective`` also keeps what was expensive, the results of its matrix
products and of its attention, and repeats only the rest: norms, rotary embedding, activation products. ``none`` keeps everything.

Keeping is told apart from repeating by the contexts that torch's checkpointing opens around the two passes. torch's own selective
checkpointing counts every operation of both passes and demands that they agree; ZeRO-3 gathers weights inside the layer, now with copies
and now without, so they never do.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch._C._nn import linear  # nn.functional.linear is DeepSpeed's under ZeRO-3
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Policy = Literal["full", "selective", "none"]
Results = tuple[Tensor, ...]
ResultStore = Callable[[Callable[[], Results]], Results]


class _Local(threading.local):
    store: ResultStore | None = None
    """Of the pass that this thread is in: forward runs in the caller's thread, the repetition in autograd's."""


_local = _Local()


def install(causal: PreTrainedModel, policy: Policy) -> None:
    """Make every layer of ``causal`` keep what ``policy`` says."""
    if policy == "none":
        return
    # Not reentrant: that would run ZeRO-3's end-of-backward work several times per backward. There is no dropout to repeat, and
    # whether both passes save equal shapes is what the tests check.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "determinism_check": "none"}
    options["context_fn"] = _selective_contexts if policy == "selective" else _full_contexts
    for layer in causal.modules():
        if hasattr(layer, "gradient_checkpointing") and layer is not causal.base_model:
            inner, ending = _linear_layers(layer)
            for module in ending:
                module.forward = partial(_plain_linear, module)  # type: ignore[method-assign]
            for module in inner if policy == "selective" else ():
                module.forward = partial(_saved_linear, module)  # type: ignore[method-assign]
    causal._set_gradient_checkpointing(True, partial(checkpoint, **options))


def save_or_reuse(compute: Callable[[], Results]) -> Results:
    """The result of ``compute``; in a layer's repetition, what it was the first time. For the forward of an ``autograd.Function``."""
    store = _local.store
    return compute() if store is None else store(compute)


def in_checkpointed_layer() -> bool:
    """Whether this is in a layer whose forward is repeated, in the first pass or the second."""
    return _local.store is not None


class SavedLinear(torch.autograd.Function):
    """``torch.nn.functional.linear``, whose result is saved under ``selective``."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``inputs``: [..., in], ``weight``: [out, in], ``bias``: [out]; the result: [..., out]."""
        ctx.save_for_backward(inputs, weight)
        ctx.has_bias = bias is not None
        (result,) = save_or_reuse(lambda: (linear(inputs, weight, bias),))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (gradient,) = gradients
        inputs, weight = ctx.saved_tensors
        flat = gradient.flatten(0, -2)
        of_inputs = (flat @ weight).view_as(inputs) if ctx.needs_input_grad[0] else None
        of_weight = flat.t() @ inputs.flatten(0, -2) if ctx.needs_input_grad[1] else None
        of_bias = flat.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return of_inputs, of_weight, of_bias


def _selective_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Around a layer's first pass and around its repetition, in torch's terms."""
    saved: deque[Results] = deque()

    def first(compute: Callable[[], Results]) -> Results:
        computed = compute()
        # Detached: what is returned becomes part of the graph, which holds these contexts, and so would keep itself alive.
        saved.append(tuple(tensor.detach() for tensor in computed))
        return computed

    def again(compute: Callable[[], Results]) -> Results:
        return saved.popleft()

    return _with_store(first), _with_store(again)


def _full_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    def computed(compute: Callable[[], Results]) -> Results:
        return compute()

    return _with_store(computed), _with_store(computed)


@contextmanager
def _with_store(store: ResultStore) -> Iterator[None]:
    before, _local.store = _local.store, store
    try:
        yield
    finally:
        _local.store = before


def _linear_layers(layer: nn.Module) -> tuple[list[nn.Linear], list[nn.Linear]]:
    """Those within a layer, and the one that ends it: the last of a feed-forward block that has its own, after attention."""
    found = [(name.rpartition(".")[0], module) for name, module in layer.named_modules() if type(module) is nn.Linear]
    modules = [module for _, module in found]
    ends = len({block for block, _ in found}) > 1
    return (modules[:-1], modules[-1:]) if ends else (modules, [])


def _saved_linear(module: nn.Linear, inputs: Tensor) -> Tensor:
    result: Tensor = SavedLinear.apply(inputs, module.weight, module.bias)  # type: ignore[no-untyped-call]
    return result


def _plain_linear(module: nn.Linear, inputs: Tensor) -> Tensor:
    """For the product that ends a layer. Nothing but a sum comes after it, so the repetition stops where its inputs are saved: before it
    is computed, if it is torch's own, which saves first. DeepSpeed's, which ``nn.functional.linear`` is under ZeRO-3, saves afterwards.
    """
    return linear(inputs, module.weight, module.bias)
