"""What is trained on which machine, and how ranks are bound there."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from msgspec.structs import replace

from so_tui.launch.ds_config import ds_config
from so_tui.launch.launch import launch_of
from so_tui.machine.known import named_machine
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
GAPS = (8, 12, 20)
GAP_DISTANCES = ((10, 20, 40), (20, 10, 40), (40, 40, 10))
"""Distances from each of these nodes, in the order of the nodes."""


def part(key: str, machine: object = QUAD, gpus: int = 4) -> _Part:
    return next(one for one in _parts_of(QUAD, gpus) if one.key == key)


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


def test_fewer_gpus_have_fewer_parts() -> None:
    one_node = named_machine("gh200-480")
    keys = {one.key for one in _parts_of(one_node, 1)}
    assert {"gpu", "ours", "published", "zerooffload", "unbound"} <= keys
    assert not {"wrong-node", "ours-2"} & keys
    assert "ours-2" in {one.key for one in _parts_of(QUAD, 2)}
    assert "ours-4" not in {one.key for one in _parts_of(QUAD, 2)}


def test_job_of_one_node_is_not_bound_to_another() -> None:
    job = replace(QUAD, allowed_cpus=QUAD.cpu_nodes[0].cpus, gpus=QUAD.gpus[:1])
    assert "wrong-node" in {
        one.key for one in _parts_of(replace(job, allowed_cpus=QUAD.allowed_cpus), 1)
    }
    assert "wrong-node" not in {one.key for one in _parts_of(job, 1)}


@pytest.mark.parametrize(
    ("shown", "gpus", "copies"), [("1", 1, True), ("0,2", 2, True), ("", 0, False)]
)
def test_only_gpus_that_the_environment_shows_are_validated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: str, gpus: int, copies: bool
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    here = replace(QUAD, hostname=socket.gethostname())
    report = validate(here, tmp_path, seconds=0, gpus=4, share=False, tell=lambda text, share: None)
    keys = {outcome.key for outcome in report.outcomes}
    assert report.gpus == gpus
    assert ("ours-2" in keys, "ours-4" in keys) == (gpus == 2, False)
    assert ("gpu" in keys, "copies" in keys) == (copies, copies)


def test_wrong_node_is_the_farthest() -> None:
    plan = make_plan(_spec_of(SHAPE, part("ours", gpus=1)), QUAD)
    (rank,) = plan.binding
    home, near, far = (
        replace(node, id=id, distances=row)
        for node, id, row in zip(QUAD.cpu_nodes, GAPS, GAP_DISTANCES, strict=False)
    )
    machine = replace(QUAD, numa_nodes=(home, near, far))
    (moved,) = _placed(
        replace(plan, binding=(replace(rank, numa_node=home.id),)), machine, "wrong-node"
    ).binding
    assert moved.memory_policy.nodes == (far.id,)


@pytest.mark.parametrize(
    ("gpus", "expected"), [(1, ["gpu", "1"]), (2, ["gpu", "1", "2"]), (4, ["gpu", "1", "2", "4"])]
)
def test_losses_of_many_steps_on_every_gpu_count(gpus: int, expected: list[str]) -> None:
    every = [one for one in _parts_of(QUAD, gpus) if one.losses_only]
    parts = [one for one in every if not one.published]
    assert [one.ranks for one in every if one.published] == ([1, 2] if gpus > 1 else [])
    assert [one.key for one in parts] == [f"losses-{name}" for name in expected]
    specs = [_spec_of(SHAPE, one) for one in parts]
    assert {spec.offload.mode for spec in specs} == {"gpu", "superoffload"}
    assert {spec.train.gradient_clipping for spec in specs} == {1.0}
    assert [spec.ranks for spec in specs] == [one.ranks for one in parts]


def test_most_telling_parts_come_first() -> None:
    keys = [one.key for one in _parts_of(QUAD, 1)]
    assert keys[:4] == ["gpu", "ours", "unbound", "wrong-node"]
    compiled = next(
        position for position, one in enumerate(_parts_of(QUAD, 1)) if one.needs_deepspeeds_adam
    )
    assert keys[compiled - 1] == "losses-1"


def test_as_published_is_deepspeeds_block() -> None:
    left_out, explicit = (
        ds_config(make_plan(_spec_of(SHAPE, part(key)), QUAD))
        for key in ("published", "published-unclipped")
    )
    assert "gradient_clipping" not in left_out
    assert explicit["gradient_clipping"] == 0.0
    assert {key: value for key, value in explicit.items() if key != "gradient_clipping"} == left_out


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
        assert (len(moved.main_cpus), len(moved.adam_cpus)) == (
            len(right.main_cpus),
            len(right.adam_cpus),
        )
        assert set(free.cpus) == set(QUAD.allowed_cpus)
        assert free.memory_policy.mode == "default"
        assert moved.gpu == free.gpu == right.gpu
    for other in (wrong, unbound):
        assert "--bind_cores_to_rank" not in launch_of(other, QUAD).argv
