"""What a probe found corrects every part of a step that another plan shares with it, and no other
part.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from so_tui.model.profile import profile_of
from so_tui.plan.fit import assess, fetching_of, step_model, target_of
from so_tui.plan.measured import STEP_PARTS, Figures, Passes, Probe, Rates, store
from so_tui.plan.plan import StepTime
from so_tui.plan.planner import make_plan
from so_tui.plan.rates import DIGEST
from so_tui.plan.show import _speed_source_text
from so_tui.plan.step_time import StepModel
from so_tui.plan.workload import Workload
from so_tui.spec import load_catalog, with_values
from so_tui.spec.run_spec import RunSpec
from tests.support import planning
from tests.support.machines import x86
from tests.support.planning import source_of

H200 = x86("NVIDIA H200")
WORKLOAD = Workload()
LONG = with_values(
    load_catalog().presets["qwen3-4b-random"].spec,
    {
        "gpus": "1",
        "offload.mode": "superoffload",
        "offload.ratio": "0.9",
        "model.activation_checkpointing": "full",
    },
)
"""Its passes take longer than fetching all weights."""
SHORT = with_values(LONG, {"data.sequence_length": "1024", "train.micro_batch": "1"})
"""Its forward takes less, its backward longer."""
HOST = {"offload.parameters": "cpu"}
SLOW_BUS = Rates(measured="2026-11-21T10:00:00+00:00", seconds=40.0, h2d_bytes_per_s=2e9)


def step_of(spec: RunSpec, *, probed: bool = True) -> StepTime:
    return planning.step_of(make_plan(spec, H200, workload=WORKLOAD, probed=probed))


def corrected(spec: RunSpec) -> tuple[float, float]:
    """Return how many times as long passes are planned to take as without a probe."""
    found, predicted = step_of(spec), step_of(spec, probed=False)
    return found.forward_s / predicted.forward_s, found.backward_s / predicted.backward_s


def on_host(spec: RunSpec) -> RunSpec:
    return with_values(spec, HOST)


def model_of(spec: RunSpec) -> StepModel:
    target = target_of(spec, H200, workload=WORKLOAD, probed=False)
    model = step_model(assess(spec, target).placement, target)
    assert model is not None
    return model


def fetched_s(spec: RunSpec) -> float:
    return model_of(spec).fetched_weights_s


def computing(spec: RunSpec) -> Passes:
    """As predicted."""
    fetching = fetching_of(model_of(spec))
    assert fetching is not None
    return fetching.computing


def probe_of(
    spec: RunSpec, forward: float, backward: float, exposed: float = 1.0, more_gb: float = 0.0
) -> Probe:
    """Return a probe that took so many times what was predicted of its passes and its exposed
    optimizer.
    """
    fetches = spec.offload.parameters == "cpu"
    plan = make_plan(spec, H200, workload=WORKLOAD, probed=False)
    step = step_of(spec, probed=False)
    predicted = Figures(
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
    )
    return Probe(
        measured="2026-11-21T10:00:00+00:00",
        model=profile_of(spec.model).key,
        mode="superoffload",
        ranks=1,
        settings=f"{spec.micro_batch_tokens} tokens, weights {spec.offload.parameters}",
        workload=WORKLOAD,
        predicted=predicted,
        actual=actual,
        constants=DIGEST,
        step_parts=STEP_PARTS,
        host_weights=fetches,
        computing=computing(spec) if fetches else None,
    )


def test_fetching_is_hidden_as_other_tests_assume() -> None:
    assert step_of(on_host(LONG)).forward_s == computing(on_host(LONG)).forward_s
    assert step_of(on_host(SHORT)).forward_s > 1.2 * computing(on_host(SHORT)).forward_s
    assert step_of(on_host(SHORT)).backward_s == computing(on_host(SHORT)).backward_s


def test_a_probe_that_hid_fetching_corrects_by_the_lower_error() -> None:
    """Plans that do not fetch take the lower error of its two passes: a pass takes at least as long
    as its computation, and the rest may have been a wait for weights.
    """
    store(H200, probe=(probe := probe_of(on_host(LONG), 1.3, 1.2, exposed=1.5)))
    for spec in (LONG, SHORT, with_values(LONG, {"offload.mode": "gpu"})):
        assert corrected(spec) == pytest.approx((1.2, 1.2))
    assert corrected(on_host(LONG)) == pytest.approx((1.3, 1.2))
    adam, predicted = (step_of(LONG, probed=probed).exposed_optimizer_s for probed in (True, False))
    more = 0.5 * min(predicted, probe.predicted.exposed_optimizer_s)
    assert adam == pytest.approx(predicted + more)


def test_memory_of_a_fetching_probe_is_its_own() -> None:
    store(H200, probe=probe_of(on_host(LONG), 1.0, 1.0, more_gb=2.0))
    for spec, more in ((LONG, 0), (on_host(LONG), 2_000_000_000)):
        probed, unprobed = (
            make_plan(spec, H200, workload=WORKLOAD, probed=probed).gpu_reserved_bytes
            for probed in (True, False)
        )
        assert probed == unprobed + more


def test_a_probe_whose_forward_waited_corrects_what_waits() -> None:
    """And its backward what is computed."""
    store(H200, probe=probe_of(on_host(SHORT), 4.0, 1.1))
    assert corrected(LONG) == pytest.approx((1.1, 1.1))
    assert corrected(on_host(SHORT)) == pytest.approx((4.0, 1.1))
    hidden, predicted = step_of(on_host(LONG)), step_of(on_host(LONG), probed=False)
    fetched = fetched_s(on_host(LONG))
    assert fetched < predicted.forward_s < 4 * fetched
    assert hidden.forward_s == pytest.approx(4 * fetched)
    assert hidden.backward_s == pytest.approx(1.1 * predicted.backward_s)


def test_a_probe_of_two_waits_says_nothing_of_computation() -> None:
    store(H200, rates=SLOW_BUS)
    store(H200, probe=(probe := probe_of(on_host(SHORT), 1.4, 1.4)))
    assert probe.computing is not None
    assert probe.predicted.backward_s > probe.computing.backward_s
    assert corrected(LONG) == (1.0, 1.0)
    source = source_of(make_plan(LONG, H200, workload=WORKLOAD))
    assert (source.probed, source.probed_passes) == (True, False), "of the optimizer only"
    assert _speed_source_text(source, "superoffload") != _speed_source_text(
        replace(source, probed_passes=True), "superoffload"
    )
    gpu = with_values(LONG, {"offload.mode": "gpu"})
    assert not source_of(make_plan(gpu, H200, workload=WORKLOAD)).probed
    assert corrected(on_host(SHORT)) == pytest.approx((1.4, 1.4))


@pytest.mark.parametrize("error", [0.2, 1.1, 3.0])
def test_probe_with_weights_corrects_what_is_computed(
    error: float,
) -> None:
    """How long fetching takes is as predicted."""
    store(H200, probe=probe_of(LONG, error, error))
    for spec in (on_host(LONG), on_host(SHORT)):
        found, predicted, computed = step_of(spec), step_of(spec, probed=False), computing(spec)
        waits = predicted.forward_s > computed.forward_s
        shortest = predicted.forward_s if waits else fetched_s(spec)
        assert found.forward_s == pytest.approx(max(error * computed.forward_s, shortest))
        assert found.backward_s == pytest.approx(max(error * computed.backward_s, fetched_s(spec)))


def test_each_plan_is_corrected_by_its_own_kind_of_probe() -> None:
    store(H200, probe=probe_of(LONG, 1.1, 1.1))
    store(H200, probe=probe_of(on_host(LONG), 1.5, 1.5))
    assert corrected(LONG)[0] == pytest.approx(1.1)
    assert corrected(on_host(LONG))[0] == pytest.approx(1.5)


def test_probe_that_hides_fetching_corrects_nothing() -> None:
    """Older ones do not."""
    store(H200, probe=replace(probe_of(on_host(LONG), 1.5, 1.5, more_gb=1.0), computing=None))
    for spec in (LONG, on_host(LONG)):
        assert make_plan(spec, H200, workload=WORKLOAD) == make_plan(
            spec, H200, workload=WORKLOAD, probed=False
        )


@pytest.mark.parametrize(
    ("probed", "planned", "where"), [(on_host(LONG), LONG, "host"), (LONG, on_host(LONG), "gpu")]
)
def test_plan_says_where_the_probe_had_weights(
    probed: RunSpec, planned: RunSpec, where: str
) -> None:
    store(H200, probe=probe_of(probed, 1.2, 1.2))
    source = source_of(make_plan(planned, H200, workload=WORKLOAD))
    assert (source.probed, source.probed_weights) == (True, where)
    assert source_of(make_plan(probed, H200, workload=WORKLOAD)).probed_weights == ""
    own, other = (
        _speed_source_text(found, "superoffload")
        for found in (replace(source, probed_weights=""), source)
    )
    assert own != other
