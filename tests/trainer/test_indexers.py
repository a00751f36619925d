"""Indexers of sparse attention get no gradient and no decay; plans say so."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from transformers import CONFIG_MAPPING

from benchmarks.architecture_models import of_kind
from so_tui.machine import inspect_machine
from so_tui.plan.notes import IndexersUntrained
from so_tui.plan.plan import Plan
from so_tui.plan.planner import make_plan
from so_tui_trainer.data.batches import Batches
from so_tui_trainer.model.config import load_config
from so_tui_trainer.model.trained import TrainedModel, parameter_groups
from tests.support.documents import documents, spec
from tests.support.models import causal_model
from tests.support.planning import facts_of

pytestmark = pytest.mark.skipif(
    "deepseek_v32" not in CONFIG_MAPPING, reason="this transformers does not know DeepSeek-V3.2"
)


def _plan() -> Plan:
    run = spec(
        gpus="1",
        offload__mode="superoffload",
        data__packing="false",
        train__weight_decay="0.9",
        train__learning_rate="1e-2",
        train__steps="3",
    )
    return make_plan(replace(run, model=of_kind("deepseek_v32")), inspect_machine())


def test_indexers_are_left_as_they_are() -> None:
    """They get no gradient, and weight decay would take 1 % of them in a step."""
    run = _plan().spec
    causal = causal_model(load_config(run.model))
    model = TrainedModel(causal, "sdpa")
    batch = next(Batches(documents(), run, 0).micro_batches(1))
    torch.autograd.backward(model(batch, 1.0))
    untrained = {name for name, each in model.named_parameters() if each.grad is None}
    indexers = {name for name, _ in model.named_parameters() if ".indexer." in name}
    assert untrained == indexers
    assert len(indexers) == 4 * 5
    decayed, _ = parameter_groups(model, run)
    assert not indexers & set(decayed["names"])


def test_plans_count_what_indexers_leave_untrained() -> None:
    plan = _plan()
    tensors = [tensor for block in plan.spec.model.parameters for tensor in block.tensors]
    decays = [tensor.decay for tensor in tensors if ".indexer." in tensor.name]
    assert set(decays) == {False}
    layers, hidden, latent, heads, width = 4, 128, 48, 2, 32
    each = latent * heads * width + hidden * width + 2 * width + hidden * heads
    facts = [IndexersUntrained(parameters=layers * each)]
    assert facts_of(plan.warnings, IndexersUntrained) == facts
    assert not facts_of(make_plan(spec(gpus="1"), inspect_machine()).warnings, IndexersUntrained)
