"""Feed-forward blocks and norms in tiles of tokens: what they compute from a long sequence never exists as a whole.

Forward computes one tile of tokens after the other. Backward computes each again, with its gradients, and sums the weights' gradients in
float32. ZeRO-3 sees one gradient a parameter, whatever the number of tiles; no tile communicates, so that ranks need not have as many.
Where a layer is recomputed its feed-forward block is not, if it comes last: its input is all that backward needs. Only the block's last
product is computed once more than without tiles.

transformers' own norms make float32 copies of their input, and save them. Those that are one kernel (torch's, and the ones that
``kernels`` installs) do not, and stay whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from so_tui_trainer.model.kernels import is_fused_norm
from so_tui_trainer.model.recompute import checkpointed_layers, mixing_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LINEAR = (nn.Linear, Conv1D)
Block = Callable[[Tensor], Tensor]
"""Computes a feed-forward block or a norm: [1, tokens, hidden] to the same."""


def install(causal: PreTrainedModel, tile_tokens: int) -> int:
    """Make dense feed-forward blocks, and the norms of their layers, compute ``tile_tokens`` tokens at a time.

    Call it after ``kernels.install``, which decides what norms there are to cut.

    Returns:
        The number of feed-forward blocks.
    """
    found = [
        (layer, block)
        for layer in checkpointed_layers(causal)
        if (block := _feed_forward(layer)) is not None
    ]
    for layer, block in found:
        for module in (block, *_norms(layer)):
            module.forward = partial(
                _tiled, module.forward, tuple(module.parameters()), tile_tokens
            )
    return len(found)


def _norms(layer: nn.Module) -> list[nn.Module]:
    """Return the norms around a layer's blocks that are more than one kernel. Those of queries and keys are within attention."""
    named = [
        module
        for module in layer.children()
        if type(module).__name__.endswith("Norm") and not list(module.children())
    ]
    whole = (nn.LayerNorm, nn.RMSNorm)
    return [module for module in named if type(module) not in whole and not is_fused_norm(module)]


def _feed_forward(layer: nn.Module) -> nn.Module | None:
    """Return a layer's last block beside attention, if it has nothing but linear layers and functions, so that tokens do not meet in it.

    Some layers list attention after it (Falcon-H1).
    """
    parents = [
        name.rpartition(".")[0] for name, module in layer.named_modules() if type(module) in _LINEAR
    ]
    if len(set(filter(None, parents))) < 2:
        return None
    within = mixing_blocks(layer)
    blocks = [parent for parent in parents if parent and not f"{parent}.".startswith(within)]
    if not blocks:
        return None
    found = layer.get_submodule(blocks[-1])
    plain = all(
        type(module) in _LINEAR or not list(module.parameters(recurse=False))
        for module in found.modules()
    )
    return found if plain and blocks.count(blocks[-1]) > 1 else None


def _tiled(
    run: Block, parameters: tuple[nn.Parameter, ...], tile_tokens: int, inputs: Tensor
) -> Tensor:
    rows = inputs.reshape(1, -1, inputs.shape[-1])
    if rows.shape[1] <= tile_tokens:
        return run(inputs)
    if not torch.is_grad_enabled():
        return _forward(run, tile_tokens, rows).view_as(inputs)
    keeper: list[Any] = []
    kept = _Keep.apply(rows, keeper)  # type: ignore[no-untyped-call]
    result: Tensor = _Tiles.apply(kept, run, keeper[0], tile_tokens, *parameters)  # type: ignore[no-untyped-call]
    return result.view_as(inputs)


class _Keep(torch.autograd.Function):
    """The identity, which saves the input of ``_Tiles`` before that computes: a recomputation ends where the last input is saved."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, keeper: list[Any]) -> Tensor:
        ctx.save_for_backward(inputs)
        keeper.append(ctx)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        run: Block,
        keeper: Any,
        tile_tokens: int,
        *parameters: nn.Parameter,
    ) -> Tensor:
        ctx.run, ctx.keeper, ctx.tile_tokens, ctx.parameters = run, keeper, tile_tokens, parameters
        return _forward(run, tile_tokens, inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (inputs,) = ctx.keeper.saved_tensors
        trained = [parameter for parameter in ctx.parameters if parameter.requires_grad]
        sums = {
            id(parameter): torch.zeros_like(
                parameter, dtype=torch.promote_types(parameter.dtype, torch.float32)
            )
            for parameter in trained
        }
        of_inputs = torch.empty_like(inputs)
        for tile in _tiles(inputs.shape[1], ctx.tile_tokens):
            with torch.enable_grad():
                part = inputs[:, tile].detach().requires_grad_()
                result = ctx.run(part)
            of_part, *of_parameters = torch.autograd.grad(
                result, (part, *trained), gradients[0][:, tile]
            )
            of_inputs[:, tile] = of_part
            for parameter, gradient in zip(trained, of_parameters, strict=True):
                sums[id(parameter)] += gradient
        of_weights = (
            sums[id(parameter)].to(parameter.dtype) if id(parameter) in sums else None
            for parameter in ctx.parameters
        )
        return of_inputs, None, None, None, *of_weights


def _forward(run: Block, tile_tokens: int, inputs: Tensor) -> Tensor:
    first = run(inputs[:, :tile_tokens])
    result = torch.empty(inputs.shape, dtype=first.dtype, device=first.device)
    result[:, :tile_tokens] = first
    for tile in _tiles(inputs.shape[1], tile_tokens, tile_tokens):
        result[:, tile] = run(inputs[:, tile])
    return result


def _tiles(tokens: int, tile_tokens: int, first: int = 0) -> Iterator[slice]:
    for start in range(first, tokens, tile_tokens):
        yield slice(start, min(start + tile_tokens, tokens))
