"""Indexers of sparse attention get no gradient: a run leaves them, and says so beforehand."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch
from msgspec.structs import replace
from transformers import CONFIG_MAPPING

import superoffload
from benchmarks.architecture_models import of_kind
from so_tui.launch.ds_config import ds_config
from so_tui.machine import inspect_machine
from so_tui.plan.notes import IndexersUntrained
from so_tui.plan.plan import Plan
from so_tui.plan.planner import make_plan
from so_tui_trainer.data.batches import Batches
from so_tui_trainer.engine_settings import engine_settings
from so_tui_trainer.model.build import build
from so_tui_trainer.model.trained import parameter_groups
from tests.support.documents import documents, spec
from tests.support.engine import binding, ensure_process_group
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


def _parameters_after_training() -> dict[str, bool]:
    """Return whether three steps left each parameter; weight decay would take 1 % in a step."""
    plan = _plan()
    run = plan.spec
    ensure_process_group()
    torch.manual_seed(run.train.seed)
    model = build(run, torch.device("cpu"), ds_config(plan))

    def shards() -> dict[str, torch.Tensor]:
        return {
            name: superoffload.local_shard(parameter)[0].clone()
            for name, parameter in model.named_parameters()
        }

    before = shards()
    made, *_ = superoffload.initialize(
        model, parameter_groups(model, run), engine_settings(run, binding()), ds_config(plan)
    )
    try:
        for batch in Batches(documents(), run, 0).iterate(1, 3):
            loss = made(batch, 1 / batch.counts.trained_tokens, 0.0)
            made.backward(loss, scale_wrt_gas=False)
            made.step()
        superoffload.synchronize(made)
        return {name: torch.equal(shard, before[name]) for name, shard in shards().items()}
    finally:
        superoffload.close(made)


@pytest.mark.slow
def test_training_changes_everything_but_the_indexers() -> None:
    # In a process of its own: other tests make process groups of their own in theirs, and destroy
    # them.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        unchanged = process.submit(_parameters_after_training).result(timeout=300)
    indexers = {name for name in unchanged if ".indexer." in name}
    assert len(indexers) == 4 * 5
    assert {name for name, same in unchanged.items() if same} == indexers


def test_plans_count_what_indexers_leave_untrained() -> None:
    plan = _plan()
    tensors = [tensor for block in plan.spec.model.parameters for tensor in block.tensors]
    assert {
        tensor.name.rpartition("indexer.")[2]: (tensor.decay, tensor.kind)
        for tensor in tensors
        if ".indexer." in tensor.name
    } == {
        "wq_b.weight": (False, "linear"),
        "wk.weight": (False, "linear"),
        "k_norm.weight": (False, "other"),
        "k_norm.bias": (False, "other"),
        "weights_proj.weight": (False, "linear"),
    }
    layers, hidden, latent, heads, width = 4, 128, 48, 2, 32
    each = latent * heads * width + hidden * width + 2 * width + hidden * heads
    facts = [IndexersUntrained(parameters=layers * each)]
    assert facts_of(plan.warnings, IndexersUntrained) == facts
    assert not facts_of(make_plan(spec(gpus="1"), inspect_machine()).warnings, IndexersUntrained)
