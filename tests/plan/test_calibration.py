"""What was measured on a machine takes the place of what is published, on it and on machines like
it. What a probe found corrects every part of a step that another plan shares with it, and no other
part.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from so_tui.model.profile import profile_of
from so_tui.plan import measured
from so_tui.plan.fit import assess, fetching_of, step_model, target_of
from so_tui.plan.plan import Plan, StepTime
from so_tui.plan.planner import make_plan, recommend
from so_tui.plan.rates import DIGEST, AttentionRate, Calibrated, published_speed
from so_tui.plan.show import _speed_source_text
from so_tui.plan.step_time import StepModel
from so_tui.plan.workload import Workload
from so_tui.spec import RunSpec, with_values
from tests.support import planning
from tests.support.machines import superchips, x86
from tests.support.planning import CATALOG, H200, bytes_of, some, source_of, spec_of

LONG = spec_of(
    "qwen3-4b-random",
    gpus="1",
    offload__mode="superoffload",
    offload__ratio="0.9",
    model__activation_checkpointing="full",
)
"""Its passes take longer than fetching all weights."""
SHORT = with_values(LONG, {"data.sequence_length": "1024", "train.micro_batch": "1"})
"""Its forward takes less, its backward longer."""
ON_GPU = with_values(LONG, {"offload.mode": "gpu"})
RATES = measured.Rates(
    measured="2026-11-21T10:00:00+00:00",
    seconds=40.0,
    matrix_flops=340e12,
    hbm_bytes_per_s=2e12,
    d2h_bytes_per_s=50e9,
    h2d_bytes_per_s=50e9,
    adam=((1, 8e9), (16, 100e9)),
    node_bytes_per_s=((0, 110e9),),
)


def plan_of(spec: RunSpec, *, probed: bool = True) -> Plan:
    return make_plan(spec, H200, workload=Workload(), probed=probed)


def step_of(spec: RunSpec, *, probed: bool = True) -> StepTime:
    return planning.step_of(plan_of(spec, probed=probed))


def corrected(spec: RunSpec) -> tuple[float, float]:
    """Return how many times as long passes are planned to take as without a probe."""
    found, predicted = step_of(spec), step_of(spec, probed=False)
    return found.forward_s / predicted.forward_s, found.backward_s / predicted.backward_s


def more_bytes(spec: RunSpec) -> int:
    """Return how much more of the GPU is planned to be reserved than without a probe."""
    return plan_of(spec).gpu_reserved_bytes - plan_of(spec, probed=False).gpu_reserved_bytes


def on_host(spec: RunSpec) -> RunSpec:
    return with_values(spec, {"offload.parameters": "cpu"})


def model_of(spec: RunSpec) -> StepModel:
    target = target_of(spec, H200, workload=Workload(), probed=False)
    return some(step_model(assess(spec, target).placement, target))


def computing(spec: RunSpec) -> measured.Passes:
    """As predicted, of a spec with weights on the host."""
    return some(fetching_of(model_of(spec))).computing


def probe_of(
    spec: RunSpec, forward: float, backward: float, exposed: float = 1.0, more_gb: float = 0.0
) -> measured.Probe:
    """Return a probe that took so many times what was predicted of its passes and its exposed
    optimizer.
    """
    fetches = spec.offload.parameters == "cpu"
    plan, step = plan_of(spec, probed=False), step_of(spec, probed=False)
    predicted = measured.Figures(
        step_s=step.total_s,
        forward_s=step.forward_s,
        backward_s=step.backward_s,
        exposed_optimizer_s=step.exposed_optimizer_s,
        gpu_reserved_bytes=plan.gpu_reserved_bytes,
        gpu_device_bytes=plan.gpu_bytes,
        host_bytes=1,
    )
    actual = replace(
        predicted,
        forward_s=forward * step.forward_s,
        backward_s=backward * step.backward_s,
        exposed_optimizer_s=exposed * step.exposed_optimizer_s,
        gpu_reserved_bytes=plan.gpu_reserved_bytes + int(more_gb * 1e9),
        gpu_device_bytes=plan.gpu_bytes + int((more_gb + 0.2) * 1e9),
    )
    return measured.Probe(
        measured=RATES.measured,
        model=profile_of(spec.model).key,
        mode="superoffload",
        ranks=1,
        settings=f"{spec.micro_batch_tokens} tokens, weights {spec.offload.parameters}",
        workload=Workload(),
        predicted=predicted,
        actual=actual,
        constants=DIGEST,
        step_parts=measured.STEP_PARTS,
        host_weights=fetches,
        computing=computing(spec) if fetches else None,
    )


def exposed_for(probe: measured.Probe, predicted_s: float, actual_s: float) -> measured.Probe:
    return replace(
        probe,
        predicted=replace(probe.predicted, exposed_optimizer_s=predicted_s),
        actual=replace(probe.actual, exposed_optimizer_s=actual_s),
    )


def test_plans_use_the_machines_own_rates_and_say_so() -> None:
    """Rates that were not measured stay as published."""
    before = make_plan(LONG, H200)
    assert measured.store(H200, rates=RATES) == measured._path_of(H200)
    after = make_plan(LONG, H200)
    assert source_of(after).calibrated == Calibrated(date=RATES.measured)
    assert source_of(before).calibrated is None
    assert planning.step_of(after).forward_s > 1.5 * planning.step_of(before).forward_s
    measured.store(H200, rates=replace(RATES, matrix_flops=None, hbm_bytes_per_s=None))
    partly = source_of(make_plan(LONG, H200))
    assert partly.published == source_of(before).published
    assert partly.calibrated is not None


def test_rates_of_a_gpu_that_nothing_is_published_of_are_enough() -> None:
    machine = x86("NVIDIA L40S", gpu_mib=46_068)
    assert published_speed("NVIDIA L40S") is None
    assert make_plan(LONG, machine).step is None
    measured.store(machine, rates=replace(RATES, layer_launch_overhead_s=2e-4))
    assert make_plan(LONG, machine).step is not None
    measured.store(machine, rates=replace(RATES, layer_launch_overhead_s=2e-4, adam=()))
    assert make_plan(LONG, machine).step is None, "how fast its CPU Adam is, nobody knows"


def test_twin_borrows_rates_and_another_kind_does_not() -> None:
    measured.store(H200, rates=RATES)
    twin = make_plan(LONG, replace(H200, hostname="node7"))
    assert source_of(twin).calibrated == Calibrated(date=RATES.measured, host=H200.hostname)
    assert measured.calibration_of(x86("NVIDIA H200", cores=32)) is None
    assert measured.calibration_of(superchips(1)) is None


@pytest.mark.parametrize(
    ("old", "new"), [("{", "["), *(("340000000000000.0", rate) for rate in ("0", "-1.0", "1e300"))]
)
def test_a_damaged_or_impossible_file_counts_as_none(old: str, new: str) -> None:
    path = measured.store(H200, rates=RATES)
    path.write_text(path.read_text().replace(old, new))
    assert new in path.read_text()
    assert measured.calibration_of(H200) is None
    assert make_plan(LONG, H200).step_s


@pytest.mark.parametrize("change", [{"constants": "another"}, {"step_parts": 1}, {}], ids=str)
def test_a_probe_of_other_constants_or_parts_corrects_nothing(change: dict[str, Any]) -> None:
    """Nor does an older one, which hid how long fetching takes."""
    probe = probe_of(LONG if change else on_host(LONG), 1.5, 1.5, more_gb=1.0)
    measured.store(H200, probe=replace(probe, computing=None, **change))
    for spec in (LONG, on_host(LONG)):
        assert plan_of(spec) == plan_of(spec, probed=False)


def test_a_probe_corrects_its_model_and_no_other() -> None:
    other = replace(CATALOG.presets["llama-3.1-8b"].spec, gpus=1)
    unprobed = recommend(other, H200)
    data = Workload(attended_tokens=300.0, trained_share=0.5, useful_share=0.98)
    probe = replace(probe_of(LONG, 1.2, 1.2, 1.2, more_gb=1.5), workload=data)
    assert measured.store(H200, probe=probe) == measured.store(H200, probe=probe)
    assert some(measured.calibration_of(H200)).probes == (probe,)
    plan = make_plan(LONG, H200)
    assert plan.gpu_reserved_bytes == probe.actual.gpu_reserved_bytes
    assert plan.gpu_bytes == pytest.approx(probe.actual.gpu_device_bytes, rel=0.001)
    assert (source_of(plan).probed, source_of(plan).workload) == (True, data)
    elsewhere = make_plan(LONG, replace(H200, hostname="b", cpu_name="other"), workload=data)
    forward_s = planning.step_of(elsewhere).forward_s
    assert planning.step_of(plan).forward_s == pytest.approx(1.2 * forward_s)
    assert recommend(other, H200) == unprobed


def test_a_probe_corrects_each_part_of_a_step_by_its_own_error() -> None:
    exposed_s = step_of(LONG).exposed_optimizer_s
    measured.store(H200, probe=exposed_for(probe_of(LONG, 1.1, 1.0), exposed_s, exposed_s + 0.2))
    # Otherwise the mode that was not probed would seem the faster one.
    assert corrected(LONG) == corrected(ON_GPU) == pytest.approx((1.1, 1.0))
    assert step_of(LONG).exposed_optimizer_s == pytest.approx(exposed_s + 0.2)


def test_a_small_wait_does_not_multiply_a_long_one() -> None:
    """What is exposed is a small difference of large times, so its ratio says little about another
    setting.
    """
    measured.store(H200, probe=exposed_for(probe_of(LONG, 1.0, 1.0), 0.01, 0.06))
    spec = with_values(LONG, {"train.gradient_clipping": "1", "offload.speculation": "off"})
    unprobed_s = step_of(spec, probed=False).exposed_optimizer_s
    assert unprobed_s > 0.3
    assert step_of(spec).exposed_optimizer_s == pytest.approx(unprobed_s + 0.05)


def test_memory_beyond_the_formulas_is_shared_by_modes() -> None:
    """Otherwise a mode that was not probed would seem to fit where the probed one just does. Less
    memory is promised to no other mode, and at most the slack is taken away.
    """
    measured.store(H200, probe=(probe := probe_of(LONG, 1.0, 1.0, more_gb=1.5)))
    assert more_bytes(ON_GPU) == 1_500_000_000
    contexts = [bytes_of(plan_of(ON_GPU, probed=one), "cuda-context") for one in (True, False)]
    assert contexts[0] == contexts[1], "a mode's own"
    as_predicted = replace(probe.actual, gpu_reserved_bytes=probe.predicted.gpu_reserved_bytes)
    measured.store(H200, probe=replace(probe, mode="zerooffload", actual=as_predicted))
    assert more_bytes(ON_GPU) == 0, "not every probed mode took it"
    for more_gb in (-1.0, -30.0):
        measured.store(H200, probe=probe_of(LONG, 1.0, 1.0, more_gb=more_gb))
        assert more_bytes(ON_GPU) == 0
    assert bytes_of(plan_of(LONG), "allocator-slack") == 0
    assert all(term.bytes >= 0 for term in plan_of(LONG).breakdown)


def test_plan_says_what_a_probe_corrected() -> None:
    """Of another mode, or one that had the weights elsewhere."""
    measured.store(H200, probe=probe_of(LONG, 1.2, 1.2))
    own, gpu = source_of(plan_of(LONG)), source_of(plan_of(ON_GPU))
    assert (own.probed, own.probed_modes, own.probed_weights) == (True, ("superoffload",), "")
    assert gpu.probed_modes == ("superoffload",)
    assert "superoffload" in _speed_source_text(gpu, "gpu")
    assert "superoffload" not in _speed_source_text(own, "superoffload")
    fetching = source_of(plan_of(on_host(LONG)))
    assert (fetching.probed, fetching.probed_weights) == (True, "gpu")
    measured.store(H200, probe=probe_of(on_host(LONG), 1.2, 1.2))
    assert source_of(plan_of(on_host(LONG))).probed_weights == ""


def test_a_probe_that_hid_fetching_corrects_by_the_lower_error() -> None:
    """Plans that do not fetch take the lower error of its two passes: a pass takes at least as long
    as its computation, and the rest may have been a wait for weights. Its memory is its own.
    """
    probe = probe_of(on_host(LONG), 1.3, 1.2, exposed=1.5, more_gb=2.0)
    measured.store(H200, probe=probe)
    for spec in (LONG, SHORT, ON_GPU):
        assert corrected(spec) == pytest.approx((1.2, 1.2))
    assert source_of(plan_of(LONG)).probed_weights == "host"
    assert corrected(on_host(LONG)) == pytest.approx((1.3, 1.2))
    adam, predicted = (step_of(LONG, probed=probed).exposed_optimizer_s for probed in (True, False))
    more = 0.5 * min(predicted, probe.predicted.exposed_optimizer_s)
    assert adam == pytest.approx(predicted + more)
    assert (more_bytes(LONG), more_bytes(on_host(LONG))) == (0, 2_000_000_000)


def test_a_probe_whose_forward_waited_corrects_what_waits() -> None:
    """And its backward what is computed."""
    measured.store(H200, probe=probe_of(on_host(SHORT), 4.0, 1.1))
    assert corrected(LONG) == pytest.approx((1.1, 1.1))
    assert corrected(on_host(SHORT)) == pytest.approx((4.0, 1.1))
    hidden, predicted = step_of(on_host(LONG)), step_of(on_host(LONG), probed=False)
    fetched_s = model_of(on_host(LONG)).fetched_weights_s
    assert fetched_s < predicted.forward_s < 4 * fetched_s
    assert hidden.forward_s == pytest.approx(4 * fetched_s)
    assert hidden.backward_s == pytest.approx(1.1 * predicted.backward_s)


def test_a_probe_of_two_waits_says_nothing_of_computation() -> None:
    slow_bus = measured.Rates(measured=RATES.measured, seconds=40.0, h2d_bytes_per_s=2e9)
    measured.store(H200, rates=slow_bus)
    measured.store(H200, probe=(probe := probe_of(on_host(SHORT), 1.4, 1.4)))
    assert probe.predicted.backward_s > some(probe.computing).backward_s
    assert corrected(LONG) == (1.0, 1.0)
    source = source_of(plan_of(LONG))
    assert (source.probed, source.probed_passes) == (True, False), "of the optimizer only"
    assert not source_of(plan_of(ON_GPU)).probed
    assert corrected(on_host(SHORT)) == pytest.approx((1.4, 1.4))


@pytest.mark.parametrize("error", [0.2, 1.1, 3.0])
def test_probe_with_weights_corrects_what_is_computed(error: float) -> None:
    """How long fetching takes is as predicted."""
    measured.store(H200, probe=probe_of(LONG, error, error))
    for spec in (on_host(LONG), on_host(SHORT)):
        found, predicted, computed = step_of(spec), step_of(spec, probed=False), computing(spec)
        fetched_s = model_of(spec).fetched_weights_s
        waits = predicted.forward_s > computed.forward_s
        shortest = predicted.forward_s if waits else fetched_s
        assert found.forward_s == pytest.approx(max(error * computed.forward_s, shortest))
        assert found.backward_s == pytest.approx(max(error * computed.backward_s, fetched_s))


def test_each_plan_is_corrected_by_its_own_kind_of_probe() -> None:
    measured.store(H200, probe=probe_of(LONG, 1.1, 1.1))
    measured.store(H200, probe=probe_of(on_host(LONG), 1.5, 1.5))
    assert corrected(LONG)[0] == pytest.approx(1.1)
    assert corrected(on_host(LONG))[0] == pytest.approx(1.5)


def test_measured_attention_is_planned_with() -> None:
    rate = AttentionRate(1024, 1e14, 5e13)
    measured.store(H200, rates=replace(RATES, attention=(("torch-flash", (rate,)),)))
    speed = some(measured.speed_of(H200, H200.gpus[0].name, measured.calibration_of(H200)))
    assert speed.attention_at("torch-flash", 1024.0) == rate
