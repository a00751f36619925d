"""A mixture of experts in few passes computes what one expert after the other does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from so_tui_trainer.model import apply, experts
from so_tui_trainer.model.config import load_config
from so_tui_trainer.model.experts import Weights, _Gated, _route, mixture
from so_tui_trainer.model.fused import EXPERTS as EXPERTS_PART
from so_tui_trainer.model.fused import install_kernels
from so_tui_trainer.model.kernels import Gate
from so_tui_trainer.model.weights import meta_model
from so_tui_trainer.older_versions import _by_group, grouped_mm
from tests.support.models import grad_of, scaled_down

SILU, CLAMPED = Gate(), Gate(interleaved=True, alpha=1.702, limit=7.0, shift=1.0)
TOKENS, CHOICES, EXPERTS = 13, 3, 6


def example(gate: Gate, hidden: int, width: int) -> tuple[Tensor, Tensor, Tensor, Weights]:
    """Expert 2 has no token. The clamped kind is gpt-oss's: with biases, and inputs first."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    others = torch.tensor([expert for expert in range(EXPERTS) if expert != 2])
    chosen = torch.stack(
        [others[torch.randperm(len(others), generator=generator)[:CHOICES]] for _ in range(TOKENS)]
    )
    first, second = 0.5 * normal(EXPERTS, 2 * width, hidden), normal(EXPERTS, hidden, width)
    if gate is SILU:
        weights = Weights(first, second, None, None, inputs_first=False)
    else:
        first, second = first.transpose(1, 2).contiguous(), second.transpose(1, 2).contiguous()
        weights = Weights(
            first, second, normal(EXPERTS, 2 * width), normal(EXPERTS, hidden), inputs_first=True
        )
    return (
        4 * normal(TOKENS, hidden),
        chosen,
        torch.rand(TOKENS, CHOICES, generator=generator),
        weights,
    )


def one_by_one(
    hidden: Tensor, chosen: Tensor, shares: Tensor, weights: Weights, gate: Gate
) -> Tensor:
    results = []
    for token in range(len(hidden)):
        total = torch.zeros_like(hidden[0])
        for expert, share in zip(chosen[token].tolist(), shares[token], strict=True):
            first, second = (
                matrix[expert] if weights.inputs_first else matrix[expert].T
                for matrix in (weights.first, weights.second)
            )
            both = hidden[token] @ first + (
                0 if weights.first_bias is None else weights.first_bias[expert]
            )
            gates, ups = (both[::2], both[1::2]) if gate.interleaved else both.chunk(2)
            gates, ups = gates.clamp(max=gate.limit), ups.clamp(-gate.limit, gate.limit)
            result = (gates * (gate.alpha * gates).sigmoid() * (ups + gate.shift)) @ second
            total = total + share * (
                result + (0 if weights.second_bias is None else weights.second_bias[expert])
            )
        results.append(total)
    return torch.stack(results)


def leaves(
    hidden: Tensor, shares: Tensor, weights: Weights, like: Tensor
) -> tuple[Tensor, Tensor, Weights]:
    """Copies in the type and on the device of ``like``, that take gradients."""
    hidden, shares = (tensor.detach().to(like).requires_grad_() for tensor in (hidden, shares))
    first, second, first_bias, second_bias, inputs_first = weights

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().to(like).requires_grad_()

    own_first, own_second = (
        None if bias is None else leaf(bias) for bias in (first_bias, second_bias)
    )
    return hidden, shares, Weights(leaf(first), leaf(second), own_first, own_second, inputs_first)


def gradients(hidden: Tensor, shares: Tensor, weights: Weights) -> list[Tensor]:
    return [
        leaf.grad
        for leaf in (hidden, shares, *weights)
        if isinstance(leaf, Tensor) and leaf.grad is not None
    ]


@pytest.mark.parametrize("gate", [SILU, CLAMPED], ids=["silu", "clamped"])
@pytest.mark.parametrize("product", [grouped_mm, _by_group], ids=["grouped_mm", "by_group"])
def test_it_is_the_sum_of_what_each_expert_says(
    product: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "grouped_mm", product)
    hidden, chosen, shares, weights = example(gate, 16, 24)
    results = []
    for compute in (one_by_one, mixture):
        own_hidden, own_shares, own_weights = leaves(hidden, shares, weights, torch.empty(0))
        result = compute(own_hidden, chosen, own_shares, own_weights, gate)
        torch.autograd.backward(result.square().mean())
        results.append([result.detach(), *gradients(own_hidden, own_shares, own_weights)])
    expected, found = results
    assert len(found) == len(expected) == (5 if gate is SILU else 7)
    for mine, theirs in zip(found, expected, strict=True):
        # Single elements are small beside what they are summed from.
        assert (mine - theirs).norm() <= 1e-5 * theirs.norm()


@pytest.mark.parametrize("gate", [SILU, CLAMPED], ids=["silu", "clamped"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_routing_weights_in_fp32_go_with_experts_in_bf16(device: str, gate: Gate) -> None:
    """As Mixtral, GLM 4 and DeepSeek have them; lying in memory however their router left them."""
    hidden, chosen, shares, weights = example(gate, 16, 24)
    hidden = hidden / 8
    results = []
    for compute, dtype in ((one_by_one, torch.float32), (mixture, torch.bfloat16)):
        own_hidden, _, own_weights = leaves(
            hidden, shares, weights, torch.empty(0, device=device, dtype=dtype)
        )
        own_shares = shares.t().contiguous().to(device).requires_grad_()
        result = compute(own_hidden, chosen.to(device), own_shares.t(), own_weights, gate)
        assert result.dtype == dtype
        torch.autograd.backward(result.float().mean())
        results.append(
            [
                part.detach().float().cpu()
                for part in (result, *gradients(own_hidden, own_shares, own_weights))
            ]
        )
    for theirs, mine in zip(*results, strict=True):
        assert (mine - theirs).norm() <= 0.02 * theirs.norm()  # bf16 has eight bits


@pytest.mark.parametrize("limit", [7.0, 1000.0])
def test_another_limit_than_gpt_oss_is_left_alone(limit: float) -> None:
    class Limited(GptOssExperts):
        def __init__(self) -> None:
            config = GptOssConfig(hidden_size=16, intermediate_size=24, num_local_experts=EXPERTS)
            super().__init__(config)  # type: ignore[no-untyped-call]
            self.limit = limit
            del self.alpha

        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            gates, ups = gate_up.chunk(2, -1)
            return nn.functional.silu(gates.clamp(max=self.limit)) * ups.clamp(
                -self.limit, self.limit
            )

    limited: Any = nn.ModuleList([Limited()])
    assert install_kernels(limited, [EXPERTS_PART]) == ()


@pytest.mark.parametrize("gate", [SILU, CLAMPED], ids=["silu", "clamped"])
def test_what_backward_needs_of_a_matrix_is_the_parameter(gate: Gate) -> None:
    """A view would hold the memory that ZeRO-3 gathers a parameter into."""
    hidden, chosen, shares, weights = example(gate, 16, 24)
    own_hidden, own_shares, own_weights = leaves(hidden, shares, weights, torch.empty(0))
    matrices = {matrix.data_ptr(): matrix for matrix in (own_weights.first, own_weights.second)}
    saved: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        mixture(own_hidden, chosen, own_shares, own_weights, gate)
    found = [tensor for tensor in saved if tensor.data_ptr() in matrices]
    assert len(found) == 2
    assert all(tensor is matrices[tensor.data_ptr()] for tensor in found)


@pytest.mark.parametrize("gate", [SILU, CLAMPED._replace(limit=1.0)], ids=["silu", "clamped"])
def test_gradients_of_the_gate_are_those_of_its_formula(gate: Gate) -> None:
    _, chosen, shares, _ = example(gate, 8, 8)
    generator = torch.Generator().manual_seed(0)
    pairs, width = chosen.numel(), 3
    leaves = (
        torch.randn(pairs, 2 * width, generator=generator),
        shares,
        torch.randn(EXPERTS, 2 * width, generator=generator),
    )
    doubles = [leaf.double().requires_grad_() for leaf in leaves]

    def compute(products: Tensor, shares: Tensor, bias: Tensor) -> Tensor:
        return apply(_Gated, products, shares, bias, _route(chosen, EXPERTS), gate)

    assert torch.autograd.gradcheck(compute, doubles)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [40, 768, 2880])
@pytest.mark.parametrize("gate", [SILU, CLAMPED], ids=["silu", "clamped"])
def test_the_gate_on_the_gpu_is_that_of_the_cpu(gate: Gate, width: int) -> None:
    _, chosen, shares, _ = example(gate, 8, 8)
    products, gradient = (
        5 * torch.randn(chosen.numel(), 2 * width),
        torch.randn(chosen.numel(), width),
    )
    bias = None if gate is SILU else torch.randn(EXPERTS, 2 * width)
    results = []
    for device in ("cpu", "cuda"):
        own_products, own_shares = (
            leaf.detach().clone().to(device).requires_grad_() for leaf in (products, shares)
        )
        own_bias = None if bias is None else bias.detach().clone().to(device).requires_grad_()
        result = apply(
            _Gated, own_products, own_shares, own_bias, _route(chosen.to(device), EXPERTS), gate
        )
        torch.autograd.backward(result, gradient.to(device))
        results.append(
            [
                result.detach().cpu(),
                *(
                    grad_of(leaf).cpu()
                    for leaf in (own_products, own_shares, own_bias)
                    if leaf is not None
                ),
            ]
        )
    for theirs, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [24, 768, 2880])
@pytest.mark.parametrize("gate", [SILU, CLAMPED], ids=["silu", "clamped"])
def test_on_the_gpu_it_is_that_of_the_cpu_and_waits_for_nothing(gate: Gate, width: int) -> None:
    hidden, chosen, shares, weights = example(gate, 64, width)
    # Within the limit: where a number of eight bits falls to its other side, a gradient is gone.
    hidden = hidden / 8
    results = []
    for like in (torch.empty(0), torch.empty(0, device="cuda", dtype=torch.bfloat16)):
        own_hidden, own_shares, own_weights = leaves(hidden, shares, weights, like)
        own_chosen = chosen.to(like.device)
        if like.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        try:
            result = mixture(own_hidden, own_chosen, own_shares, own_weights, gate)
            torch.autograd.backward(result.float().mean())
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results.append(
            [
                part.detach().float().cpu()
                for part in (result, *gradients(own_hidden, own_shares, own_weights))
            ]
        )
    for theirs, mine in zip(*results, strict=True):
        assert (mine - theirs).norm() <= 0.02 * theirs.norm()  # bf16 has eight bits


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b"])
def test_transformers_own_path_multiplies_in_groups_too(name: str) -> None:
    """Its other path asks the GPU in every layer which experts have tokens, and waits."""
    assert meta_model(load_config(scaled_down(name))).config._experts_implementation == "grouped_mm"
