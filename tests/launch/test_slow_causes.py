"""Why steps are slow is found by their parts; a momentary load and ordinary noise are no reason."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from so_tui.launch.supervisor import slowness
from so_tui.plan.binding import bind_ranks
from so_tui.plan.notes import StepsEarly
from so_tui.plan.plan import Plan, PlannedRates, StepTime
from so_tui.plan.planner import make_plan
from so_tui.runs.records import (
    Cause,
    GpuSample,
    MetricRecord,
    NodeSample,
    PhaseRecord,
    RankPlacement,
    Sample,
    Slowdown,
)
from tests.support.machines import superchips
from tests.support.planning import spec_of
from tests.support.records import step_record

MACHINE = superchips(1)
BINDING = bind_ranks(MACHINE, 1, cpu_adam_cores_fraction=0.9)
RATES = PlannedRates(
    adam_bytes_per_s=200e9,
    d2h_bytes_per_s=350e9,
    h2d_bytes_per_s=370e9,
    d2h_bytes=20_000_000_000,
    h2d_bytes=20_000_000_000,
)
STEP = StepTime(forward_s=0.8, backward_s=2.0, exposed_optimizer_s=0.1, data_s=0.1)
WAITS = StepsEarly(share=1.0, bytes=1, why_none="memory", held_back_step_s=4.5)
PLAN: Any = SimpleNamespace(rates=RATES, binding=BINDING, reasons=(WAITS,))
SLOW = slowness._Measured(
    step_s=4.5,
    data_s=0.1,
    forward_s=0.8,
    backward_s=2.0,
    adam_busy_s=1.2,
    adam_bytes_per_s=205e9,
    d2h_bytes_per_s=340e9,
    h2d_bytes_per_s=375e9,
    foreign_share=0.02,
    clock=slowness._Clock(mhz=1755, max_mhz=1980, throttled_share=0),
)
SLOW_ADAM = {"adam_busy_s": 2.8, "adam_bytes_per_s": 70e9}


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({"step_s": 3.0}, []),
        ({}, []),
        ({"d2h_bytes_per_s": 0.55 * RATES.d2h_bytes_per_s}, []),  # usual if GPUs share a host
        ({"foreign_share": 0.5}, ["foreign-load"]),
        ({"clock": slowness._Clock(mhz=1100, max_mhz=1980, throttled_share=0.0)}, ["clocks"]),
        ({"clock": slowness._Clock(mhz=1500, max_mhz=1980, throttled_share=0.9)}, ["clocks"]),
        ({"d2h_bytes_per_s": 25e9}, ["copies"]),
        ({"h2d_bytes_per_s": 25e9}, ["copies"]),
        (SLOW_ADAM, ["adam"]),
        ({"data_s": 1.6}, ["data"]),
        ({"held_back_share": 0.9}, ["clipping"]),
        # A load on the cores comes before the Adam that it slows; what explains little comes last.
        ({"foreign_share": 0.4, **SLOW_ADAM}, ["foreign-load", "adam"]),
        ({"foreign_share": 0.12, **SLOW_ADAM}, ["adam", "foreign-load"]),
        ({"data_s": 1.5, "foreign_share": 0.4}, ["data"]),  # nothing is left for the cores
    ],
)
def test_causes_are_ranked(changes: dict[str, Any], codes: list[str]) -> None:
    causes = slowness._ranked_causes(replace(SLOW, **changes), PLAN, STEP)
    assert [cause.code for cause in causes] == codes
    if len(causes) == 1:
        assert 0.1 < causes[0].seconds / 1.5 < 1.001


PLACED = RankPlacement(
    rank=0, cpus=BINDING[0].main_cpus, adam_cpus=BINDING[0].adam_cpus, node_bytes={0: 100}, nice=0
)


@pytest.mark.parametrize(
    ("first", "placement"),
    [
        ("binding", replace(PLACED, cpus=(0,), adam_cpus=(0,))),
        ("memory-node", replace(PLACED, node_bytes={0: 40, 1: 60})),
        ("foreign-load", replace(PLACED, nice=19)),
        ("foreign-load", replace(PLACED, rank=9, cpus=(0,), adam_cpus=(0,))),  # not planned
    ],
)
def test_placement_comes_before_its_effects(first: str, placement: RankPlacement) -> None:
    measured = replace(SLOW, placement=(placement,), foreign_share=0.5, **SLOW_ADAM)
    causes = slowness._ranked_causes(measured, PLAN, STEP)
    assert (causes[0].code, causes[-1].code) == (first, "adam")
    assert next(cause.nice for cause in causes if cause.code == "foreign-load") == placement.nice


def sample(at: float, busy: int = 100, run_cpu_s: float = 72.0, clock_mhz: int = 1755) -> Sample:
    node = NodeSample(
        id=0, cores=(busy,) * 72, memory_used_bytes=1, memory_total_bytes=2, file_cache_bytes=0
    )
    gpu = GpuSample(index=0, busy_percent=95, clock_mhz=clock_mhz, clock_max_mhz=1980)
    return Sample(
        attempt=1,
        time=1e9 + at,
        interval_s=1.0,
        nodes=(node,),
        gpus=(gpu,),
        run_cpu_s=run_cpu_s,
    )


def test_foreign_load_is_what_the_run_did_not_use() -> None:
    samples = [sample(0, busy=100, run_cpu_s=54.0), sample(1, busy=50, run_cpu_s=36.0)]
    assert slowness._foreign_share(samples, MACHINE, set(range(72))) == pytest.approx(18 / 144)
    # The run used more than these had.
    assert slowness._foreign_share(samples, MACHINE, set(range(36))) == 0.0
    assert slowness._foreign_share([], MACHINE, set(range(72))) == 0.0


def plan(step_s: float = 3.0) -> Plan:
    found = make_plan(spec_of("qwen3-14b", offload__mode="superoffload"), MACHINE)
    step = found.step
    assert step is not None
    return replace(found, step=replace(step, forward_s=step.forward_s + step_s - step.total_s))


def test_plans_say_at_what_rates_they_count() -> None:
    rates = plan().rates
    assert rates is not None
    parameters = 14_768_307_200
    assert rates.h2d_bytes <= 2 * parameters
    assert rates.d2h_bytes == rates.h2d_bytes * plan().spec.gradient_accumulation_steps
    for mode in ("gpu", "zerooffload"):
        assert make_plan(spec_of("qwen3-14b", offload__mode=mode), MACHINE).rates is None


def test_measured_are_medians_of_steps_and_the_slowest_clock() -> None:
    lengths = enumerate((1.0, 9.0, 2.0))
    steps = [
        step_record(step, step_s=long_s, adam_bytes_per_s=1e11, gradient_norm=long_s - 0.5)
        for step, long_s in lengths
    ]
    samples = [sample(0, clock_mhz=1200), sample(1, clock_mhz=1300)]
    measured = slowness._measured_of(steps, samples, MACHINE, plan())
    rates = (measured.adam_bytes_per_s, measured.d2h_bytes_per_s)
    assert (measured.step_s, *rates) == (2.0, 100e9, None)
    assert measured.clock == slowness._Clock(mhz=1250, max_mhz=1980, throttled_share=0.0)
    assert measured.held_back_share == pytest.approx(2 / 3)  # norms of 0.5, 8.5 and 1.5


def watch(
    steps: Iterable[tuple[float, float]], *others: MetricRecord, run_cpu_s: float = 72.0
) -> list[Slowdown | None]:
    """Return what a watch says after each step of ``(second, length)``."""
    watching = slowness.SlowWatch(plan(), MACHINE, attempt=1)
    watching.take(others)
    said = []
    for step, (second, step_s) in enumerate(steps):
        watching.take([step_record(step, time=1e9 + second, step_s=step_s)])
        watching.sample(sample(second, run_cpu_s=run_cpu_s))
        said.append(watching.found)
    return said


def lasting(*spans: tuple[float, float]) -> Iterator[tuple[float, float]]:
    """Yield steps for so many seconds of so many seconds a step."""
    now = 0.0
    for seconds, step_s in spans:
        end = now + seconds
        while now < end:
            now += step_s
            yield now, step_s


def test_slow_run_says_its_cause_and_stops() -> None:
    said = watch(lasting((600, 4.5)), run_cpu_s=30.0)
    last = said[-1]
    assert last is not None
    assert [last.step_s, last.planned_s] == pytest.approx([4.5, 3.0])
    assert last.causes[0].code == "foreign-load"
    first = next(index for index, found in enumerate(said) if found)
    assert first * 4.5 >= slowness.WINDOW_S
    assert watch(lasting((600, 4.5), (300, 3.0)))[-1] is None


@pytest.mark.parametrize("moment_s", [10, 55])
def test_a_moment_is_no_slowdown(moment_s: float) -> None:
    spans = [(900, 3.0), (moment_s, 9.0), (900, 3.1), (moment_s, 9.0), (300, 3.0)]
    assert not any(watch(lasting(*spans), run_cpu_s=20.0))


def test_slow_first_steps_and_steps_beside_a_checkpoint_are_none() -> None:
    first = [(60.0 * count, 60.0) for count in (1, 2, 3)]
    later = [(180 + at, step_s) for at, step_s in lasting((900, 3.1))]
    assert not any(watch([*first, *later]))
    writing = PhaseRecord(attempt=1, time=1e9, phase="training", detail="writing the checkpoint")
    assert not any(watch(lasting((900, 9.0)), writing))


def test_steps_that_were_redone_are_none() -> None:
    """When training starts, the norm often exceeds its limit: steps take twice as long."""
    watching = slowness.SlowWatch(plan(), MACHINE, attempt=1)
    for step, (second, _) in enumerate(lasting((900, 4.5))):
        step_s, redone = 6.0 if step % 3 else 3.0, step - step // 3
        record = step_record(step, time=1e9 + second, step_s=step_s, redone_steps=redone)
        watching.take([record])
        watching.sample(sample(second))
        assert watching.found is None


def test_long_steps_and_unknown_plans_say_nothing() -> None:
    said = watch(lasting((60 * 40, 60.0)))
    assert next(index for index, found in enumerate(said) if found) >= slowness.LEAST_STEPS
    unknown = slowness.SlowWatch(replace(plan(), step=None, step_s=None), MACHINE, attempt=1)
    unknown.take([step_record(step, step_s=99.0) for step in range(50)])
    unknown.sample(sample(50))
    assert unknown.found is None


def test_fast_steps_are_thinned_out() -> None:
    fast = StepTime(forward_s=0.001, backward_s=0, exposed_optimizer_s=0, data_s=0)
    watching = slowness.SlowWatch(replace(plan(), step=fast), MACHINE, attempt=1)
    for second in range(300):
        times = (1e9 + second + step / 500 for step in range(500))
        watching.take([step_record(s, time=at, step_s=0.002) for s, at in enumerate(times)])
        watching.sample(sample(second))
    assert watching.found is not None


CAUSES = ("binding", "memory-node", "foreign-load", "clocks", "clipping", "copies", "adam", "data")


def test_every_cause_has_words_that_are_few() -> None:
    """Also for those of a newer version, or of somebody else's file."""
    remedies = set()
    for code in (*CAUSES, "moon"):
        cause = Cause(code=code, seconds=1e300, measured=1e300, planned=-1e300)
        slow = Slowdown(step=1, step_s=2.0, planned_s=1.0, causes=(cause,) * 100_000)
        assert bool(slowness._cause_text(cause)) == (code != "moon")
        assert len(slowness.slowdown_text(slow)) < 1000
        remedies.add(slowness.slowdown_remedy(slow))
    assert len(remedies) == len(CAUSES) + 1


# The noise of the steps which ``benchmarks/results`` has one by one: of our engine, of others and
# without offload, on hosts with one to four H100 or H200. Steps alone decide whether a run counts
# as slow; samples of its host only explain it.

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
NAMES = (
    *("compare-h200", "whole-program-h200", "offload-h200", "offload-h200-x2"),
    *("offload-h200-x4", "offload-h100-x2"),
)
LEAST_WARMUP = 2


def measured_runs() -> Iterator[list[float]]:
    """Yield each run's steps after the warm-up, in multiples of their median."""
    for name in NAMES:
        found: Any = json.loads((RESULTS / f"{name}.json").read_text())
        for row in found if isinstance(found, list) else found["rows"]:
            steps = [step["step_s"] for step in row.get("steps", ()) if isinstance(step, dict)]
            steps = steps[max(LEAST_WARMUP, row.get("warmup", 0)) :]
            if len(steps) > 2:
                yield [step_s / median(steps) for step_s in steps]


def noisy(usual_s: float, hours: int) -> Iterator[tuple[float, float]]:
    """Yield steps of usually so many seconds, with the noise of runs drawn at random."""
    chance, runs, now = random.Random(19), list(measured_runs()), 0.0
    while now < hours * 3600:
        for noise in chance.choice(runs):
            now += usual_s * noise
            yield now, usual_s * noise


@pytest.mark.parametrize(("off", "hours", "alarm"), [(0.9, 10, 0), (1.1, 10, 0), (1.33, 1, 1)])
def test_ordinary_noise_raises_no_alarm(off: float, hours: int, alarm: bool) -> None:
    """Steps that take a third longer are still seen."""
    assert any(watch(noisy(off * 3.0, hours))) == alarm
