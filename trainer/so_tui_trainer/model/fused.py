"""Fused kernels for norms, rotary embedding, gated activation and experts, which transformers
computes in many passes over memory.

A part of the model is replaced only if it computes the same: its own code first runs beside ours on
a few random numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from so_tui_trainer.model import Gradients, apply
from so_tui_trainer.model.checkpointing import checkpointed_layers, mixing_blocks
from so_tui_trainer.model.experts import Weights, mixture
from so_tui_trainer.model.kernels import Gate, gated, rotate

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def install_kernels(causal: PreTrainedModel) -> None:
    """Replace the parts of ``causal`` for which a kernel is exact."""
    install_norms(causal)
    install_gates(causal)
    install_experts(causal)
    install_rotary(causal)


def install_norms(causal: nn.Module) -> None:
    """Replace RMS norms where the kernel is exact."""
    _replace_modules(causal, _is_rms_norm, _rms_norm)


def install_gates(causal: nn.Module) -> None:
    """Replace gated activations where the kernel is exact."""
    for shapes, ours in _MLPS:
        _replace_modules(causal, partial(_is_mlp, shapes, ours), ours)


def install_experts(causal: nn.Module) -> None:
    """Replace mixtures of experts where ours compute the same."""
    _replace_modules(causal, _is_mixture, _mixture)


def _replace_modules(
    causal: nn.Module,
    same: Callable[[type[nn.Module], nn.Module], bool],
    forward: Callable[..., Tensor],
) -> None:
    checked: dict[type[nn.Module], bool] = {}
    for module in causal.modules():
        kind = type(module)
        if kind not in checked:
            checked[kind] = same(kind, module)
        if checked[kind]:
            module.forward = partial(forward, module)


def _rms_norm(module: Any, hidden: Tensor) -> Tensor:
    return nn.functional.rms_norm(hidden, hidden.shape[-1:], module.weight, module.variance_epsilon)


def _gated_mlp(module: Any, hidden: Tensor) -> Tensor:
    result: Tensor = module.down_proj(gated(module.gate_proj(hidden), module.up_proj(hidden)))
    return result


def _stacked_gated_mlp(module: Any, hidden: Tensor) -> Tensor:
    """Compute an MLP whose gate and up projections are one matrix (Phi)."""
    gate, up = module.gate_up_proj(hidden).chunk(2, dim=-1)
    result: Tensor = module.down_proj(gated(gate, up))
    return result


def _mixture(module: Any, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    biases = getattr(module, "gate_up_proj_bias", None), getattr(module, "down_proj_bias", None)
    return mixture(
        hidden,
        chosen,
        shares,
        Weights(module.gate_up_proj, module.down_proj, *biases, module.is_transposed),
        Gate(interleaved=True, alpha=float(module.alpha), limit=float(module.limit), shift=1.0)
        if hasattr(module, "limit") and hasattr(module, "alpha")  # gpt-oss
        else Gate(),
    )


def _is_rms_norm(kind: type[nn.Module], module: nn.Module) -> bool:
    names = [name for name, _ in module.named_parameters()]
    if (
        not kind.__name__.endswith("RMSNorm")
        or names != ["weight"]
        or not hasattr(module, "variance_epsilon")
    ):
        return False
    stand_in = SimpleNamespace(weight=_random(8), variance_epsilon=1e-3)
    return _agree(kind.forward, _rms_norm, stand_in, _random(3, 8))


_Shapes = dict[str, tuple[int, int]]
_MLPS: tuple[tuple[_Shapes, Callable[..., Tensor]], ...] = (
    ({"gate_proj": (8, 6), "up_proj": (8, 6), "down_proj": (6, 8)}, _gated_mlp),
    ({"gate_up_proj": (8, 12), "down_proj": (6, 8)}, _stacked_gated_mlp),
)
"""(in, out) of the projections that a class is checked with, and its replacement."""


def _is_mlp(
    shapes: _Shapes, ours: Callable[..., Tensor], kind: type[nn.Module], module: nn.Module
) -> bool:
    """Return whether a class computes what ``ours`` does.

    Args:
        shapes: (in, out) of the stand-in's projections, which must be all of the module's
            parameters.
        ours: The replacement.
        kind: The class.
        module: A module of the class; its activation function is used.
    """
    children = dict(module.named_children())
    if not all(type(children.get(name)) is nn.Linear for name in shapes):
        return False
    if {name.split(".")[0] for name, _ in module.named_parameters()} != set(shapes):
        return False
    # Functions on tensors instead of modules, which ZeRO-3 would shard.
    projections: dict[str, Any] = {
        name: partial(nn.functional.linear, weight=_random(*reversed(shape)))
        for name, shape in shapes.items()
    }
    rest = {name: child for name, child in children.items() if name not in shapes}
    stand_in = SimpleNamespace(**_settings(module), **rest, **projections)
    return _agree(kind.forward, ours, stand_in, _random(3, 8))


def _settings(module: nn.Module) -> dict[str, Any]:
    """Return the module's attributes besides its parameters, with limits so low that the random
    numbers reach them.
    """
    return {
        name: 1.0 if name.endswith("limit") and isinstance(value, int | float) else value
        for name, value in vars(module).items()
        if not name.startswith("_") and name != "forward"
    }


def _is_mixture(kind: type[nn.Module], module: nn.Module) -> bool:
    names = {name for name, _ in module.named_parameters()}
    if names - {"gate_up_proj_bias", "down_proj_bias"} != {
        "gate_up_proj",
        "down_proj",
    } or not hasattr(module, "is_transposed"):
        return False
    experts, size, width = 4, 8, 12
    first, second = (size, 2 * width), (width, size)
    if not module.is_transposed:
        first, second = first[::-1], second[::-1]
    shapes: dict[str, tuple[int, ...]] = {
        "gate_up_proj": (experts, *first),
        "down_proj": (experts, *second),
        "gate_up_proj_bias": (experts, 2 * width),
        "down_proj_bias": (experts, size),
    }
    weights = {name: _random(*shapes[name]).float() for name in names}
    children = dict(module.named_children())
    settings = _settings(module) | {
        "num_experts": experts,
        "config": SimpleNamespace(_experts_implementation="eager"),
    }
    stand_in = SimpleNamespace(**settings, **children, **weights)
    stand_in._apply_gate = partial(getattr(kind, "_apply_gate", None) or nn.Identity(), stand_in)
    # Only experts 0, 1 and 3, since an expert may have no token. Grouped products do not support
    # float64.
    hidden = 4 * _random(3, 8).float()
    chosen = torch.tensor([[1, 0], [3, 1], [0, 3]], device="cpu")
    return _agree(
        kind.forward,
        _mixture,
        stand_in,
        hidden,
        chosen,
        0.1 * _random(3, 2).float(),
        tolerance=1e-4,
    )


def install_rotary(causal: PreTrainedModel) -> None:
    """Replace the rotary embedding in the model's own module of transformers, where the kernel is
    exact.
    """
    module: Any = sys.modules[type(causal).__module__]
    theirs = getattr(module, "apply_rotary_pos_emb", None)
    if theirs is None or getattr(theirs, "func", None) is _rotate_both:
        return
    query, key, cos, sin = (
        _random(*shape) for shape in ((2, 4, 3, 8), (2, 2, 3, 8), (2, 3, 4), (2, 3, 4))
    )
    # Most models repeat the cosines for both halves of a head; gpt-oss does not.
    for copies in (2, 1):
        ours = partial(_rotate_both, theirs, copies)
        angles = (torch.cat([half] * copies, -1) for half in (cos, sin))
        if _agree(_first_of(theirs), _first_of(ours), query, key, *angles):
            module.apply_rotary_pos_emb = ours
            return


def _first_of(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Tensor]:
    return lambda *arguments: torch.cat([result.flatten() for result in function(*arguments)])


def _rotate_both(
    theirs: Callable[..., tuple[Tensor, Tensor]],
    copies: int,
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    """Replace transformers' ``apply_rotary_pos_emb`` for whole heads; ``theirs`` handles rarer
    cases (part of a head, another layout).
    """
    if unsqueeze_dim != 1 or 2 * cos.shape[-1] != copies * query.shape[-1]:
        return theirs(query, key, cos, sin, unsqueeze_dim=unsqueeze_dim)
    return rotate(query, cos, sin), rotate(key, cos, sin)


def _agree(
    theirs: Callable[..., Tensor],
    ours: Callable[..., Tensor],
    *arguments: Any,
    tolerance: float = 1e-6,
) -> bool:
    """Return whether both functions give the same result on the CPU; False if the other one cannot
    be called like this.
    """
    try:
        with torch.no_grad():
            expected = theirs(*arguments)
    except (AttributeError, TypeError, RuntimeError):
        return False
    # Both compute in fp32 internally.
    return torch.allclose(expected, ours(*arguments), rtol=1e-5, atol=tolerance)


def _random(*shape: int) -> Tensor:
    return torch.randn(
        shape,
        generator=torch.Generator().manual_seed(sum(shape)),
        dtype=torch.float64,
        device="cpu",
    )


# Feed-forward blocks and norms in tiles of tokens: what they compute from a long sequence never
# exists as a whole.
#
# Forward computes one tile of tokens after the other. Backward computes each again, with its
# gradients, and sums the weights' gradients in float32. ZeRO-3 sees one gradient a parameter,
# whatever the number of tiles; no tile communicates, so that ranks need not have as many. Where a
# layer is recomputed its feed-forward block is not, if it comes last: its input is all that
# backward needs. Only the block's last product is computed once more than without tiles.
#
# transformers' own norms make float32 copies of their input, and save them. Those that are one
# kernel (torch's, and the ones that ``kernels`` installs) do not, and stay whole.


_LINEAR = (nn.Linear, Conv1D)
Block = Callable[[Tensor], Tensor]
"""Computes a feed-forward block or a norm: [1, tokens, hidden] to the same."""


def install_tiles(causal: PreTrainedModel, tile_tokens: int) -> int:
    """Make dense feed-forward blocks, and the norms of their layers, compute ``tile_tokens`` tokens
    at a time.

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
    """Return the norms around a layer's blocks that are more than one kernel. Those of queries and
    keys are within attention.
    """
    return [
        module
        for module in layer.children()
        if type(module).__name__.endswith("Norm")
        and not list(module.children())
        and type(module) not in (nn.LayerNorm, nn.RMSNorm)
        # As ``install_kernels`` makes it.
        and getattr(module.forward, "func", None) is not _rms_norm
    ]


def _feed_forward(layer: nn.Module) -> nn.Module | None:
    """Return a layer's last block beside attention, if it has nothing but linear layers and
    functions, so that tokens do not meet in it.

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
    kept = apply(_Keep, rows, keeper)
    return apply(_Tiles, kept, run, keeper[0], tile_tokens, *parameters).view_as(inputs)


class _Keep(torch.autograd.Function):
    """The identity, which saves the input of ``_Tiles`` before that computes: a recomputation ends
    where the last input is saved.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, keeper: list[Any]) -> Tensor:
        ctx.save_for_backward(inputs)
        keeper.append(ctx)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
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
        ctx.run = run
        ctx.keeper = keeper
        ctx.tile_tokens = tile_tokens
        ctx.parameters = parameters
        return _forward(run, tile_tokens, inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        (inputs,) = ctx.keeper.saved_tensors
        trained = [parameter for parameter in ctx.parameters if parameter.requires_grad]
        sums = [
            torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
            for parameter in trained
        ]
        of_inputs = torch.empty_like(inputs)
        for tile in _tiles(inputs.shape[1], ctx.tile_tokens):
            with torch.enable_grad():
                part = inputs[:, tile].detach().requires_grad_()
                result = ctx.run(part)
            of_part, *of_parameters = torch.autograd.grad(
                result, (part, *trained), gradients[0][:, tile]
            )
            of_inputs[:, tile] = of_part
            for total, gradient in zip(sums, of_parameters, strict=True):
                total += gradient
        totals = iter(sums)
        of_weights = (
            next(totals).to(parameter.dtype) if parameter.requires_grad else None
            for parameter in ctx.parameters
        )
        return of_inputs, None, None, None, *of_weights


def _forward(run: Block, tile_tokens: int, inputs: Tensor) -> Tensor:
    first = run(inputs[:, :tile_tokens])
    result = first.new_empty(inputs.shape)
    result[:, :tile_tokens] = first
    for tile in _tiles(inputs.shape[1], tile_tokens, tile_tokens):
        result[:, tile] = run(inputs[:, tile])
    return result


def _tiles(tokens: int, tile_tokens: int, first: int = 0) -> Iterator[slice]:
    for start in range(first, tokens, tile_tokens):
        yield slice(start, min(start + tile_tokens, tokens))
