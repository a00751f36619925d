"""Why steps take longer than planned: each part that is measured against the part that was planned.
Pure functions.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from so_tui.folders import Environment
from so_tui.launch.supervisor.samples import IDLE_NICE, misplaced, share_on_nodes
from so_tui.machine.types import Machine
from so_tui.plan.notes import StepsEarly
from so_tui.plan.plan import Plan, PlannedRates, StepTime
from so_tui.runs.records import (
    Cause,
    MetricRecord,
    PhaseRecord,
    Placements,
    Sample,
    Slowdown,
    StepRecord,
)
from so_tui.trust.text import bounded, brief_line
from so_tui.units import bandwidth, duration, percent, plural, thousands

# Which network NCCL uses between nodes, from what it logs, beside the one that the site profile
# names.
#
# Without the site's plugin NCCL falls back to TCP sockets. Training goes on, many times slower,
# and nothing else says so.


EXPECTED_VARIABLE = "SO_TUI_NETWORK"
"""Tells the supervisors of a job which network NCCL should use between its nodes, by the name that
NCCL gives it.
"""
_SOCKETS = "Socket"
_USES = re.compile(r"NCCL INFO Using network (\S.*)")


def missing_network(lines: Iterable[str], environ: Environment) -> str:
    """Return the network that ``environ`` says to expect, if NCCL uses sockets instead according to
    these lines of the log; otherwise nothing.
    """
    expected = environ.get(EXPECTED_VARIABLE, "")
    if expected in ("", _SOCKETS):  # nearly always: then no line of the log is looked at
        return ""
    sockets = any(used and used[1].strip() == _SOCKETS for used in map(_USES.search, lines))
    return expected if sockets else ""


_LEAST_SHARE = 0.1
"""Share of the excess that a cause must explain to be named."""
LEAST_OWN_SHARE = 0.9
"""Share of a rank's memory that should be on its own node. Libraries and what was allocated before
binding may be elsewhere.
"""
_LEAST_FOREIGN_SHARE = 0.1
"""What the operating system and monitoring may take of the cores without being named."""
_LOW_ADAM_RATE = 0.8
"""Share of the planned rate below which Adam's counts as low."""
_LOW_COPY_RATE = 0.5
"""The same of copies. Beside other traffic they are slower than alone: undisturbed steps on one to
four H100 and H200 had 0.51 to 1.
"""
_LOW_CLOCK = 0.7
"""Share of the highest clock below which a GPU counts as throttled, whatever the driver says: power
limits alone leave more.
"""
_BUSY_PERCENT = 50
_USUAL = {"power"}
"""Reasons for throttling under which GPUs compute as fast as they were measured."""
_MOST_NAMES = 2


class _Clock(Struct, frozen=True, kw_only=True):
    """The clock of the slowest GPU while it computed."""

    mhz: float
    max_mhz: float
    throttled_share: float
    """Share of the time in which it was held down by something else than the power limit."""


class _Measured(Struct, frozen=True, kw_only=True):
    """Medians over some steps, and what was seen of the host meanwhile. None where nothing was
    measured.
    """

    step_s: float
    data_s: float
    forward_s: float
    backward_s: float
    adam_busy_s: float | None = None
    adam_bytes_per_s: float | None = None
    d2h_bytes_per_s: float | None = None
    h2d_bytes_per_s: float | None = None
    foreign_share: float = 0.0
    """Share of the time of the run's cores that processes of others took."""
    foreign: tuple[str, ...] = ()
    """Names of the busiest of them."""
    clock: _Clock | None = None
    placement: Placements = ()
    held_back_share: float = 0.0
    """Share of the steps whose gradient norm exceeded the limit, so that Adam waited for it."""


def _ranked_causes(measured: _Measured, plan: Plan, step: StepTime) -> tuple[Cause, ...]:
    """Return what makes steps longer than ``step``, as the plan has them, most likely first.

    Waiting for data explains the time by which that grew, every other cause part of the rest. Of
    those that explain at least half as much as the one that explains most, causes come before their
    effects.
    """
    excess_s = measured.step_s - step.total_s
    compute_excess_s = max(0.0, excess_s - (measured.data_s - step.data_s))
    found = []
    for cause in _causes(measured, plan, step):
        if cause.code != "data":
            cause = replace(cause, seconds=min(cause.seconds, compute_excess_s))
        if cause.seconds >= _LEAST_SHARE * excess_s and cause.seconds > 0:
            found.append(cause)
    most_s = max((cause.seconds for cause in found), default=0.0)
    return tuple(sorted(found, key=lambda cause: cause.seconds < most_s / 2))


def _causes(measured: _Measured, plan: Plan, step: StepTime) -> Iterator[Cause]:
    """Yield what was measured that takes time, from cause to effect: a load on the cores also slows
    Adam down, so where both explain about as much, the first is named first.
    """
    bound = {binding.rank: binding for binding in plan.binding}
    places = [(place, bound[place.rank]) for place in measured.placement if place.rank in bound]
    elsewhere = [
        place.rank for place, binding in places if misplaced(place, binding.cpus, binding.main_cpus)
    ]
    if elsewhere:
        count, first = len(elsewhere), elsewhere[0]
        yield Cause(code="binding", seconds=math.inf, measured=count, planned=0.0, rank=first)
    shares = [
        (share, place.rank)
        for place, binding in places
        if (share := share_on_nodes(place, binding.memory_policy.nodes)) is not None
    ]
    share, rank = min(shares, default=(1.0, 0))
    if share < LEAST_OWN_SHARE:
        yield Cause(code="memory-node", seconds=math.inf, measured=share, planned=1.0, rank=rank)
    taken, clock = measured.foreign_share, measured.clock
    if taken >= _LEAST_FOREIGN_SHARE:
        yield Cause(
            code="foreign-load",
            seconds=(measured.step_s - measured.data_s) * taken,
            measured=taken,
            planned=0.0,
            nice=max((place.nice for place in measured.placement), default=0),
            processes=measured.foreign,
        )
    if clock and (clock.throttled_share >= 0.5 or clock.mhz < _LOW_CLOCK * clock.max_mhz):
        lost_s = (measured.forward_s + measured.backward_s) * (1 - clock.mhz / clock.max_mhz)
        yield Cause(code="clocks", seconds=lost_s, measured=clock.mhz, planned=clock.max_mhz)
    waits_s = next(
        (fact.held_back_step_s for fact in plan.reasons if isinstance(fact, StepsEarly)), None
    )
    if waits_s is not None and measured.held_back_share:
        seconds = measured.held_back_share * (waits_s - step.total_s)
        yield Cause(
            code="clipping", seconds=seconds, measured=measured.held_back_share, planned=waits_s
        )
    if plan.rates is not None:
        yield from _slow_transfers(measured, plan.rates)
    yield Cause(
        code="data",
        seconds=measured.data_s - step.data_s,
        measured=measured.data_s,
        planned=step.data_s,
    )


def _slow_transfers(measured: _Measured, rates: PlannedRates) -> Iterator[Cause]:
    """Yield the direction in which copies lose more time, and Adam."""
    directions = (
        (measured.d2h_bytes_per_s, rates.d2h_bytes_per_s, rates.d2h_bytes),
        (measured.h2d_bytes_per_s, rates.h2d_bytes_per_s, rates.h2d_bytes),
    )
    slow = [
        (size / was - size / should, was, should)
        for was, should, size in directions
        if was and was < _LOW_COPY_RATE * should
    ]
    if slow:
        seconds, was, should = max(slow)
        yield Cause(code="copies", seconds=seconds, measured=was, planned=should)
    rate, busy_s, should = measured.adam_bytes_per_s, measured.adam_busy_s, rates.adam_bytes_per_s
    if rate is not None and busy_s is not None and rate < _LOW_ADAM_RATE * should:
        seconds = busy_s * (1 - rate / should)
        yield Cause(code="adam", seconds=seconds, measured=rate, planned=should)


_MEDIANS = (
    "step_s",
    "data_s",
    "forward_s",
    "backward_s",
    "adam_busy_s",
    "adam_bytes_per_s",
    "d2h_bytes_per_s",
    "h2d_bytes_per_s",
)
"""Fields of a step of which the median is measured."""


def _measured_of(
    steps: Sequence[StepRecord],
    samples: Sequence[Sample],
    machine: Machine,
    plan: Plan,
) -> _Measured:
    """Return what was measured over some steps (at least one), with the samples of the host that
    were taken meanwhile.
    """
    binding, limit = plan.binding, plan.spec.train.gradient_clipping
    cpus = {cpu for rank in binding for cpu in rank.cpus}
    norms = [norm for step in steps if (norm := step.gradient_norm) is not None]
    medians: dict[str, Any] = {}
    for name in _MEDIANS:
        values = [value for step in steps if (value := getattr(step, name)) is not None]
        medians[name] = statistics.median(values) if values else None
    return _Measured(
        **medians,
        foreign_share=_foreign_share(samples, machine, cpus),
        foreign=_foreign_names(samples, cpus),
        clock=_slowest_clock(samples, {rank.gpu for rank in binding}),
        placement=next((sample.placement for sample in reversed(samples) if sample.placement), ()),
        held_back_share=sum(norm > limit for norm in norms) / len(steps) if limit else 0.0,
    )


def _foreign_share(samples: Iterable[Sample], machine: Machine, cpus: set[int]) -> float:
    """Return the share of the time of these CPUs that other processes than the run's took; 0
    without samples.
    """
    places = {
        node.id: [index for index, cpu in enumerate(node.cpus) if cpu in cpus]
        for node in machine.numa_nodes
    }
    foreign_s = available_s = 0.0
    for sample in samples:
        percents = [node.cores[place] for node in sample.nodes for place in places[node.id]]
        used_s = sum(percents) / 100 * sample.interval_s
        foreign_s += used_s - sample.run_cpu_s - sample.supervisor_cpu_s
        available_s += len(percents) * sample.interval_s
    return min(1.0, max(0.0, foreign_s / available_s)) if available_s > 0 else 0.0


def _foreign_names(samples: Iterable[Sample], cpus: set[int]) -> tuple[str, ...]:
    """Return the names of the foreign processes that took most of these CPUs."""
    cores: defaultdict[str, float] = defaultdict(float)
    for sample in samples:
        for process in sample.foreign:
            if process.cpu in cpus:
                cores[process.name] += process.cores
    return tuple(sorted(cores, key=lambda name: -cores[name])[:_MOST_NAMES])


def _slowest_clock(samples: Iterable[Sample], gpus: set[int | None]) -> _Clock | None:
    """Return the clock of the GPU that was furthest below its highest one; None where clocks are
    not known.
    """
    by_gpu: defaultdict[int, list[tuple[int, int, bool]]] = defaultdict(list)
    for sample in samples:
        for gpu in sample.gpus:
            busy = gpu.index in gpus and (gpu.busy_percent or 0) >= _BUSY_PERCENT
            if busy and gpu.clock_mhz and gpu.clock_max_mhz:
                held_down = not {*gpu.throttling} <= _USUAL
                by_gpu[gpu.index].append((gpu.clock_mhz, gpu.clock_max_mhz, held_down))
    return min(
        [
            _Clock(
                mhz=statistics.median(mhz for mhz, _, _ in seen),
                max_mhz=seen[-1][1],
                throttled_share=statistics.fmean(held_down for *_, held_down in seen),
            )
            for seen in by_gpu.values()
        ],
        key=lambda clock: clock.mhz / clock.max_mhz,
        default=None,
    )


# Sentences about a run that is slower than its plan, for the dashboard and ``run --plain``.


_LONGEST_NAME = 20
_MOST = 8
"""Causes that are read: more than there are."""
_WORDS = {
    "binding": "rank {rank}{more} may not run on the planned cores",
    "memory-node": "only {share} of rank {rank}'s memory is on its node",
    "foreign-load": "{others}",
    "clocks": "a GPU runs at {measured} of {planned} MHz",
    "clipping": (
        "gradient norms above the limit hold Adam back in {share} of the steps; the plan has "
        "{planned_s} for these"
    ),
    "copies": "copies between GPU and host reach {rate} instead of {planned_rate}",
    "adam": "Adam moves {rate} instead of {planned_rate}",
    "data": "each step waits {waited} for data",
}
_REMEDIES = {
    "binding": (
        "Something moved its processes (`taskset`, a cpuset): the dashboard shows where they are. "
        "Start the run again."
    ),
    "memory-node": (
        "Its node was full, or binding failed: `so-tui doctor` shows what fills it. Start the run "
        "again once it is free."
    ),
    "foreign-load": (
        "End the other processes on its cores (`top`), or give the run a node of its own."
    ),
    "clocks": (
        "`nvidia-smi -q -d PERFORMANCE` says what limits the clock: heat, power or a setting."
    ),
    "clipping": (
        "Steps are as fast as planned once norms are below `train.gradient_clipping`. A higher "
        "limit changes training."
    ),
    "copies": (
        "`so-tui doctor` checks the link between GPU and host; `so-tui calibrate` measures it once "
        "the GPU is idle."
    ),
    "adam": "`so-tui doctor` looks for limits of cores and memory.",
    "data": (
        "Put the data and so-tui's cache on a faster disk, and look for other load on this host "
        "(`top`)."
    ),
}


def slowdown_text(found: Slowdown) -> str:
    """Return how slow a run is and why, the most likely cause first."""
    slower = (
        f"slower than planned ({duration(bounded(found.step_s))} a step, not "
        f"{duration(bounded(found.planned_s))})"
    )
    causes = [text for cause in found.causes[:_MOST] if (text := _cause_text(cause))]
    if not causes:
        return f"{slower}: nothing that is measured explains it"
    return f"{slower}: {'; also '.join(causes)}"


def slowdown_remedy(found: Slowdown) -> str:
    """Return what helps against the most likely cause."""
    known = (remedy for cause in found.causes[:_MOST] if (remedy := _REMEDIES.get(cause.code)))
    return next(known, "`so-tui plan --probe` measures whether the plan is right.")


def _cause_text(cause: Cause) -> str:
    """Return a cause in words; empty for one that this version does not know."""
    measured, planned = bounded(cause.measured), bounded(cause.planned)
    return _WORDS.get(cause.code, "").format(
        rank=int(bounded(cause.rank)),
        more=f" and {plural(round(measured) - 1, 'more rank')}" if measured > 1 else "",
        share=percent(min(measured, 1.0)),
        others=" and ".join(_foreign_load(cause, measured)),
        measured=thousands(round(measured)),
        planned=thousands(round(planned)),
        rate=bandwidth(measured),
        planned_rate=bandwidth(planned),
        waited=duration(measured),
        planned_s=duration(planned),
    )


def _foreign_load(cause: Cause, share: float) -> Iterator[str]:
    names = (
        f" ({', '.join(brief_line(name, _LONGEST_NAME) for name in cause.processes[:2])})"
        if cause.processes
        else ""
    )
    yield f"other processes{names} take {percent(min(share, 1.0))} of its cores' time"
    if cause.nice > 0:
        yield "go first, as it runs at " + (
            f"nice {cause.nice}" if cause.nice < IDLE_NICE else "idle priority"
        )


# Notice that a run is slower than its plan for a while, and find out why. No file is read here.
#
# A moment in which the host is busy is none of it: both halves of the last minutes must be slow.


SLOWER = 1.2
"""Steps that take longer than so many planned ones are slow."""
_STILL_SLOWER = 1.1
"""The same once a run counts as slow, so that it does not change back and forth."""
WINDOW_S = 120.0
LEAST_STEPS = 10
_CHECK_S = 10.0
_FIRST_STEPS = 3
"""Records of an attempt's first steps, which compile and allocate, are left out."""
_MOST_STEPS = 500
"""Of a window; fast steps are thinned out."""


class SlowWatch:
    """Compares one attempt with its plan; finds nothing if that does not know how long a step
    takes.
    """

    def __init__(self, plan: Plan, machine: Machine, attempt: int) -> None:
        self._plan = plan
        self._machine = machine
        self._attempt = attempt
        self._seen = self._redone = 0
        self._undisturbed = True
        self._steps: deque[StepRecord] = deque()
        self._samples: deque[Sample] = deque()
        self._due = 0.0
        self.found: Slowdown | None = None

    def take(self, records: Iterable[MetricRecord]) -> None:
        """Take new records.

        Steps beside which a checkpoint is written are not compared, nor those that were redone
        because the gradient norm exceeded the limit: plans do not count on either.
        """
        for record in records:
            if record.attempt != self._attempt or self._plan.step is None:
                continue
            if isinstance(record, PhaseRecord):
                self._undisturbed = record.phase == "training" and not record.detail
            elif isinstance(record, StepRecord):
                self._seen += 1
                redone, self._redone = record.redone_steps > self._redone, record.redone_steps
                apart = (
                    not self._steps or record.time - self._steps[-1].time >= WINDOW_S / _MOST_STEPS
                )
                if self._undisturbed and not redone and self._seen > _FIRST_STEPS and apart:
                    self._steps.append(record)

    def sample(self, sample: Sample) -> None:
        """Take a new sample of the host, and compare where that is due."""
        if self._plan.step is None or not self._steps:
            return
        self._samples.append(sample)
        while len(self._steps) > LEAST_STEPS and sample.time - self._steps[1].time >= WINDOW_S:
            self._steps.popleft()
        while self._samples and self._samples[0].time < self._steps[0].time - self._steps[0].step_s:
            self._samples.popleft()
        if sample.time >= self._due:
            self._due = sample.time + _CHECK_S
            self.found = self._compare(self._plan.step)

    def _compare(self, step: StepTime) -> Slowdown | None:
        steps = tuple(self._steps)
        lasted_s = steps[-1].time - steps[0].time
        if len(steps) < LEAST_STEPS or lasted_s < (1 - 2 / _MOST_STEPS) * WINDOW_S:
            return self.found
        bound_s = (SLOWER if self.found is None else _STILL_SLOWER) * step.total_s
        middle = len(steps) // 2
        for half in (steps[:middle], steps[middle:]):
            if statistics.median(each.step_s for each in half) <= bound_s:
                return None
        measured = _measured_of(steps, self._samples, self._machine, self._plan)
        return Slowdown(
            step=steps[-1].step,
            step_s=measured.step_s,
            planned_s=step.total_s,
            causes=_ranked_causes(measured, self._plan, step),
        )
