"""Train ``tiny`` on one rank for a while, and print every alarm that it gives. A host that does
nothing else should give none.

    PYTHONPATH=.:trainer python benchmarks/false_alarms.py --minutes 60
    PYTHONPATH=.:trainer python benchmarks/false_alarms.py --run RUN

Alarms are found again in the records and samples of the run, as its supervisor finds them while it
trains: that it is slower than planned and why, warnings of the trainer, and alerts. Where a plan
does not know how long a step takes, as without GPUs, the run is compared with the medians of its
own first minute. Prints one line for each alarm, with the minutes since the start, and returns 1 if
there was one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from msgspec.structs import replace

from so_tui.launch.launch import prepare, read_launch
from so_tui.launch.lifecycle import start, stop
from so_tui.launch.supervisor.alerts import alert_text
from so_tui.launch.supervisor.slowness import SlowWatch, slowdown_text
from so_tui.machine import inspect_machine
from so_tui.machine.types import Machine
from so_tui.plan.plan import Plan, StepTime
from so_tui.runs import RunDirectory, read_state
from so_tui.runs.records import (
    FINAL_STATES,
    MetricRecord,
    Sample,
    StepRecord,
    WarningRecord,
    decode_metric,
    decode_sample,
)
from so_tui.runs.segments import read_span, segments
from so_tui.spec import find_preset, with_values

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "trainer")]


FIRST_STEPS = 3
"""Which compile and allocate."""
USUAL_S = 60.0
"""From the first of the others on: what the rest is compared with where the plan has no time of a
step.
"""
POLL_S = 1.0
EXPECTED_ALERTS = {"ended", "checkpoint"}
"""That something ordinary happened."""


@dataclass(frozen=True)
class Alarm:
    """Something that a user would have been told, in seconds since the epoch."""

    time: float
    text: str


def main() -> int:
    """Train, unless a run is given, and print its alarms."""
    given = _parser().parse_args()
    run = (
        RunDirectory(given.run.resolve())
        if given.run
        else trained(60 * given.minutes, given.folder)
    )
    state = read_state(run)
    launch = read_launch(run, state.attempt)
    records = [
        record for line in lines(run.metrics_dir) if (record := decode_metric(line)) is not None
    ]
    samples = [
        sample
        for line in lines(run.samples_dir(state.host), "raw-")
        if (sample := decode_sample(line)) is not None
    ]
    steps = [record for record in records if isinstance(record, StepRecord)]
    if len(steps) <= FIRST_STEPS:
        sys.exit(f"{run.name} {state.state} after {len(steps)} steps: {state.reason}")
    plan, begun = with_step_time(launch.plan, steps), steps[0].time
    found = sorted(
        [
            *slow_moments(plan, launch.machine, state.attempt, records, samples),
            *(
                Alarm(record.time, f"{record.code}: {record.message}")
                for record in records
                if isinstance(record, WarningRecord)
            ),
            *(
                Alarm(one.time, alert_text(one, run.name, state))
                for one in state.alerts
                if one.kind not in EXPECTED_ALERTS
            ),
        ],
        key=lambda alarm: alarm.time,
    )
    for alarm in found:
        print(f"{(alarm.time - begun) / 60:8.1f} min  {alarm.text}")
    assert plan.step is not None
    hours = (steps[-1].time - begun) / 3600
    slowest = max(step.step_s for step in steps[FIRST_STEPS:])
    print(
        f"{len(found)} alarms in {hours:.2f} h, {len(steps)} recorded steps and {len(samples)} "
        f"samples; a step takes {plan.step.total_s:.3f} s, the slowest took {slowest:.3f} s"
    )
    return 1 if found else 0


def lines(folder: Path, stem: str = "") -> Iterator[bytes]:
    """Yield all lines of a family of segments."""
    for path in segments(folder, stem).values():
        yield from read_span(path, 0, path.stat().st_size)


def trained(seconds: float, folder: Path) -> RunDirectory:
    """Train for so many seconds after the first step, stop, and return the run."""
    changes = {
        "gpus": "1",
        "train.steps": "100000000",
        "checkpoint.at_end": "false",
        "checkpoint.every_minutes": "0",
    }
    run = start(
        prepare(with_values(find_preset("tiny").spec, changes), inspect_machine()), runs_dir=folder
    )
    print(f"training in {run.path}", flush=True)
    until = float("inf")
    try:
        while time.monotonic() < until and (state := read_state(run)).state not in FINAL_STATES:
            if state.step and until == float("inf"):
                until = time.monotonic() + seconds
            time.sleep(POLL_S)
    finally:
        stop(run)
    return run


def with_step_time(plan: Plan, steps: Sequence[StepRecord]) -> Plan:
    """Return a plan that has a time of a step: its own, or what the first minute shows."""
    if plan.step is not None:
        return plan
    counted = steps[FIRST_STEPS:]
    usual = [step for step in counted if step.time - counted[0].time <= USUAL_S]

    def of(name: str) -> float:
        return float(median(getattr(step, name) for step in usual))

    rest_s = max(0.0, of("step_s") - of("forward_s") - of("backward_s") - of("data_s"))
    step = StepTime(
        forward_s=of("forward_s"),
        backward_s=of("backward_s"),
        exposed_optimizer_s=rest_s,
        data_s=of("data_s"),
    )
    return replace(plan, step=step)


def slow_moments(
    plan: Plan,
    machine: Machine,
    attempt: int,
    records: Sequence[MetricRecord],
    samples: Sequence[Sample],
) -> Iterator[Alarm]:
    """Yield when a run became slower than planned, and when the most likely cause changed, as its
    supervisor sees it.
    """
    watch, told, rest = SlowWatch(plan, machine, attempt), "", list(records)
    for sample in samples:
        known = next(
            (index for index, record in enumerate(rest) if record.time > sample.time), len(rest)
        )
        watch.take(rest[:known])
        del rest[:known]
        watch.sample(sample)
        cause = (
            ""
            if watch.found is None
            else next((cause.code for cause in watch.found.causes), "unexplained")
        )
        if watch.found is not None and cause != told:
            yield Alarm(sample.time, slowdown_text(watch.found))
        told = cause


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="how long to train (default 60)"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("build/false-alarms"),
        help="where to train (default build/false-alarms)",
    )
    parser.add_argument("--run", type=Path, help="look at this run instead of training")
    return parser


if __name__ == "__main__":
    sys.exit(main())
