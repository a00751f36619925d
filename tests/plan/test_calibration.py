"""What was measured on a machine takes the place of what is published, on it and on machines like
it.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from so_tui.model.profile import profile_of
from so_tui.plan.measured import (
    STEP_PARTS,
    Figures,
    Probe,
    Rates,
    _path_of,
    calibration_of,
    store,
)
from so_tui.plan.plan import Plan, StepTime
from so_tui.plan.planner import make_plan, recommend
from so_tui.plan.rates import DIGEST, Calibrated, published_speed
from so_tui.plan.show import _speed_source_text
from so_tui.plan.terms import TermKind
from so_tui.plan.workload import Workload
from so_tui.spec import RunSpec, load_catalog, with_values
from tests.support.machines import superchips, x86
from tests.support.planning import source_of, step_of

SPEC = with_values(
    load_catalog().presets["qwen3-4b-random"].spec,
    {
        "gpus": "1",
        "offload.mode": "superoffload",
        "offload.ratio": "0.9",
        "model.activation_checkpointing": "full",
    },
)
H200 = x86("NVIDIA H200")
RATES = Rates(
    measured="2026-11-21T10:00:00+00:00",
    seconds=40.0,
    matrix_flops=340e12,
    hbm_bytes_per_s=2e12,
    d2h_bytes_per_s=50e9,
    h2d_bytes_per_s=50e9,
    adam=((1, 8e9), (16, 100e9)),
    node_bytes_per_s=((0, 110e9),),
)


def test_plans_use_the_machines_own_rates_and_say_so() -> None:
    before = make_plan(SPEC, H200)
    assert store(H200, rates=RATES) == _path_of(H200)
    after = make_plan(SPEC, H200)
    assert source_of(after).calibrated == Calibrated(date=RATES.measured)
    assert source_of(before).calibrated is None
    assert step_of(after).forward_s > 1.5 * step_of(before).forward_s


def test_what_was_not_measured_stays_as_published() -> None:
    store(H200, rates=replace(RATES, matrix_flops=None, hbm_bytes_per_s=None))
    plan = make_plan(SPEC, H200)
    published = published_speed("NVIDIA H200")
    assert published is not None
    assert source_of(plan).published == published.source
    assert source_of(plan).calibrated is not None
    assert plan.step is not None


def test_rates_of_a_gpu_that_nothing_is_published_of_are_enough() -> None:
    machine = x86("NVIDIA L40S", gpu_mib=46_068)
    assert published_speed("NVIDIA L40S") is None
    assert make_plan(SPEC, machine).step is None
    store(machine, rates=replace(RATES, layer_launch_overhead_s=2e-4))
    assert make_plan(SPEC, machine).step is not None
    store(machine, rates=replace(RATES, layer_launch_overhead_s=2e-4, adam=()))
    assert make_plan(SPEC, machine).step is None, "how fast its CPU Adam is, nobody knows"


def test_twin_borrows_rates_and_another_kind_does_not() -> None:
    store(H200, rates=RATES)
    twin = replace(H200, hostname="node7")
    assert source_of(make_plan(SPEC, twin)).calibrated == Calibrated(
        date=RATES.measured, host=H200.hostname
    )
    assert calibration_of(x86("NVIDIA H200", cores=32)) is None
    assert calibration_of(superchips(1)) is None


@pytest.mark.parametrize(
    ("old", "new"), [("{", "["), *(("340000000000000.0", rate) for rate in ("0", "-1.0", "1e300"))]
)
def test_a_damaged_or_impossible_file_counts_as_none(old: str, new: str) -> None:
    path = store(H200, rates=RATES)
    path.write_text(path.read_text().replace(old, new))
    assert new in path.read_text()
    assert calibration_of(H200) is None
    assert make_plan(SPEC, H200).step_s


def probe_of(factor: float, more_gb: float) -> Probe:
    plan = make_plan(SPEC, H200)
    step = step_of(plan)
    times: dict[str, Any] = {
        "step_s": step.total_s,
        "forward_s": step.forward_s,
        "backward_s": step.backward_s,
        "exposed_optimizer_s": step.exposed_optimizer_s,
    }
    predicted = Figures(
        **times,
        gpu_reserved_bytes=plan.gpu_reserved_bytes,
        gpu_device_bytes=plan.gpu_bytes,
        host_bytes=plan.host_bytes_per_node[0],
    )
    actual = replace(
        predicted,
        **{name: factor * seconds for name, seconds in times.items()},
        gpu_reserved_bytes=predicted.gpu_reserved_bytes + int(more_gb * 1e9),
        gpu_device_bytes=predicted.gpu_device_bytes + int((more_gb + 0.2) * 1e9),
    )
    return Probe(
        measured="2026-11-21T10:00:00+00:00",
        model=profile_of(SPEC.model).key,
        mode="superoffload",
        ranks=1,
        settings="superoffload 0.90",
        workload=Workload(attended_tokens=300.0, trained_share=0.5, useful_share=0.98),
        predicted=predicted,
        actual=actual,
        constants=DIGEST,
        step_parts=STEP_PARTS,
    )


def steps_of(spec: RunSpec, probe: Probe) -> tuple[StepTime, StepTime]:
    """Return the step that is planned with the stored probe, and without it."""
    probed, unprobed = (
        step_of(make_plan(spec, H200, probed=probed, workload=probe.workload))
        for probed in (True, False)
    )
    return probed, unprobed


@pytest.mark.parametrize("change", [{"constants": "another"}, {"step_parts": 1}], ids=str)
def test_a_probe_of_other_constants_or_parts_corrects_nothing(change: dict[str, Any]) -> None:
    before = make_plan(SPEC, H200)
    store(H200, probe=replace(probe_of(1.2, 1.5), **change))
    assert make_plan(SPEC, H200) == before


def test_a_probe_corrects_its_model_and_no_other() -> None:
    other = load_catalog().presets["llama-3.1-8b"].spec
    unprobed = recommend(other, H200, 1)
    probe = probe_of(1.2, 1.5)
    assert store(H200, probe=probe) == store(H200, probe=probe)
    known = calibration_of(H200)
    assert known is not None
    assert known.probes == (probe,)
    plan = make_plan(SPEC, H200)
    assert plan.gpu_reserved_bytes == probe.actual.gpu_reserved_bytes
    assert plan.gpu_bytes == pytest.approx(probe.actual.gpu_device_bytes, rel=0.001)
    assert (source_of(plan).probed, source_of(unprobed).probed) == (True, False)
    elsewhere = replace(H200, hostname="elsewhere", cpu_name="other")
    uncorrected = step_of(make_plan(SPEC, elsewhere, workload=probe.workload))
    assert step_of(plan).forward_s == pytest.approx(1.2 * uncorrected.forward_s)
    assert recommend(other, H200, 1) == unprobed


def test_a_probe_corrects_each_part_of_a_step_by_its_own_error() -> None:
    probe = probe_of(1.0, 0.0)
    exposed_s = step_of(make_plan(SPEC, H200, workload=probe.workload)).exposed_optimizer_s
    predicted = replace(probe.predicted, exposed_optimizer_s=exposed_s)
    actual = replace(
        probe.actual, forward_s=1.1 * probe.actual.forward_s, exposed_optimizer_s=exposed_s + 0.2
    )
    store(H200, probe=replace(probe, predicted=predicted, actual=actual))
    probed, unprobed = steps_of(SPEC, probe)
    assert probed.forward_s == pytest.approx(1.1 * unprobed.forward_s)
    assert probed.exposed_optimizer_s == pytest.approx(exposed_s + 0.2)
    assert probed.backward_s == pytest.approx(unprobed.backward_s)


def test_a_small_wait_does_not_multiply_a_long_one() -> None:
    """What is exposed is a small difference of large times, so its ratio says little about another
    setting.
    """
    probe = probe_of(1.0, 0.0)
    predicted, actual = (
        replace(figures, exposed_optimizer_s=seconds)
        for figures, seconds in ((probe.predicted, 0.01), (probe.actual, 0.06))
    )
    store(H200, probe=replace(probe, predicted=predicted, actual=actual))
    spec = with_values(SPEC, {"train.gradient_clipping": "1", "offload.speculation": "off"})
    probed, unprobed = steps_of(spec, probe)
    assert unprobed.exposed_optimizer_s > 0.3
    assert probed.exposed_optimizer_s == pytest.approx(unprobed.exposed_optimizer_s + 0.05)


@pytest.mark.parametrize("mode", ["superoffload", "gpu"])
def test_a_probe_of_the_gpus_work_corrects_every_mode_alike(mode: str) -> None:
    """Otherwise the mode that was not probed would seem the faster one."""
    store(H200, probe=(probe := probe_of(3.8, 0.0)))
    probed, unprobed = steps_of(with_values(SPEC, {"offload.mode": mode}), probe)
    assert probed.forward_s == pytest.approx(3.8 * unprobed.forward_s)
    assert probed.backward_s == pytest.approx(3.8 * unprobed.backward_s)


def memory_of(plan: Plan, kind: TermKind) -> int:
    return sum(term.bytes for term in plan.breakdown if term.kind == kind)


def test_memory_beyond_the_formulas_is_shared_by_modes() -> None:
    """Otherwise a mode that was not probed would seem to fit where the probed one just does."""
    gpu = with_values(SPEC, {"offload.mode": "gpu"})
    before = make_plan(gpu, H200, workload=probe_of(1.0, 0.0).workload)
    store(H200, probe=(probe := probe_of(1.0, 1.5)))
    assert make_plan(gpu, H200).gpu_reserved_bytes == before.gpu_reserved_bytes + 1_500_000_000
    assert memory_of(make_plan(gpu, H200), "cuda-context") == memory_of(before, "cuda-context"), (
        "a mode's own"
    )
    as_predicted = replace(probe.actual, gpu_reserved_bytes=probe.predicted.gpu_reserved_bytes)
    store(H200, probe=replace(probe, mode="zerooffload", actual=as_predicted))
    assert make_plan(gpu, H200).gpu_reserved_bytes == before.gpu_reserved_bytes, (
        "not every probed mode took it"
    )


def test_less_memory_is_promised_to_no_other_mode() -> None:
    gpu = with_values(SPEC, {"offload.mode": "gpu"})
    before = make_plan(gpu, H200, workload=probe_of(1.0, 0.0).workload)
    store(H200, probe=probe_of(1.0, -1.0))
    assert make_plan(gpu, H200).gpu_reserved_bytes == before.gpu_reserved_bytes


def test_a_plan_says_what_another_modes_probe_corrected() -> None:
    store(H200, probe=probe_of(1.2, 1.5))
    own = source_of(make_plan(SPEC, H200))
    assert (own.probed, own.probed_modes) == (True, ("superoffload",))
    other = make_plan(with_values(SPEC, {"offload.mode": "gpu"}), H200)
    assert source_of(other).probed_modes == ("superoffload",)
    assert other.mode == "gpu"
    assert "superoffload" in _speed_source_text(source_of(other), other.mode)
    assert "superoffload" not in _speed_source_text(own, "superoffload")


def test_probe_takes_the_slack_away_at_most() -> None:
    store(H200, probe=probe_of(1.0, -30.0))
    plan = make_plan(SPEC, H200)
    assert [term.bytes for term in plan.breakdown if term.kind == "allocator-slack"] == [0]
    assert all(term.bytes >= 0 for term in plan.breakdown)
