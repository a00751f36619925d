"""What is measured on which machine, in order and within the time; the report that is continued."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from msgspec.structs import replace as outcome_of

from so_tui.launch.ds_config import ds_config
from so_tui.launch.launch import launch_of
from so_tui.machine.known import named_machine
from so_tui.machine.types import Machine, Software
from so_tui.plan.planner import make_plan
from so_tui.spec import SoTuiError, find_preset
from so_tui.validation import report as reports
from so_tui.validation import validate
from so_tui.validation.report import MachineFound, Report
from so_tui.validation.validate import (
    _CpuAdam,
    _Measurement,
    _measurement,
    _Part,
    _parts_of,
    _placed,
    _run_parts,
    _shape_for,
    _spec_of,
    _training_measurements,
)
from tests.support.machines import x86
from tests.support.problems import rejected

FOUND = MachineFound(
    cpu="Neoverse-V2",
    architecture="aarch64",
    page_size_bytes=65536,
    cores=72,
    nodes=(),
    gpus=(),
    software=Software(),
    findings=(),
)
EMPTY = Report(
    so_tui="1",
    begun="2026-11-25T00:00:00+00:00",
    host="alps",
    gpus=1,
    shape="tiny, 6 layers",
    outcomes=(),
)


class Parts:
    """Makes parts of a report, and notes which were measured and within what limit."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.limits: dict[str, float] = {}

    def __call__(
        self, key: str, estimate_s: float, error: BaseException | None = None, takes_s: float = 0.0
    ) -> _Measurement:
        def measure(_tell: Callable[[str], None], limit_s: float) -> MachineFound:
            self.done.append(key)
            self.limits[key] = limit_s
            time.sleep(min(takes_s, limit_s))
            if error is not None:
                raise error
            return FOUND

        return _measurement(key, f"part {key}", estimate_s, measure)


def run_parts(parts: list[_Measurement], seconds: float = 60.0, before: Report = EMPTY) -> Report:
    return _run_parts(before, parts, seconds, lambda _: None, lambda *_: None)


def states(report: Report) -> list[str]:
    return [outcome.state for outcome in report.outcomes]


def test_what_fits_is_measured_and_written_after_each(tmp_path: Path) -> None:
    part, written, told = Parts(), list[list[str]](), list[float]()

    def write(found: Report) -> None:
        reports.write(tmp_path, found)
        written.append(states(found))

    parts = [part("a", 1.0), part("b", 1000.0), part("c", 1.0)]
    found = _run_parts(EMPTY, parts, 60.0, write, lambda text, share: told.append(share))
    assert part.done == ["a", "c"]
    assert written[:2] == [["pending"] * 3, ["measured", "pending", "pending"]]
    assert written[-1] == ["measured", "left-out", "measured"]
    assert "1,000 s" in found.outcomes[1].reason
    assert reports.read(tmp_path) == found
    assert told == sorted(told)
    assert told[-1] == 1.0


def test_the_next_run_measures_what_was_not_measured() -> None:
    """What failed or was left out, and nothing else."""
    part, again = Parts(), Parts()
    first = run_parts([part("a", 1), part("b", 1, SoTuiError("no")), part("c", 99)], 50.0)
    assert states(first) == ["measured", "failed", "left-out"]
    assert first.outcomes[1].reason == "no"
    parts = [again("a", 1), again("b", 1), again("c", 99), again("d", 1)]
    assert states(run_parts(parts, 200.0, first)) == ["measured"] * 4
    assert again.done == ["b", "c", "d"]


@pytest.mark.parametrize("error", [SoTuiError("no"), OSError("no"), KeyError("no")])
def test_what_fails_a_part_is_only_its_own_failure(error: Exception) -> None:
    part = Parts()
    found = run_parts([part("a", 1, error), part("b", 1)])
    assert states(found) == ["failed", "measured"]
    assert "no" in found.outcomes[0].reason


def test_a_part_that_hangs_is_given_up_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next one follows."""
    monkeypatch.setattr(validate, "OVERRUN_S", 0.1)
    part = Parts()
    hung = part("a", 0.05, SoTuiError("was ended"), takes_s=60.0)
    assert states(run_parts([hung, part("b", 0.1)])) == ["timed-out", "measured"]
    run_parts([part("c", 30.0)])
    assert part.limits["a"] == pytest.approx(0.25)
    assert 30.1 < part.limits["c"] <= 60.1, "not for long after the time of all parts"


@pytest.mark.parametrize("content", ["{", '{"schema": 1}', "\x00"])
def test_a_folder_with_something_else_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / reports.FILE).write_text(content)
    with rejected("not-a-report"):
        reports.read(tmp_path)


def test_what_fits_is_judged_by_how_long_earlier_parts_took() -> None:
    part = Parts()
    found = run_parts([part("a", 100.0), part("b", 70.0), part("c", 100.0)], 120.0)
    assert part.done == ["a", "b", "c"]  # each took no time, so that 100 s fit again
    slow = [outcome_of(outcome, seconds=3 * outcome.estimate_s) for outcome in found.outcomes[:2]]
    assert validate._pace(slow) == 3.0
    assert validate._pace([outcome_of(slow[0], state="failed")]) == 1.0
    assert validate._pace([outcome_of(slow[0], estimate_s=1.0)]) == 1.0
    late = [part("slow", 0.1, takes_s=0.3), part("d", 59.8)]
    assert states(run_parts(late)) == ["measured", "left-out"]


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
    parts = _parts_of(QUAD, 4)
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
            pending.estimate_s > 60
            for pending, _ in _training_measurements(QUAD, SHAPE, parts, cpu_adam)
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
    report = validate.validate(
        here, tmp_path, seconds=0, gpus=4, share=False, tell=lambda text, share: None
    )
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
