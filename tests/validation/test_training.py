"""What is trained on which machine, and how ranks are bound there."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from msgspec.structs import replace

from so_tui.launch.ds_config import ds_config
from so_tui.launch.launch import launch_of
from so_tui.machine.known import named_machine
from so_tui.machine.types import Machine
from so_tui.plan.planner import make_plan
from so_tui.spec import find_preset
from so_tui.validation.validate import (
    _CpuAdam,
    _Part,
    _parts_of,
    _placed,
    _shape_for,
    _spec_of,
    _training_measurements,
    validate,
)
from tests.support.machines import x86

QUAD = named_machine("gh200-quad-120")
SHAPE = _shape_for(QUAD)


def part(key: str) -> _Part:
    return next(one for one in _parts_of(QUAD, 4) if one.key == key)


def test_the_shape_fits_one_gpu_without_offload() -> None:
    assert make_plan(_spec_of(SHAPE, part("gpu")), QUAD).verdict == "fits"
    smaller = _shape_for(x86("NVIDIA H100 80GB HBM3", gpu_mib=40_000))
    assert smaller.model.parameter_count < SHAPE.model.parameter_count
    assert _shape_for(x86()).name == "tiny"


def test_every_part_plans_and_has_the_same_global_batch() -> None:
    parts = list(_parts_of(QUAD, 4))
    assert len({one.key for one in parts}) == len(parts)
    for one in parts:
        plan = make_plan(_spec_of(SHAPE, one), QUAD)
        assert plan.possible, (one.key, plan.reason_texts)
        trained = find_preset("tiny").spec if one.losses_only else SHAPE
        sequences = trained.train.micro_batch * trained.gradient_accumulation_steps
        assert plan.tokens_per_step == sequences * trained.data.sequence_length
        assert plan.spec.train.learning_rate == (
            3e-4 if one.losses_only else trained.train.learning_rate
        )
    with _CpuAdam() as cpu_adam:
        assert all(
            measurement.pending.estimate_s > 60
            for measurement in _training_measurements(QUAD, SHAPE, parts, cpu_adam)
        )


def keys(machine: Machine, gpus: int) -> set[str]:
    return {one.key for one in _parts_of(machine, gpus)}


def test_parts_suit_the_gpus_and_nodes_of_a_job() -> None:
    one_node = keys(named_machine("gh200-480"), 1)
    assert {"gpu", "ours", "published", "zerooffload", "unbound"} <= one_node
    assert not {"wrong-node", "ours-2"} & one_node
    assert "ours-2" in keys(QUAD, 2)
    assert "ours-4" not in keys(QUAD, 2)
    one_gpu = replace(QUAD, gpus=QUAD.gpus[:1])
    assert "wrong-node" in keys(one_gpu, 1)
    assert "wrong-node" not in keys(replace(one_gpu, allowed_cpus=QUAD.cpu_nodes[0].cpus), 1)


@pytest.mark.parametrize(
    ("shown", "gpus", "copies"), [("1", 1, True), ("0,2", 2, True), ("", 0, False)]
)
def test_only_gpus_that_the_environment_shows_are_validated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: str, gpus: int, copies: bool
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    here = replace(QUAD, hostname=socket.gethostname())
    report = validate(here, tmp_path, seconds=0, gpus=4, share=False, tell=lambda text, share: None)
    found = {outcome.key for outcome in report.outcomes}
    assert report.gpus == gpus
    assert {"machine", "rates"} <= found
    assert {"ours-2", "ours-4"} & found == ({"ours-2"} if gpus == 2 else set())
    assert {"gpu", "copies"} & found == ({"gpu", "copies"} if copies else set())


def test_as_published_is_deepspeeds_block() -> None:
    left_out, explicit = (
        ds_config(make_plan(_spec_of(SHAPE, part(key)), QUAD))
        for key in ("published", "published-unclipped")
    )
    assert "gradient_clipping" not in left_out
    assert explicit == left_out | {"gradient_clipping": 0.0}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_can_be_bound_to_the_wrong_node_or_not_at_all(ranks: int) -> None:
    spec = _spec_of(SHAPE, replace(part("ours"), ranks=ranks))
    plan = make_plan(spec, QUAD)
    assert _placed(plan, QUAD, "bound") is plan
    wrong, unbound = _placed(plan, QUAD, "wrong-node"), _placed(plan, QUAD, "unbound")
    for right, moved, free in zip(plan.binding, wrong.binding, unbound.binding, strict=True):
        assert moved.memory_policy.mode == "bind"
        (node,) = moved.memory_policy.nodes
        assert node != right.numa_node
        assert set(moved.cpus) <= set(QUAD.node(node).cpus)
        main, adam = len(right.main_cpus), len(right.adam_cpus)
        assert (len(moved.main_cpus), len(moved.adam_cpus)) == (main, adam)
        assert set(free.cpus) == set(QUAD.allowed_cpus)
        assert free.memory_policy.mode == "default"
        assert moved.gpu == free.gpu == right.gpu
    for other in (wrong, unbound):
        assert "--bind_cores_to_rank" not in launch_of(other, QUAD).argv
