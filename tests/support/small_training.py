"""A small model's loss, gradients and matmuls, under a policy of recomputation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from so_tui_trainer.model.checkpointing import HostActivations, Room
from so_tui_trainer.model.config import disable_dropout
from so_tui_trainer.model.trained import TrainedModel
from tests.support.documents import documents, spec
from tests.support.models import are_close, causal_model, grad_of

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


def pairs(policies: Sequence[str], kinds: Sequence[str], *rest: object) -> list[ParameterSet]:
    """Return each kind of model under each policy, of which one is in the fast tier."""
    return [
        pytest.param(
            policy, kind, *rest, marks=[] if at % len(policies) == number else [pytest.mark.slow]
        )
        for at, kind in enumerate(kinds)
        for number, policy in enumerate(policies)
    ]


Trained = tuple[float, dict[str, Tensor]]
"""Loss and gradients."""
TOKENS = 2 * 128
"""Of a micro-batch."""
QUERIES = SHAPE["num_attention_heads"] * SHAPE["head_dim"]


def on_host(device: str, results: bool) -> HostActivations:
    """Return host memory for layers' inputs, and for attention's results and log-sum-exp."""
    heads, width = SHAPE["num_attention_heads"], SHAPE["hidden_size"]
    inputs, *rooms = (
        Room(SHAPE["num_hidden_layers"], TOKENS * 4 * size) for size in (width, QUERIES, heads)
    )
    return HostActivations(inputs, rooms if results else [], torch.device(device))


def model_of(
    policy: checkpointing.Policy,
    model_type: str,
    *,
    offloaded: bool = False,
    tile: int = 0,
    device: str = "cpu",
    with_kernels: attention.Kernels | None = None,
    fused: bool = True,
    dtype: torch.dtype = torch.float32,
    **shape: Any,
) -> PreTrainedModel:
    """Return a small model. Only kernels that take boundaries give results that can be kept."""
    torch.manual_seed(0)
    masked = "eager" if model_type == "gpt_oss" else "sdpa"
    implementation = attention.register(with_kernels) if with_kernels else masked
    experts = EXPERTS if model_type in MIXTURES else {}
    config = AutoConfig.for_model(model_type, **SHAPE | experts | shape)
    disable_dropout(config)
    causal = causal_model(config, dtype=dtype, attention=implementation)
    causal.to(torch.device(device))  # type: ignore[arg-type]
    if fused:
        kernels.install_experts(causal)
    checkpointing.install(
        causal, policy, on_host(device, with_kernels is not None) if offloaded else None
    )
    if tile:
        assert kernels.install_tiles(causal, tile) == SHAPE["num_hidden_layers"]
    causal.train()
    return causal


def forward(causal: PreTrainedModel) -> Tensor:
    model = TrainedModel(causal, causal.config._attn_implementation)
    batch = next(Batches(documents(), spec(data__sequence_length="128"), 0).micro_batches(1))
    loss: Tensor = model(batch.to(model.loss.weight.device), 1 / len(batch.targets))
    return loss


def trained(
    policy: checkpointing.Policy, model_type: str = "qwen3", *, passes: int = 1, **options: Any
) -> Trained:
    causal = model_of(policy, model_type, **options)
    for _ in range(passes):
        loss = forward(causal)
        torch.autograd.backward(loss)
    return loss.item(), {
        name: grad_of(parameter).clone() for name, parameter in causal.named_parameters()
    }


def agree(found: Trained, expected: Trained, relative: float = 0.0, absolute: float = 0.0) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6 if relative else 0.0, abs=0.0)
    are_close(found[1], expected[1], relative, absolute)


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells a function of each operation of torch: which one, its arguments, and its result."""

    def __init__(self, note: Callable[[Any, Any, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        result = operation(*arguments, **(keywords or {}))
        self._note(operation, arguments, result)
        return result


PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
