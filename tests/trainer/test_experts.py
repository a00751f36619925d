"""A mixture of experts in few passes: in any torch, in bf16, on a GPU, and what backward keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from so_tui_trainer.model import experts
from so_tui_trainer.model.config import load_config
from so_tui_trainer.model.experts import Weights, mixture
from so_tui_trainer.model.fused import EXPERTS as EXPERTS_PART
from so_tui_trainer.model.fused import install_kernels
from so_tui_trainer.model.kernels import Gate
from so_tui_trainer.model.weights import meta_model
from so_tui_trainer.older_versions import _by_group, grouped_mm
from tests.support.models import grad_of, scaled_down

SILU, CLAMPED = Gate(), Gate(interleaved=True, alpha=1.702, limit=7.0, shift=1.0)
TOKENS, CHOICES, EXPERTS = 13, 3, 6


class Example(NamedTuple):
    """Inputs of a mixture. Those of its leaves take gradients."""

    hidden: Tensor
    chosen: Tensor
    shares: Tensor
    weights: Weights

    def leaves(self, like: Tensor) -> Example:
        """Return copies in the type and on the device of ``like`` that take gradients."""

        def leaf(tensor: Tensor) -> Tensor:
            return tensor.detach().to(like).requires_grad_()

        own = (leaf(each) if isinstance(each, Tensor) else each for each in self.weights)
        chosen = self.chosen.to(like.device)
        return Example(leaf(self.hidden), chosen, leaf(self.shares), Weights(*own))  # type: ignore[arg-type]

    def results(self, compute: Callable[..., Tensor], gate: Gate) -> list[Tensor]:
        """Return what is computed and the gradients of its mean, in fp32 on the CPU."""
        result = compute(*self, gate)
        torch.autograd.backward(result.float().mean())
        tensors = [each for each in (self.hidden, self.shares, *self.weights) if _is_tensor(each)]
        return [each.detach().float().cpu() for each in (result, *map(grad_of, tensors))]


def _is_tensor(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor)


def example(gate: Gate, hidden: int, width: int) -> Example:
    """Expert 2 has no token. The clamped kind is gpt-oss's: with biases, and inputs first."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    others = torch.tensor([expert for expert in range(EXPERTS) if expert != 2])
    chosen = torch.stack(
        [others[torch.randperm(len(others), generator=generator)[:CHOICES]] for _ in range(TOKENS)]
    )
    first, second = 0.5 * normal(EXPERTS, 2 * width, hidden), normal(EXPERTS, hidden, width)
    weights = Weights(first, second, None, None, inputs_first=False)
    if gate is CLAMPED:
        first, second = first.transpose(1, 2).contiguous(), second.transpose(1, 2).contiguous()
        biases = normal(EXPERTS, 2 * width), normal(EXPERTS, hidden)
        weights = Weights(first, second, *biases, inputs_first=True)
    shares = torch.rand(TOKENS, CHOICES, generator=generator)
    return Example(4 * normal(TOKENS, hidden), chosen, shares, weights)


def are_near(found: list[Tensor], expected: list[Tensor], share: float) -> None:
    """Compare norms: single elements are small beside what they are summed from."""
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine - theirs).norm() <= share * theirs.norm()


BF16 = 0.02
"""Of eight bits."""


@pytest.mark.parametrize("gate", [SILU, CLAMPED], ids=["silu", "clamped"])
def test_older_torchs_products_are_those_of_groups(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which are transformers' results (test_kernels.py)."""
    given, found = example(gate, 16, 24), []
    for product in (grouped_mm, _by_group):
        monkeypatch.setattr(experts, "grouped_mm", product)
        found.append(given.leaves(torch.empty(0)).results(mixture, gate))
    assert len(found[0]) == (5 if gate is SILU else 7)
    are_near(found[1], found[0], 1e-5)


@pytest.mark.parametrize("gate", [SILU, CLAMPED], ids=["silu", "clamped"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_routing_weights_in_fp32_go_with_experts_in_bf16(device: str, gate: Gate) -> None:
    """As Mixtral, GLM 4 and DeepSeek have them; lying in memory however their router left them."""
    given = example(gate, 16, 24)
    given = given._replace(hidden=given.hidden / 8)
    expected = given.leaves(torch.empty(0, device=device)).results(mixture, gate)
    own = given.leaves(torch.empty(0, device=device, dtype=torch.bfloat16))
    shares = given.shares.t().contiguous().t().to(device).requires_grad_()
    found = own._replace(shares=shares).results(mixture, gate)
    are_near(found, expected, BF16)
    assert mixture(*own, gate).dtype == torch.bfloat16


def test_another_limit_than_gpt_oss_is_left_alone() -> None:
    class Limited(GptOssExperts):
        def __init__(self) -> None:
            config = GptOssConfig(hidden_size=16, intermediate_size=24, num_local_experts=EXPERTS)
            super().__init__(config)  # type: ignore[no-untyped-call]
            self.limit = 7.0
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
    own = example(gate, 16, 24).leaves(torch.empty(0))
    matrices = {matrix.data_ptr(): matrix for matrix in (own.weights.first, own.weights.second)}
    saved: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        mixture(*own, gate)
    found = [tensor for tensor in saved if tensor.data_ptr() in matrices]
    assert len(found) == 2
    assert all(tensor is matrices[tensor.data_ptr()] for tensor in found)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [24, 768, 2880])
@pytest.mark.parametrize("gate", [SILU, CLAMPED], ids=["silu", "clamped"])
def test_on_the_gpu_it_is_that_of_the_cpu_and_waits_for_nothing(gate: Gate, width: int) -> None:
    given = example(gate, 64, width)
    # Within the limit: where a number of eight bits falls to its other side, a gradient is gone.
    given = given._replace(hidden=given.hidden / 8)
    own = given.leaves(torch.empty(0, device="cuda", dtype=torch.bfloat16))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = mixture(*own, gate)
        torch.autograd.backward(result.float().mean())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = given.leaves(torch.empty(0)).results(mixture, gate)
    own = given.leaves(torch.empty(0, device="cuda", dtype=torch.bfloat16))
    are_near(own.results(mixture, gate), expected, BF16)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b"])
def test_transformers_own_path_multiplies_in_groups_too(name: str) -> None:
    """Its other path asks the GPU in every layer which experts have tokens, and waits."""
    assert meta_model(load_config(scaled_down(name))).config._experts_implementation == "grouped_mm"
