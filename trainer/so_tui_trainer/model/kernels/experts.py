"""A mixture of experts in few passes over memory, and what each pass needs in backward.

Every token meets k experts, so T tokens are T x k pairs. Their rows are put in order of the experts and multiplied in groups. The routing
weight is multiplied in with the gate, between the two products, where rows are narrow; nothing then needs the second product's result
again. Nothing here waits for the GPU: how many rows an expert has stays there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from so_tui_trainer.model.recompute import in_checkpointed_layer, save_or_reuse


class Routing(NamedTuple):
    """Which row belongs to which pair, and to which expert; whole numbers on the device."""

    order: Tensor
    """[pairs]: the pair (token x k + choice) of each row."""
    row_of_pair: Tensor
    """[tokens, k]: the row of each pair."""
    ends: Tensor
    """[experts]: one past each expert's last row."""


class Gate(NamedTuple):
    """How the first product becomes the second one's input: min(gate, limit) sigmoid(alpha gate) (up within +-limit, plus shift)."""

    interleaved: bool = False
    """Gate and up take turns in a row, instead of one half each."""
    alpha: float = 1.0
    limit: float = float("inf")
    shift: float = 0.0


class Weights(NamedTuple):
    """Of all experts of a layer."""

    first: Tensor
    """Gate and up projection: [experts, 2 width, hidden], or [experts, hidden, 2 width] if ``inputs_first``."""
    second: Tensor
    """[experts, hidden, width], or [experts, width, hidden]."""
    first_bias: Tensor | None
    """[experts, 2 width]"""
    second_bias: Tensor | None
    """[experts, hidden]"""
    inputs_first: bool


def mixture(hidden: Tensor, chosen: Tensor, shares: Tensor, weights: Weights, gate: Gate) -> Tensor:
    """``hidden``: [tokens, hidden], ``chosen``: [tokens, k] experts, each once, ``shares``: [tokens, k] their weights; like ``hidden``.

    Routers may leave ``shares`` in fp32 where all else is bf16.
    """
    # Kept in a layer's repetition, since the products that are kept lie in this order.
    routing = Routing(*save_or_reuse(lambda: route(chosen, len(weights.first))))
    rows = _Spread.apply(hidden, routing)  # type: ignore[no-untyped-call]
    products = _Product.apply(rows, weights.first, routing.ends, weights.inputs_first)  # type: ignore[no-untyped-call]
    narrow = gated(products, shares, weights.first_bias, routing, gate)
    shared_bias = None
    if weights.second_bias is not None:
        by_expert = shares.new_zeros(len(shares), len(weights.second)).scatter(1, chosen, shares)
        shared_bias = by_expert.to(weights.second_bias.dtype) @ weights.second_bias
    rows = _second_product(narrow, weights, routing.ends)
    result: Tensor = _Collected.apply(rows, routing)  # type: ignore[no-untyped-call]
    return result if shared_bias is None else result + shared_bias


def _second_product(narrow: Tensor, weights: Weights, ends: Tensor) -> Tensor:
    if in_checkpointed_layer():
        # torch's own saves its inputs before it computes, and nothing after it saves anything: the repetition of a layer ends here.
        return grouped_mm(narrow, weights.second if weights.inputs_first else weights.second.transpose(-2, -1), offs=ends)
    result: Tensor = _Product.apply(narrow, weights.second, ends, weights.inputs_first)  # type: ignore[no-untyped-call]
    return result


@torch.no_grad()
def route(chosen: Tensor, experts: int) -> Routing:
    """Rows in order of the experts, and of the tokens within each; ``chosen``: [tokens, k]."""
    expert, order = chosen.flatten().to(torch.int16).sort(stable=True)  # a GPU sorts by digits: narrow numbers take fewer passes
    row_of_pair = torch.empty_like(order)
    row_of_pair[order] = torch.arange(len(order), device=order.device)
    ends = torch.searchsorted(expert, torch.arange(experts, device=expert.device, dtype=expert.dtype), right=True, out_int32=True)
    return Routing(order, row_of_pair.view(chosen.shape), ends)


class _Spread(torch.autograd.Function):
    """A row for each pair, in order of the experts."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, routing: Routing) -> Tensor:
        ctx.routing = routing
        return hidden.index_select(0, routing.order // routing.row_of_pair.shape[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _sums(gradients[0], ctx.routing.row_of_pair), None


class _Collected(torch.autograd.Function):
    """The sum of each token's rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, routing: Routing) -> Tensor:
        ctx.routing = routing  # not saved in autograd's terms: that would make a repetition come this far
        return _sums(rows, routing.row_of_pair)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].index_select(0, ctx.routing.order // ctx.routing.row_of_pair.shape[1]), None


def _sums(rows: Tensor, row_of_pair: Tensor) -> Tensor:
    if rows.is_cuda:
        from so_tui_trainer.model.kernels import cuda_experts

        return cuda_experts.sums(rows, row_of_pair)
    return rows.index_select(0, row_of_pair.flatten()).view(*row_of_pair.shape, -1).sum(1)


class _Product(torch.autograd.Function):
    """Each expert's rows times its matrix; the result is kept under ``selective``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor, inputs_first: bool) -> Tensor:
        # The weight itself is saved, not a view, which would hold what ZeRO-3 has gathered.
        ctx.save_for_backward(rows, weight, ends)
        ctx.inputs_first = inputs_first
        (result,) = save_or_reuse(lambda: (grouped_mm(rows, weight if inputs_first else weight.transpose(-2, -1), offs=ends),))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weight, ends = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        of_rows = grouped_mm(gradient, weight.transpose(-2, -1) if ctx.inputs_first else weight, offs=ends)
        left, right = (rows, gradient) if ctx.inputs_first else (gradient, rows)
        return of_rows, grouped_mm(left.t(), right, offs=ends), None, None


def gated(products: Tensor, shares: Tensor, bias: Tensor | None, routing: Routing, gate: Gate) -> Tensor:
    """``products``: [pairs, 2 width] in order of the experts, without their ``bias``; [pairs, width], each times its share."""
    result: Tensor = _Gated.apply(products, shares, bias, routing, gate)  # type: ignore[no-untyped-call]
    return result


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, products: Tensor, shares: Tensor, bias: Tensor | None, routing: Routing, gate: Gate) -> Tensor:
        ctx.save_for_backward(products, shares, bias)
        ctx.routing, ctx.gate = routing, gate
        if products.is_cuda:
            from so_tui_trainer.model.kernels import cuda_experts

            return cuda_experts.gated(products, shares, routing.order, *_bias(bias, routing), gate)
        gates, ups = _limited(_halves(products if bias is None else products + bias[_experts(routing)], gate), gate)
        share = shares.flatten()[routing.order][:, None]
        return (gates * (gates * gate.alpha).sigmoid() * (ups + gate.shift) * share).to(products.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        (gradient,) = gradients
        products, shares, bias = ctx.saved_tensors
        if products.is_cuda:
            from so_tui_trainer.model.kernels import cuda_experts

            of_products, of_shares = cuda_experts.gated_backward(
                gradient, products, shares, ctx.routing.order, *_bias(bias, ctx.routing), ctx.gate
            )
        else:
            of_products, of_shares = _gated_backward(gradient, products, shares, bias, ctx.routing, ctx.gate)
        return of_products, of_shares, None if bias is None else _of_bias(of_products, ctx.routing), None, None


def _gated_backward(
    gradient: Tensor, products: Tensor, shares: Tensor, bias: Tensor | None, routing: Routing, gate: Gate
) -> tuple[Tensor, Tensor]:
    own = _halves(products if bias is None else products + bias[_experts(routing)], gate)
    gates, ups = _limited(own, gate)
    share = shares.flatten()[routing.order][:, None]
    sigmoid = (gates * gate.alpha).sigmoid()
    activated, shifted = gates * sigmoid, ups + gate.shift
    of_shares = torch.empty_like(shares).flatten()
    of_shares[routing.order] = (gradient * activated * shifted).sum(-1, dtype=shares.dtype)
    of_gates = gradient * share * shifted * sigmoid * (1 + gate.alpha * gates * (1 - sigmoid)) * (own[0] <= gate.limit)
    of_ups = gradient * share * activated * (own[1].abs() <= gate.limit)
    of_products = torch.empty_like(products)
    for part, found in zip(_halves(of_products, gate), (of_gates, of_ups), strict=True):
        part.copy_(found)
    return of_products, of_shares.view_as(shares)


def _of_bias(of_products: Tensor, routing: Routing) -> Tensor:
    """The sums over each expert's rows, [experts, columns]: a product with ones, since rows of one expert added one by one take long."""
    experts = torch.arange(len(routing.ends), device=of_products.device)[:, None]
    return (experts == _experts(routing)).to(of_products.dtype) @ of_products


def _experts(routing: Routing) -> Tensor:
    """[pairs]: the expert of each row."""
    return torch.searchsorted(routing.ends, torch.arange(len(routing.order), device=routing.ends.device, dtype=torch.int32), right=True)


def _limited(halves: tuple[Tensor, ...], gate: Gate) -> tuple[Tensor, Tensor]:
    gates, ups = halves
    return gates.clamp(max=gate.limit), ups.clamp(-gate.limit, gate.limit)


def _halves(products: Tensor, gate: Gate) -> tuple[Tensor, ...]:
    return (products[:, ::2], products[:, 1::2]) if gate.interleaved else products.chunk(2, -1)


def _bias(bias: Tensor | None, routing: Routing) -> tuple[Tensor | None, Tensor | None]:
    """The bias, and the expert of each row, which only the bias asks for."""
    return (None, None) if bias is None else (bias.contiguous(), _experts(routing))
