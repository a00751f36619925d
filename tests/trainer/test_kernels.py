"""Fused parts, and mixtures of experts in few passes, compute what transformers computes."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import pytest
import torch
from torch import Tensor, nn
from torch.utils.cpp_extension import _get_build_directory
from transformers import AutoConfig
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from so_tui_trainer.model import experts, fused
from so_tui_trainer.model.config import disable_dropout, load_config
from so_tui_trainer.model.experts import Weights, mixture
from so_tui_trainer.model.kernels import (
    Gate,
    cross_entropy_gradient,
    gated,
    log_sum_exp,
    replace_slow_matmuls,
    rotate,
)
from so_tui_trainer.model.weights import meta_model
from so_tui_trainer.older_versions import _by_group, grouped_mm
from tests.support.models import are_close, causal_model, grad_of, gradients_of, scaled_down
from tests.support.python_path import checkout_path, printed
from tests.support.small_training import EXPERTS
from tests.support.small_training import SHAPE as BASE

SHAPE = BASE | {"vocab_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}
EXPECTED = {
    "qwen3": {"Qwen3RMSNorm", "Qwen3MLP", "apply_rotary_pos_emb"},
    "llama": {"LlamaRMSNorm", "LlamaMLP", "apply_rotary_pos_emb"},
    "phi3": {"Phi3RMSNorm", "Phi3MLP", "apply_rotary_pos_emb"},
    "seed_oss": {"SeedOssRMSNorm", "SeedOssMLP", "apply_rotary_pos_emb"},
    "qwen3_moe": {"Qwen3MoeRMSNorm", "Qwen3MoeExperts", "apply_rotary_pos_emb"},
    "gpt_oss": {"GptOssRMSNorm", "GptOssExperts", "apply_rotary_pos_emb"},
}


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """The rotary function is replaced in transformers' own module."""
    modules: list[Any] = [
        importlib.import_module(f"transformers.models.{name}.modeling_{name}") for name in EXPECTED
    ]
    before = [module.apply_rotary_pos_emb for module in modules]
    yield
    for module, function in zip(modules, before, strict=True):
        module.apply_rotary_pos_emb = function


def replaced(model: nn.Module) -> set[str]:
    classes = {type(module).__name__ for module in model.modules() if "forward" in vars(module)}
    rotary = vars(importlib.import_module(type(model).__module__)).get("apply_rotary_pos_emb")
    return classes | ({"apply_rotary_pos_emb"} if isinstance(rotary, partial) else set())


@pytest.mark.parametrize("model_type", EXPECTED)
def test_a_model_computes_the_same_with_them(model_type: str) -> None:
    torch.manual_seed(0)
    shape = SHAPE | (EXPERTS if model_type in ("qwen3_moe", "gpt_oss") else {})
    config = AutoConfig.for_model(model_type, **shape)
    disable_dropout(config)
    causal = causal_model(config, dtype=torch.float32, attention="eager")
    for parameter in causal.parameters():  # ones and zeros would hide a weight that is not used
        nn.init.normal_(parameter, std=0.3)
    tokens = torch.randint(0, 64, (2, 16))
    found = []
    for install in (False, True):
        if install:
            fused.install_kernels(causal)
            assert replaced(causal) == EXPECTED[model_type]
        causal.zero_grad()
        logits = causal(input_ids=tokens, use_cache=False).logits
        torch.autograd.backward(logits.square().mean())
        found.append((logits.detach(), gradients_of(causal)))
    (expected, theirs), (logits, ours) = found
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    are_close(ours, theirs, 1e-3, 1e-5)


def test_only_exact_parts_that_are_asked_for_are_replaced() -> None:
    """Gemma 2's norms multiply with 1 + weight, its activation is GELU."""
    qwen, gemma = (
        causal_model(AutoConfig.for_model(kind, **SHAPE)) for kind in ("qwen3", "gemma2")
    )
    for model in (gemma, qwen):
        fused.install_norms(model)
    fused.install_gates(gemma)
    assert replaced(gemma) == set()
    assert replaced(qwen) == {"Qwen3RMSNorm"}


def test_a_rotation_by_cosines_in_fp32_keeps_the_heads_in_bf16() -> None:
    heads = torch.randn(1, 2, 3, 8, dtype=torch.bfloat16, requires_grad=True)
    turned = rotate(heads, torch.randn(1, 3, 8), torch.randn(1, 3, 8))
    torch.autograd.backward(turned.sum())
    assert turned.dtype == torch.bfloat16
    assert heads.grad is not None


def agree_on_both(
    compute: Callable[..., Tensor], inputs: Sequence[Tensor], gradient: Tensor
) -> None:
    """Check the result on the GPU, and its gradients, against the CPU's."""
    results = []
    for device in ("cpu", "cuda"):
        leaves = [each.detach().to(device).requires_grad_() for each in inputs]
        result = compute(*leaves)
        torch.autograd.backward(result, gradient.to(device))
        results.append([result.detach().cpu(), *(grad_of(leaf).cpu() for leaf in leaves)])
    for theirs, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [40, 1000, 9728])
@pytest.mark.parametrize("stacked", [False, True])
def test_the_gate_on_the_gpu_is_that_of_the_cpu(columns: int, stacked: bool) -> None:
    both = torch.randn(7, 3, 2 * columns, device="cuda")
    gradient = torch.randn(7, 3, columns, device="cuda")
    parts = both.chunk(2, -1) if stacked else [part.contiguous() for part in both.chunk(2, -1)]
    agree_on_both(gated, parts, gradient)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "count", "size"), [(1, 1, 8), (2, 32, 128), (3, 8, 64), (2, 5, 24)]
)
@pytest.mark.parametrize("strided", [False, True])
def test_gpu_rotation_is_that_of_the_cpu(rows: int, count: int, size: int, strided: bool) -> None:
    width = 9
    shape = (rows, width, count, size) if strided else (rows, count, width, size)
    heads = torch.randn(shape, device="cuda")
    heads = heads.transpose(1, 2) if strided else heads
    cos, sin = (torch.randn(1, width, size, device="cuda") for _ in range(2))
    gradient = torch.randn(rows, count, width, size, device="cuda")
    agree_on_both(lambda heads: rotate(heads, cos.to(heads), sin.to(heads)), [heads], gradient)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns"), [(5, 1), (3, 1000), (17, 4352), (0, 8)])
def test_the_softmax_on_the_gpu_is_that_of_the_cpu(rows: int, columns: int) -> None:
    # Far apart, so that a sum that is not taken from the maximum overflows.
    logits = 30 * torch.randn(rows, columns)
    targets = torch.randint(-3, columns + 3, (rows,))
    expected = log_sum_exp(logits)
    torch.testing.assert_close(log_sum_exp(logits.cuda()).cpu(), expected)
    gradient = cross_entropy_gradient(logits.cuda(), expected.cuda(), targets.cuda(), 0.01)
    torch.testing.assert_close(
        gradient.cpu(), cross_entropy_gradient(logits, expected, targets, 0.01)
    )


@pytest.mark.slow
def test_what_a_killed_compilation_leaves_holds_nobody_up() -> None:
    left = Path(_get_build_directory("cpu_adam", False)) / "lock"
    # Other tests may be loading the kernel: one that has looked already would wait for ever.
    with left.with_name("so-tui.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        left.touch()
    environment = os.environ | {"PYTHONPATH": checkout_path()}
    # Compiling takes far less than the time limit.
    said = printed(
        "-m", "so_tui_trainer.tools.build_ops", env=environment, given="{}", timeout_s=180
    )
    assert json.loads(said)["deepspeed"] == ""
    assert not left.exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_replaced_matmuls_and_their_gradients_are_rounded_once(dtype: torch.dtype) -> None:
    """A linear layer with a bias, and a batched matmul."""
    torch.manual_seed(0)
    replace_slow_matmuls()
    rows, weight = torch.randn(40, 300, dtype=dtype), torch.randn(70, 300, dtype=dtype)
    bias, batch = torch.randn(70, dtype=dtype), torch.randn(5, 300, 8, dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    found = []
    for kind in (dtype, wide):
        leaf = weight.to(kind, copy=True).requires_grad_()
        product = torch.nn.functional.linear(rows.to(kind), leaf, bias.to(kind))
        torch.autograd.backward(product.sum())
        batches = (0.5 * rows[:5, None].to(kind)) @ batch.to(kind)
        found.append((product, grad_of(leaf), batches))
    for ours, exact in zip(*found, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, exact.to(dtype), rtol=8e-3, atol=1e-3)


SILU, CLAMPED = Gate(), Gate(interleaved=True, alpha=1.702, limit=7.0, shift=1.0)
TOKENS, CHOICES, COUNT = 13, 3, 6


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

    others = torch.tensor([expert for expert in range(COUNT) if expert != 2])
    chosen = torch.stack(
        [others[torch.randperm(len(others), generator=generator)[:CHOICES]] for _ in range(TOKENS)]
    )
    first, second = 0.5 * normal(COUNT, 2 * width, hidden), normal(COUNT, hidden, width)
    weights = Weights(first, second, None, None, inputs_first=False)
    if gate is CLAMPED:
        first, second = first.transpose(1, 2).contiguous(), second.transpose(1, 2).contiguous()
        biases = normal(COUNT, 2 * width), normal(COUNT, hidden)
        weights = Weights(first, second, *biases, inputs_first=True)
    shares = torch.rand(TOKENS, CHOICES, generator=generator)
    return Example(4 * normal(TOKENS, hidden), chosen, shares, weights)


def are_near(found: list[Tensor], expected: list[Tensor], share: float) -> None:
    """Compare norms: single elements are small beside what they are summed from."""
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine - theirs).norm() <= share * theirs.norm()


BF16 = 0.02
"""Of eight bits."""


def dense(hidden: Tensor, chosen: Tensor, shares: Tensor, weights: Weights, gate: Gate) -> Tensor:
    """Compute every token through every expert, and add what was chosen."""
    first, second = (
        matrix if weights.inputs_first else matrix.transpose(1, 2)
        for matrix in (weights.first, weights.second)
    )
    both = hidden @ first
    if weights.first_bias is not None:
        both = both + weights.first_bias[:, None]
    gates, ups = (both[..., ::2], both[..., 1::2]) if gate.interleaved else both.chunk(2, -1)
    gates, ups = gates.clamp(max=gate.limit), ups.clamp(-gate.limit, gate.limit)
    said = (gates * (gate.alpha * gates).sigmoid() * (ups + gate.shift)) @ second
    if weights.second_bias is not None:
        said = said + weights.second_bias[:, None]
    share = shares.new_zeros(len(hidden), COUNT).scatter(1, chosen, shares)
    return torch.einsum("ne,enh->nh", share, said)


@pytest.mark.parametrize("gate", [SILU, CLAMPED], ids=["silu", "clamped"])
@pytest.mark.parametrize("product", [grouped_mm, _by_group], ids=["grouped_mm", "by_group"])
def test_it_is_the_sum_of_what_each_expert_says(
    product: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "grouped_mm", product)
    given = example(gate, 16, 24)
    expected, found = (
        given.leaves(torch.empty(0)).results(compute, gate) for compute in (dense, mixture)
    )
    assert len(found) == (5 if gate is SILU else 7)
    are_near(found, expected, 1e-5)


@pytest.mark.parametrize("gate", [SILU, CLAMPED], ids=["silu", "clamped"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_routing_weights_in_fp32_go_with_experts_in_bf16(device: str, gate: Gate) -> None:
    """As Mixtral, GLM 4 and DeepSeek have them; lying in memory however their router left them."""
    given = example(gate, 16, 24)
    given = given._replace(hidden=given.hidden / 8)
    expected = given.leaves(torch.empty(0, device=device)).results(dense, gate)
    own = given.leaves(torch.empty(0, device=device, dtype=torch.bfloat16))
    shares = given.shares.t().contiguous().t().to(device).requires_grad_()
    found = own._replace(shares=shares).results(mixture, gate)
    are_near(found, expected, BF16)
    assert mixture(*own, gate).dtype == torch.bfloat16


def test_another_limit_than_gpt_oss_is_left_alone() -> None:
    class Limited(GptOssExperts):
        def __init__(self) -> None:
            config = GptOssConfig(hidden_size=16, intermediate_size=24, num_local_experts=COUNT)
            super().__init__(config)  # type: ignore[no-untyped-call]
            self.limit = 7.0
            del self.alpha

        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            gates, ups = gate_up.chunk(2, -1)
            return nn.functional.silu(gates.clamp(max=self.limit)) * ups.clamp(
                -self.limit, self.limit
            )

    limited: Any = nn.ModuleList([Limited()])
    fused.install_experts(limited)
    assert replaced(limited) == set()


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
