"""A small model's loss, gradients and matmuls, under a policy of recomputation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, PreTrainedModel

from so_tui_trainer.data.batches import Batches
from so_tui_trainer.model import attention, checkpointing
from so_tui_trainer.model import fused as kernels
from so_tui_trainer.model import fused as tiles
from so_tui_trainer.model.checkpointing import HostActivations, Room
from so_tui_trainer.model.config import disable_dropout
from so_tui_trainer.model.trained import TrainedModel
from tests.support.documents import documents, spec
from tests.support.models import causal_model, grad_of

SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "intermediate_size": 24,
}
MIXTURES = ("qwen3_moe", "gpt_oss")


def pairs(policies: Sequence[str], kinds: Sequence[str]) -> list[ParameterSet]:
    """Return each kind of model under each policy, of which one is in the fast tier."""
    return [
        pytest.param(policy, kind, marks=[] if at % len(policies) == number else [pytest.mark.slow])
        for at, kind in enumerate(kinds)
        for number, policy in enumerate(policies)
    ]


Trained = tuple[float, dict[str, Tensor]]
"""Loss and gradients."""


TOKENS = 2 * 128
"""Of a micro-batch."""
QUERIES = SHAPE["num_attention_heads"] * SHAPE["head_dim"]


def on_host(device: str, results: bool, shape: dict[str, Any] = SHAPE) -> HostActivations:
    """Return host memory for layers' inputs, and for attention's results and log-sum-exp."""
    layers, each = shape["num_hidden_layers"], TOKENS * 4
    rooms = (
        [Room(layers, each * QUERIES), Room(layers, each * shape["num_attention_heads"])]
        if results
        else []
    )
    return HostActivations(Room(layers, each * shape["hidden_size"]), rooms, torch.device(device))


def model_of(
    policy: checkpointing.Policy,
    model_type: str,
    *,
    offloaded: bool = False,
    tile: int = 0,
    device: str = "cpu",
    with_kernels: attention.Kernels | None = None,
    fused: tuple[str, ...] = (kernels.EXPERTS,),
    dtype: torch.dtype = torch.float32,
    head_dim: int = SHAPE["head_dim"],
) -> PreTrainedModel:
    """Return a small model. Only kernels that take boundaries give results that can be kept."""
    torch.manual_seed(0)
    mixture = model_type in MIXTURES
    masked = "eager" if model_type == "gpt_oss" else "sdpa"
    implementation = attention.register(with_kernels) if with_kernels else masked
    config = AutoConfig.for_model(
        model_type, **SHAPE | (EXPERTS if mixture else {}) | {"head_dim": head_dim}
    )
    disable_dropout(config)
    causal = causal_model(config, dtype=dtype, attention=implementation)
    causal.to(torch.device(device))  # type: ignore[arg-type]
    kernels.install_kernels(causal, fused)
    checkpointing.install(
        causal, policy, on_host(device, with_kernels is not None) if offloaded else None
    )
    if tile:
        assert tiles.install_tiles(causal, tile) == SHAPE["num_hidden_layers"]
    causal.train()
    return causal


def forward(causal: PreTrainedModel) -> Tensor:
    """The loss of one micro-batch."""
    model = TrainedModel(causal, causal.config._attn_implementation)
    batch = next(Batches(documents(), spec(data__sequence_length="128"), 0).micro_batches(1))
    loss: Tensor = model(batch.to(model.loss.weight.device), 1 / len(batch.targets))
    return loss


def trained(
    policy: checkpointing.Policy, model_type: str = "qwen3", *, passes: int = 1, **options: Any
) -> Trained:
    """Loss of the last micro-batch, and gradients of all."""
    causal = model_of(policy, model_type, **options)
    for _ in range(passes):
        loss = forward(causal)
        torch.autograd.backward(loss)
    return loss.item(), {
        name: grad_of(parameter).clone() for name, parameter in causal.named_parameters()
    }


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts matrix products by the pass they are in."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self.label = "forward"

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.counts[self.label] += 1
        if function is torch.ops.aten._grouped_mm.default:
            self.counts[f"experts' {self.label}"] += 1
        return function(*arguments, **(keywords or {}))
