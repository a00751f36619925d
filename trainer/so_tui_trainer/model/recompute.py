"""Activation checkpointing: which activations a layer saves for its backward pass, and which it recomputes.

``full`` saves a layer's input and repeats its whole forward pass. ``attention`` also saves attention's results, which cost the most where
documents are long. ``selective`` saves those of matrix products as well, and repeats only norms, rotary embedding and activation functions.
``none`` saves everything.

The contexts that torch's checkpointing opens around both passes decide whether a result is saved or reused. torch's own selective
checkpointing counts the operations of both passes and requires equal counts; with ZeRO-3, which all-gathers weights inside a layer with a
varying number of copies, they never are.
"""

from __future__ import annotations

import inspect
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch._C._nn import linear  # nn.functional.linear is DeepSpeed's under ZeRO-3
from torch.utils.checkpoint import checkpoint

from so_tui_trainer.model.host_activations import HostActivations
from so_tui_trainer.model.matching import decoder_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Policy = Literal["full", "attention", "selective", "none"]
Operation = Literal["attention", "product"]
"""Operations whose results a policy may save; ``product`` includes what belongs to products, such as the routing of experts."""
Results = tuple[Tensor, ...]
"""What an operation computes."""
ResultStore = Callable[[Operation, Callable[[], Results]], Results]
"""Runs an operation in the first pass; returns its saved results in the recomputation, if the policy saves them."""

_SAVED: dict[Policy, frozenset[Operation]] = {
    "full": frozenset(),
    "attention": frozenset({"attention"}),
    "selective": frozenset({"attention", "product"}),
}


class SavedResults(Protocol):
    """Keeps what one layer saves from its first pass until its recomputation."""

    def save(self, results: Results) -> None: ...

    def reuse(self) -> Results:
        """Return, and forget, the results that were saved first."""


class _OnGpu:
    """Keeps them where they were computed."""

    def __init__(self) -> None:
        self._results: deque[Results] = deque()

    def save(self, results: Results) -> None:
        self._results.append(results)

    def reuse(self) -> Results:
        return self._results.popleft()


class _Local(threading.local):
    store: ResultStore | None = None
    """The store of the pass that this thread runs. Forward runs in the caller's thread, the recomputation in autograd's."""


_local = _Local()


def checkpointed_layers(causal: PreTrainedModel) -> list[nn.Module]:
    """Return the layers that can be checkpointed."""
    return [
        module
        for module in causal.modules()
        if hasattr(module, "gradient_checkpointing") and module is not decoder_of(causal)
    ]


def install(causal: PreTrainedModel, policy: Policy, host: HostActivations | None = None) -> None:
    """Make every layer of ``causal`` save what ``policy`` says, and in ``host``, if given, its input and what else that has room for."""
    if policy == "none":
        return
    # Not reentrant, which would run ZeRO-3's end-of-backward work several times per backward pass. There is no dropout to repeat, but some
    # routers draw random numbers. The tests check that both passes save equal shapes.
    options: dict[str, Any] = {
        "use_reentrant": False,
        "preserve_rng_state": _draws(causal.config),
        "determinism_check": "none",
    }
    options["context_fn"] = partial(
        _contexts, _SAVED[policy], host.results if host and host.keeps_results else _OnGpu
    )
    for layer in checkpointed_layers(causal):
        inner, ending = _linear_layers(layer)
        for module in ending:
            module.forward = partial(_plain_linear, module)  # type: ignore[method-assign]
        for module in inner if policy == "selective" else ():
            module.forward = partial(_saved_linear, module)  # type: ignore[method-assign]
    run = partial(checkpoint, **options)
    causal._set_gradient_checkpointing(True, partial(host.checkpoint, run) if host else run)


def _draws(config: PretrainedConfig) -> bool:
    """Return whether routers draw random numbers in training: noise (Mixtral, if asked for), or the experts themselves (Phi-3.5-MoE)."""
    return any(value for name, value in config.to_dict().items() if "jitter" in name)


def save_or_reuse(operation: Operation, compute: Callable[[], Results]) -> Results:
    """Return the result of ``compute``, or its result in the first pass if a layer is being recomputed that saves such results.

    To be called from the forward of an ``autograd.Function``.
    """
    store = _local.store
    return compute() if store is None else store(operation, compute)


def in_checkpointed_layer() -> bool:
    """Return whether the caller runs in a checkpointed layer, in the first pass or the recomputation."""
    return _local.store is not None


class SavedLinear(torch.autograd.Function):
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
    def backward(
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (gradient,) = gradients
        inputs, weight = ctx.saved_tensors
        flat = gradient.flatten(0, -2)
        of_inputs = (flat @ weight).view_as(inputs) if ctx.needs_input_grad[0] else None
        of_weight = flat.t() @ inputs.flatten(0, -2) if ctx.needs_input_grad[1] else None
        of_bias = flat.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return of_inputs, of_weight, of_bias


def _contexts(
    saved: frozenset[Operation], made: Callable[[], SavedResults]
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts around a layer's first pass and around its recomputation, which also mark the layer as checkpointed."""
    results = made()

    def first(operation: Operation, compute: Callable[[], Results]) -> Results:
        computed = compute()
        if operation in saved:
            # Detached, since the returned tensors join the graph, which holds these contexts: a reference cycle.
            results.save(tuple(tensor.detach() for tensor in computed))
        return computed

    def again(operation: Operation, compute: Callable[[], Results]) -> Results:
        return results.reuse() if operation in saved else compute()

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

    The last linear layer beside attention, which some list after it (Falcon-H1), ends it if it belongs to a feed-forward block of its own.
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
    """Return how names in a layer's blocks begin where tokens meet: transformers tells what has a cache its layer's number.

    It tells some feed-forward blocks, too (HunYuan), but these take hidden states alone, neither cache nor mask.
    """
    return tuple(
        f"{name}."
        for name, module in layer.named_modules()
        if name and hasattr(module, "layer_idx") and _takes_more(module)
    )


def _takes_more(module: nn.Module) -> bool:
    """Return whether a module's own code, whatever replaces it, takes more than itself and hidden states."""
    return len(inspect.signature(type(module).forward).parameters) > 2


def _saved_linear(module: nn.Linear, inputs: Tensor) -> Tensor:
    result: Tensor = SavedLinear.apply(inputs, module.weight, module.bias)  # type: ignore[no-untyped-call]
    return result


def _plain_linear(module: nn.Linear, inputs: Tensor) -> Tensor:
    """Compute the linear layer that ends a layer.

    Only an addition follows it, so the recomputation can stop where this layer's inputs are saved. torch's own function saves them before
    it computes. DeepSpeed's, which replaces ``nn.functional.linear`` under ZeRO-3, saves them afterwards.
    """
    return linear(inputs, module.weight, module.bias)
