"""A mixture of experts in few passes over memory, with its backward pass.

Every token is routed to k experts, so T tokens make T x k pairs. Their rows are sorted by expert
and multiplied in groups. The routing weight is multiplied in with the gate, between the two
products, where rows are narrow, so nothing needs the second product's result again. Nothing here
waits for the GPU: the number of rows of each expert stays on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from so_tui.spec.errors import reject
from so_tui_trainer.model import Gradients, apply, same_in_all_layers
from so_tui_trainer.model.checkpointing import in_checkpointed_layer, save_or_reuse
from so_tui_trainer.model.kernels import Gate
from so_tui_trainer.model.weights import decoder_of
from so_tui_trainer.older_versions import grouped_mm

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Routing(NamedTuple):
    """Which pair and which expert a row belongs to; integers on the device."""

    order: Tensor
    """[pairs]; the pair (token x k + choice) of each row"""
    row_of_pair: Tensor
    """[tokens, k]; the row of each pair"""
    ends: Tensor
    """[experts]; one past each expert's last row"""


class Weights(NamedTuple):
    """Weights of all experts of a layer."""

    first: Tensor
    """Gate and up projection: [experts, 2 width, hidden], or [experts, hidden, 2 width] with
    ``inputs_first``.
    """
    second: Tensor
    """Down projection: [experts, hidden, width], or [experts, width, hidden] with
    ``inputs_first``.
    """
    first_bias: Tensor | None
    """[experts, 2 width]"""
    second_bias: Tensor | None
    """[experts, hidden]"""
    inputs_first: bool


def mixture(hidden: Tensor, chosen: Tensor, shares: Tensor, weights: Weights, gate: Gate) -> Tensor:
    """Compute a layer of experts.

    Args:
        hidden: [tokens, hidden]
        chosen: [tokens, k] int64; distinct experts of each token
        shares: [tokens, k] routing weights; may be fp32 where all else is bf16
        weights: The experts' weights.
        gate: The activation.

    Returns:
        [tokens, hidden]
    """
    # Reused when the layer is recomputed, since the saved products are in this order.
    routing = _Routing(*save_or_reuse("product", lambda: _route(chosen, len(weights.first))))
    rows = apply(_Moved, hidden, routing, True)
    products = apply(_Product, rows, weights.first, routing.ends, weights.inputs_first)
    narrow = _gated(products, shares, weights.first_bias, routing, gate)
    shared_bias = None
    if weights.second_bias is not None:
        by_expert = shares.new_zeros(len(shares), len(weights.second)).scatter(1, chosen, shares)
        shared_bias = by_expert.to(weights.second_bias.dtype) @ weights.second_bias
    rows = _second_product(narrow, weights, routing.ends)
    result = apply(_Moved, rows, routing, False)
    return result if shared_bias is None else result + shared_bias


def _second_product(narrow: Tensor, weights: Weights, ends: Tensor) -> Tensor:
    if in_checkpointed_layer():
        # torch's own function saves its inputs before it computes, and nothing after it saves
        # anything: the recomputation ends here.
        return grouped_mm(
            narrow,
            weights.second if weights.inputs_first else weights.second.transpose(-2, -1),
            offs=ends,
        )
    return apply(_Product, narrow, weights.second, ends, weights.inputs_first)


@torch.no_grad()
def _route(chosen: Tensor, experts: int) -> _Routing:
    """Sort the pairs by expert, and within an expert by token.

    Args:
        chosen: [tokens, k]
        experts: Number of experts.
    """
    # GPUs use radix sort, so narrow integers take fewer passes.
    expert, order = chosen.flatten().to(torch.int16).sort(stable=True)
    row_of_pair = torch.empty_like(order)
    row_of_pair[order] = torch.arange(len(order), device=order.device)
    ends = torch.searchsorted(
        expert,
        torch.arange(experts, device=expert.device, dtype=expert.dtype),
        right=True,
        out_int32=True,
    )
    return _Routing(order, row_of_pair.view(chosen.shape), ends)


class _Moved(torch.autograd.Function):
    """Copies each token's row for each of its pairs, in the order of the experts; or the opposite:
    sums the rows of each token.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, routing: _Routing, to_experts: bool) -> Tensor:
        # Not by save_for_backward, which would extend the recomputation up to the sums.
        ctx.routing, ctx.to_experts = routing, to_experts
        return _moved(rows, routing, to_experts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        return _moved(gradients[0], ctx.routing, not ctx.to_experts), None, None


def _moved(rows: Tensor, routing: _Routing, to_experts: bool) -> Tensor:
    row_of_pair = routing.row_of_pair
    if to_experts:
        return rows.index_select(0, routing.order // row_of_pair.shape[1])
    if rows.is_cuda:
        from so_tui_trainer.model import triton_experts

        return triton_experts.sums(rows, row_of_pair)
    return rows.index_select(0, row_of_pair.flatten()).view(*row_of_pair.shape, -1).sum(1)


class _Product(torch.autograd.Function):
    """Multiplies each expert's rows by its matrix; ``selective`` saves the result."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor, inputs_first: bool) -> Tensor:
        # Save the weight itself: a view would keep the all-gathered weight alive.
        ctx.save_for_backward(rows, weight, ends)
        ctx.inputs_first = inputs_first
        (result,) = save_or_reuse(
            "product",
            lambda: (
                grouped_mm(rows, weight if inputs_first else weight.transpose(-2, -1), offs=ends),
            ),
        )
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        rows, weight, ends = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        of_rows = grouped_mm(
            gradient, weight.transpose(-2, -1) if ctx.inputs_first else weight, offs=ends
        )
        left, right = (rows, gradient) if ctx.inputs_first else (gradient, rows)
        return of_rows, grouped_mm(left.t(), right, offs=ends), None, None


def _gated(
    products: Tensor, shares: Tensor, bias: Tensor | None, routing: _Routing, gate: Gate
) -> Tensor:
    """Apply the gate and the routing weights.

    Args:
        products: [pairs, 2 width] in the order of the experts, without bias.
        shares: [tokens, k]
        bias: [experts, 2 width], or None.
        routing: Which pair and which expert a row belongs to.
        gate: The activation.

    Returns:
        [pairs, width]
    """
    if products.is_cuda:
        return apply(_Gated, products, shares, bias, routing, gate)
    both = products if bias is None else products + bias[_experts(routing)]
    gates, ups = (both[:, ::2], both[:, 1::2]) if gate.interleaved else both.chunk(2, -1)
    gates, ups = gates.clamp(max=gate.limit), ups.clamp(-gate.limit, gate.limit)
    share = shares.flatten()[routing.order][:, None]
    activated = gates * (gates * gate.alpha).sigmoid() * (ups + gate.shift) * share
    return activated.to(products.dtype)


class _Gated(torch.autograd.Function):
    """``_gated`` on the GPU."""

    @staticmethod
    def forward(
        ctx: Any,
        products: Tensor,
        shares: Tensor,
        bias: Tensor | None,
        routing: _Routing,
        gate: Gate,
    ) -> Tensor:
        from so_tui_trainer.model import triton_experts

        ctx.save_for_backward(products, shares, bias)
        ctx.routing, ctx.gate = routing, gate
        return triton_experts.gated(products, shares, routing.order, *_bias(bias, routing), gate)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        from so_tui_trainer.model import triton_experts

        products, shares, bias = ctx.saved_tensors
        of_products, of_shares = triton_experts.gated_backward(
            gradients[0], products, shares, ctx.routing.order, *_bias(bias, ctx.routing), ctx.gate
        )
        of_bias = None
        if bias is not None:
            # The sum over each expert's rows, [experts, columns], as a product with ones: adding up
            # the rows one by one takes long.
            experts = torch.arange(len(ctx.routing.ends), device=of_products.device)[:, None]
            of_bias = (experts == _experts(ctx.routing)).to(of_products.dtype) @ of_products
        return of_products, of_shares, of_bias, None, None


def _experts(routing: _Routing) -> Tensor:
    """Return the expert of each row, [pairs]."""
    return torch.searchsorted(
        routing.ends,
        torch.arange(len(routing.order), device=routing.ends.device, dtype=torch.int32),
        right=True,
    )


def _bias(bias: Tensor | None, routing: _Routing) -> tuple[Tensor | None, Tensor | None]:
    """Return the bias and the expert of each row, which only the bias needs."""
    return (None, None) if bias is None else (bias.contiguous(), _experts(routing))


# The load-balancing loss of mixture-of-experts models (Switch Transformer, equations 4 to 6), over
# real tokens only.
#
# With E experts and k of them chosen for each token, it is E x the sum over experts of (times
# chosen / tokens) x (mean probability). Counts and probabilities are taken over all layers
# together, as in transformers' ``load_balancing_loss_func``. An even load gives k.


class RouterLoss:
    """Collects the logits of a model's routers in a forward pass and computes the loss."""

    def __init__(self, causal: PreTrainedModel, coefficient: float) -> None:
        """Register hooks on the routers.

        Raises:
            InputError: The model has no routers, records them in several ways (JetMoE), or their
                numbers of chosen experts differ.
        """
        self.coefficient = coefficient
        self._experts_per_token = int(
            same_in_all_layers(getattr(causal.config, "num_experts_per_tok", None)) or 0
        )
        self._seen: list[Tensor] | None = None
        routers = _routers(causal)
        if not routers or not self._experts_per_token:
            raise reject(
                "model-without-routers",
                "train.router_loss_coefficient",
                f"{coefficient:g}",
                f"a {causal.config.model_type} has no routers that transformers "
                "records and that choose equally many",
                "Set it to 0.",
            )
        for router, place in routers:
            router.register_forward_hook(partial(self._notice, place))

    @contextmanager
    def watching(self) -> Iterator[list[Tensor]]:
        """Collect the routers' logits, [tokens, experts] for each layer.

        Recomputations in the backward pass run outside this context and are not collected.
        """
        seen: list[Tensor] = []
        self._seen = seen
        try:
            yield seen
        finally:
            self._seen = None

    def __call__(self, logits: list[Tensor], real: Tensor) -> Tensor:
        """Compute the loss.

        Args:
            logits: [tokens, experts] for each layer.
            real: bool, any shape; False in padding.

        Returns:
            The loss times the number of real tokens, so that micro-batches are weighted by their
            size; fp32 scalar.
        """
        mask = real.flatten().to(torch.float32)
        experts = logits[0].shape[-1]
        chosen = torch.zeros(experts, dtype=torch.float32, device=mask.device)
        probability = torch.zeros_like(chosen)
        for layer in logits:
            best = layer.detach().topk(self._experts_per_token, dim=-1).indices
            chosen.scatter_add_(0, best.flatten(), mask.repeat_interleave(self._experts_per_token))
            probability = probability + apply(_ProbabilitySum, layer, mask)
        tokens, layers = mask.sum(), len(logits)
        return experts * (chosen * probability).sum() / (tokens * layers**2)

    def _notice(self, place: int, router: nn.Module, _: Any, output: Any) -> None:
        if self._seen is not None:
            self._seen.append(output[place] if isinstance(output, tuple) else output)


class _ProbabilitySum(torch.autograd.Function):
    """Sums the softmax over the unmasked tokens. Saves only the logits, not an fp32 softmax for
    every layer.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(logits, mask)
        return mask @ logits.softmax(-1, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        logits, mask = ctx.saved_tensors
        (gradient,) = gradients
        softmax = logits.softmax(-1, dtype=torch.float32)
        wanted = softmax * (gradient - (softmax @ gradient)[:, None]) * mask[:, None]
        return wanted.to(logits.dtype), None


def _routers(causal: PreTrainedModel) -> list[tuple[nn.Module, int]]:
    """Return the modules whose logits transformers itself would record, and where in their result
    these are: second in Llama 4.
    """
    for owner in (causal, decoder_of(causal)):
        recorder = (getattr(owner, "_can_record_outputs", None) or {}).get("router_logits")
        if recorder:
            kind, place = getattr(recorder, "target_class", ()), getattr(recorder, "index", 0)
            return [(module, place) for module in causal.modules() if isinstance(module, kind)]
    return []
