"""Why steps take longer than planned: each part that is measured against the part that was planned. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, get_args

from msgspec import Struct
from msgspec.structs import replace

from so_tui.launch.placement import misplaced, share_on_nodes
from so_tui.machine.types import Machine
from so_tui.plan.types import Plan, PlannedRates, RankBinding, StepTime
from so_tui.runs.placement import RankPlacement
from so_tui.runs.records import StepRecord
from so_tui.runs.sample import GpuSample, Sample
from so_tui.runs.slowdown import Cause

CauseCode = Literal["binding", "memory-node", "foreign-load", "clocks", "copies", "adam", "data"]
"""From cause to effect: a load on the cores also slows Adam down, so where both explain about as much, the first is named first."""

_ORDER: tuple[str, ...] = get_args(CauseCode)
_LEAST_SHARE = 0.1
"""Share of the excess that a cause must explain to be named."""
LEAST_OWN_SHARE = 0.9
"""Share of a rank's memory that should be on its own node. Libraries and what was allocated before binding may be elsewhere."""
_LEAST_FOREIGN_SHARE = 0.1
"""What the operating system and monitoring may take of the cores without being named."""
_LOW_ADAM_RATE = 0.8
"""Share of the planned rate below which Adam's counts as low."""
_LOW_COPY_RATE = 0.5
"""The same of copies. Beside other traffic they are slower than alone: undisturbed steps on one to four H100 and H200 had 0.51 to 1."""
_LOW_CLOCK = 0.7
"""Share of the highest clock below which a GPU counts as throttled, whatever the driver says: power limits alone leave more."""
_BUSY_PERCENT = 50
_USUAL = {"power"}
"""Reasons for throttling under which GPUs compute as fast as they were measured."""
_MOST_NAMES = 2


class Clock(Struct, frozen=True, kw_only=True):
    """The clock of the slowest GPU while it computed."""

    mhz: float
    max_mhz: float
    throttled_share: float
    """Share of the time in which it was held down by something else than the power limit."""


class Measured(Struct, frozen=True, kw_only=True):
    """Medians over some steps, and what was seen of the host meanwhile. None where nothing was measured."""

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
    clock: Clock | None = None
    placement: tuple[RankPlacement, ...] = ()

    @property
    def compute_s(self) -> float:
        """Seconds of a step without those in which it waits for data."""
        return self.step_s - self.data_s


class Planned(Struct, frozen=True, kw_only=True):
    """The same as planned."""

    step: StepTime
    rates: PlannedRates | None = None
    binding: tuple[RankBinding, ...] = ()

    @property
    def compute_s(self) -> float:
        return self.step.total_s - self.step.data_s


def planned_of(plan: Plan) -> Planned | None:
    """Return what a run is compared with; None where its plan does not know how long a step takes."""
    return (
        None
        if plan.step is None
        else Planned(step=plan.step, rates=plan.rates, binding=plan.binding)
    )


def ranked_causes(measured: Measured, planned: Planned) -> tuple[Cause, ...]:
    """Return what makes steps longer than planned, most likely first.

    Waiting for data explains the time by which that grew, every other cause part of the rest. Of those that explain at least half as much
    as the one that explains most, causes come before their effects.
    """
    excess_s = measured.step_s - planned.step.total_s
    found = [
        cause
        for cause in _causes(measured, planned)
        if cause.seconds >= _LEAST_SHARE * excess_s and cause.seconds > 0
    ]
    most_s = max((cause.seconds for cause in found), default=0.0)
    return tuple(
        sorted(found, key=lambda cause: (cause.seconds < most_s / 2, _ORDER.index(cause.code)))
    )


def _causes(measured: Measured, planned: Planned) -> Iterator[Cause]:
    compute_excess_s = max(0.0, measured.compute_s - planned.compute_s)

    def cause(
        code: CauseCode, seconds: float, was: float, should: float, *, rank: int = 0
    ) -> Cause:
        return Cause(
            code=code,
            seconds=min(seconds, compute_excess_s),
            measured=was,
            planned=should,
            rank=rank,
        )

    bound = {binding.rank: binding for binding in planned.binding}
    placed = [(place, bound[place.rank]) for place in measured.placement if place.rank in bound]
    if elsewhere := [
        place.rank for place, binding in placed if misplaced(place, binding.cpus, binding.main_cpus)
    ]:
        yield cause("binding", compute_excess_s, float(len(elsewhere)), 0.0, rank=elsewhere[0])
    shares = [
        (share, place.rank)
        for place, binding in placed
        if (share := share_on_nodes(place, binding.memory_policy.nodes)) is not None
    ]
    if shares and (worst := min(shares))[0] < LEAST_OWN_SHARE:
        yield cause("memory-node", compute_excess_s, worst[0], 1.0, rank=worst[1])
    if (taken := measured.foreign_share) >= _LEAST_FOREIGN_SHARE:
        nice = max((place.nice for place in measured.placement), default=0)
        yield replace(
            cause("foreign-load", measured.compute_s * taken, taken, 0.0),
            nice=nice,
            processes=measured.foreign,
        )
    if (clock := measured.clock) is not None and (
        clock.throttled_share >= 0.5 or clock.mhz < _LOW_CLOCK * clock.max_mhz
    ):
        on_gpu_s = measured.forward_s + measured.backward_s
        yield cause("clocks", on_gpu_s * (1 - clock.mhz / clock.max_mhz), clock.mhz, clock.max_mhz)
    if (rates := planned.rates) is not None:
        yield from _slow_copies(measured, rates, compute_excess_s)
        rate, busy_s = measured.adam_bytes_per_s, measured.adam_busy_s
        if (
            rate is not None
            and busy_s is not None
            and rate < _LOW_ADAM_RATE * rates.adam_bytes_per_s
        ):
            yield cause(
                "adam", busy_s * (1 - rate / rates.adam_bytes_per_s), rate, rates.adam_bytes_per_s
            )
    yield Cause(
        code="data",
        seconds=measured.data_s - planned.step.data_s,
        measured=measured.data_s,
        planned=planned.step.data_s,
    )


def _slow_copies(measured: Measured, rates: PlannedRates, most_s: float) -> Iterator[Cause]:
    """Yield the direction in which copies lose more time."""
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
        yield Cause(code="copies", seconds=min(seconds, most_s), measured=was, planned=should)


def measured_of(
    steps: Sequence[StepRecord],
    samples: Sequence[Sample],
    machine: Machine,
    binding: Sequence[RankBinding],
) -> Measured:
    """Return what was measured over some steps (at least one), with the samples of the host that were taken meanwhile."""

    def median_of(name: str) -> float | None:
        values = [value for step in steps if (value := getattr(step, name)) is not None]
        return statistics.median(values) if values else None

    return Measured(
        step_s=median_of("step_s") or 0.0,
        data_s=median_of("data_s") or 0.0,
        forward_s=median_of("forward_s") or 0.0,
        backward_s=median_of("backward_s") or 0.0,
        adam_busy_s=median_of("adam_busy_s"),
        adam_bytes_per_s=median_of("adam_bytes_per_s"),
        d2h_bytes_per_s=median_of("d2h_bytes_per_s"),
        h2d_bytes_per_s=median_of("h2d_bytes_per_s"),
        foreign_share=foreign_share(
            samples, machine, own := {cpu for rank in binding for cpu in rank.cpus}
        ),
        foreign=_foreign_names(samples, own),
        clock=_slowest_clock(samples, {rank.gpu for rank in binding}),
        placement=next((sample.placement for sample in reversed(samples) if sample.placement), ()),
    )


def foreign_share(samples: Iterable[Sample], machine: Machine, cpus: set[int]) -> float:
    """Return the share of the time of these CPUs that other processes than the run's took; 0 without samples."""
    places = {
        node.id: [index for index, cpu in enumerate(node.cpus) if cpu in cpus]
        for node in machine.numa_nodes
    }
    foreign_s = available_s = 0.0
    for sample in samples:
        percents = [
            node.cores[place]
            for node in sample.nodes
            for place in places.get(node.id, ())
            if place < len(node.cores)
        ]
        foreign_s += (
            sum(percents) / 100 * sample.interval_s - sample.run_cpu_s - sample.supervisor_cpu_s
        )
        available_s += len(percents) * sample.interval_s
    return min(1.0, max(0.0, foreign_s / available_s)) if available_s > 0 else 0.0


def _foreign_names(samples: Iterable[Sample], cpus: set[int]) -> tuple[str, ...]:
    """Return the names of the foreign processes that took most of these CPUs."""
    cores: dict[str, float] = {}
    for sample in samples:
        for process in sample.foreign:
            if process.cpu in cpus:
                cores[process.name] = cores.get(process.name, 0.0) + process.cores
    return tuple(sorted(cores, key=lambda name: -cores[name])[:_MOST_NAMES])


def _slowest_clock(samples: Iterable[Sample], gpus: set[int | None]) -> Clock | None:
    """Return the clock of the GPU that was furthest below its highest one; None where clocks are not known."""
    by_gpu: dict[int, list[GpuSample]] = {}
    for sample in samples:
        for gpu in sample.gpus:
            if (
                gpu.index in gpus
                and (gpu.busy_percent or 0) >= _BUSY_PERCENT
                and gpu.clock_mhz
                and gpu.clock_max_mhz
            ):
                by_gpu.setdefault(gpu.index, []).append(gpu)
    clocks = [
        Clock(
            mhz=statistics.median(gpu.clock_mhz or 0 for gpu in seen),
            max_mhz=float(seen[-1].clock_max_mhz or 0),
            throttled_share=sum(not {*gpu.throttling} <= _USUAL for gpu in seen) / len(seen),
        )
        for seen in by_gpu.values()
    ]
    return min(clocks, key=lambda clock: clock.mhz / clock.max_mhz, default=None)
