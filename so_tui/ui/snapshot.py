"""Everything known about a run at one poll, as the screen draws it: frozen, and handed from the
follower's thread to the event loop.
"""

from __future__ import annotations

import math
import statistics
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from so_tui.launch.supervisor.samples import HostProcess
from so_tui.machine.types import Machine
from so_tui.plan.plan import Plan
from so_tui.runs import LogLine, RunDirectory, RunReader
from so_tui.runs.records import (
    FINAL_STATES,
    BindingRecord,
    CheckpointRecord,
    EndRecord,
    ForeignProcess,
    GpuSample,
    NodeSample,
    PhaseRecord,
    RankPlacement,
    ResumedRecord,
    RunState,
    Sample,
    StartRecord,
    StepRecord,
    WarningRecord,
)
from so_tui.runs.samples import roll_up
from so_tui.spec import RunSpec
from so_tui.ui.charts.series import Axis, Line, Series, StepSeries, mean_of

# What a run and its hosts did at the cursor: the record of its step, and the samples that were
# taken during it.


Position = tuple[float, float]
"""Step and time of the cursor."""
_STEPS_BACK = 50
"""How far the last recorded step may lie before the cursor: a run may record only some of its
steps.
"""
_REACHES_S = (1.5, 15.0, 90.0, 900.0)
"""How long after a step the sample may end that covers it; older samples are kept as means of 10 s,
1 min and 10 min.
"""
_SAME_S = 0.01
"""Within this of its end, the cursor stands on a step; elsewhere, on a moment."""
_EVERY_ROW = 1_000_000


@dataclass(frozen=True, slots=True)
class Inspected:
    """What is known of one position."""

    position: Position
    step: StepRecord | None
    samples: Mapping[str, Sample]
    """Means of each host during the step."""


class Inspector:
    """Reads one position of a run, once. For one thread."""

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader
        self._found: Inspected | None = None

    def read(self, position: Position | None) -> Inspected | None:
        """Return what is known of a position; None for no position. Raises OSError."""
        if position is None:
            self._found = None
        elif self._found is None or self._found.position != position or not self._found.samples:
            self._found = self._read(position)
        return self._found

    def _read(self, position: Position) -> Inspected:
        step, time = position
        last = deque(self._reader.metrics.steps(step - _STEPS_BACK, step), maxlen=1)
        record = last[0] if last else None
        begin = end = time
        if record is not None and abs(record.time - time) < _SAME_S:
            begin = record.time - record.step_s
        samples = {
            host: sample
            for host in self._reader.hosts
            if (sample := self._during(host, begin, end)) is not None
        }
        return Inspected(position, record, samples)

    def _during(self, host: str, begin: float, end: float) -> Sample | None:
        """Return the mean of the samples that overlap a time; None where there is none."""
        for reach_s in _REACHES_S:
            found = self._reader.sample_history(host, begin, end + reach_s, _EVERY_ROW)
            rows = [row for row in found if row.mean.time - row.mean.interval_s <= end]
            if rows:
                return roll_up(rows).mean
        return None


# The load of a run's hosts over time, by NUMA node and GPU, from the supervisors' samples.
#
# The follower's thread appends; a view refers to its series together with their length.


HISTORY_ROWS = 600
"""Rows that history is asked for; it has up to ten times as many, since one resolution is ten times
as fine as the next.
"""
MOST_ROWS = 8000
"""Rows of a host after which its history is loaded anew in fewer: a screen may be open for
weeks.
"""
ROLLED_UP = 1000
"""Rows that are averaged at once: all of them would take a lot of memory."""
BUSY = "busy_percent"
CORES = "node.cores"
"""Wanted for the load of each core over time."""
MEMORY = {"node.memory_used_bytes": "memory", "node.file_cache_bytes": "other"}
"""Wanted for memory over time: in use, and the file cache in it, with their roles."""
BAND = "band"
"""Least and greatest load of a node's cores."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """One NUMA node of one host: its newest sample, and its load over time."""

    host: str
    id: int
    cpus: tuple[int, ...]
    sample: NodeSample
    load: tuple[Line, Line]
    """Band and mean of its cores, in the order in which they are drawn."""
    cores: Sequence[bytes] = ()
    """Load of each core in percent over time, as long as ``load``; empty unless wanted."""
    foreign: tuple[ForeignProcess, ...] = ()
    """Processes on its cores that are not the run's, busiest first."""
    memory: tuple[Line, ...] = ()
    """Bytes in use, and those of them that are file cache; empty unless wanted."""


@dataclass(frozen=True, slots=True)
class GpuView:
    """One GPU of one host: its newest sample and its load over time."""

    host: str
    sample: GpuSample
    load: Line
    """To be drawn over that of its node."""


@dataclass(frozen=True, slots=True)
class Sampled(Line):
    """One number of the samples over time, of one GPU, node or host."""

    host: str = ""
    index: int = 0


class _Load:
    """What is known of one node, GPU or host over time: rows of several series."""

    __slots__ = ("cores", "series", "times")

    def __init__(self) -> None:
        self.times = array("d")
        self.cores: list[bytes] = []
        """Load of each core of a node in percent, if wanted."""
        self.series: dict[str, Series] = {}

    def __len__(self) -> int:
        return len(self.times)

    def add(self, name: str, value: float | None) -> None:
        """Add a value to the row that ``times`` begins."""
        self.of(name).append(math.nan if value is None else float(value))

    def add_cores(self, cores: tuple[int, ...]) -> None:
        """Add the loads of a node's cores, always as many as at first."""
        loads = bytes(min(100, max(0, load)) for load in cores)
        count = len(self.cores[0]) if self.cores else len(loads)
        self.cores.append(loads[:count].ljust(count, b"\0"))

    def of(self, name: str) -> Series:
        """Return a series, created where it is absent."""
        return self.series.setdefault(name, Series())

    def line(self, name: str, role: str) -> Line:
        """Return a series as a line of a chart."""
        return Line(self.of(name), len(self), self.times, None, role)


class LoadStore:
    """Samples of hosts as series: the load of every node and GPU, and whatever else is wanted."""

    def __init__(self) -> None:
        self.wanted: tuple[str, ...] = ()
        """Names of ``sampled_value`` that are kept."""
        self._loads: dict[tuple[str, str, int], _Load] = {}

    def clear(self) -> None:
        """Forget all samples."""
        self._loads = {}

    def forget(self, host: str) -> None:
        """Forget the samples of a host."""
        self._loads = {key: load for key, load in self._loads.items() if key[1] != host}

    def want(self, names: Iterable[str]) -> None:
        """Keep these numbers from now on, and forget the samples so far, which lack some of
        them.
        """
        self.wanted = tuple(dict.fromkeys(names))
        self.clear()

    def append(self, host: str, sample: Sample) -> None:
        """Add a newer sample of a host."""
        for kind, index, part in _parts(sample):
            load = self._loads.setdefault((kind, host, index), _Load())
            load.times.append(sample.time)
            if isinstance(part, NodeSample):
                load.add(BUSY, sum(part.cores) / len(part.cores))
                load.of(BAND).append_range(float(min(part.cores)), float(max(part.cores)))
                if CORES in self.wanted:
                    load.add_cores(part.cores)
            elif isinstance(part, GpuSample):
                load.add(BUSY, part.busy_percent)
            for name in self.wanted:
                if name not in (f"{kind}.{BUSY}", CORES) and name.startswith(f"{kind}."):
                    load.add(name.partition(".")[2], sampled_value(name, part))

    def rows(self) -> int:
        """Return the number of samples of the host that has most."""
        return max(map(len, self._loads.values()), default=0)

    def nodes(
        self, samples: Mapping[str, Sample], cpus: Mapping[int, tuple[int, ...]]
    ) -> tuple[NodeView, ...]:
        """Return the nodes with cores, which ``cpus`` numbers, of a sample of each host."""
        return tuple(
            _node_view(host, sample, node, load, cpus.get(node.id, ()))
            for host, sample in samples.items()
            for node in sample.nodes
            if node.cores and (load := self._loads.get(("node", host, node.id))) is not None
        )

    def gpus(self, samples: Mapping[str, Sample]) -> tuple[GpuView, ...]:
        """Return the GPUs of a sample of each host, but those of which none has been added."""
        return tuple(
            GpuView(host, gpu, load.line(BUSY, "gpu"))
            for host, sample in samples.items()
            for gpu in sample.gpus
            if (load := self._loads.get(("gpu", host, gpu.index))) is not None
        )

    def sampled(self) -> dict[str, tuple[Sampled, ...]]:
        """Return what was wanted, by name."""
        found: dict[str, list[Sampled]] = {}
        for (kind, host, index), load in self._loads.items():
            for name, series in load.series.items():
                if (whole := f"{kind}.{name}") in self.wanted and len(series) == len(load):
                    number = Sampled(series, len(load), load.times, None, "main", "", host, index)
                    found.setdefault(whole, []).append(number)
        return {name: tuple(lines) for name, lines in found.items()}


def _node_view(
    host: str, sample: Sample, node: NodeSample, load: _Load, known: tuple[int, ...]
) -> NodeView:
    """Return a node with cores, whose numbers are those ``known`` if they are as many."""
    cpus = known if len(known) == len(node.cores) else tuple(range(len(node.cores)))
    complete = len(load.cores) == len(load) and all(len(row) == len(cpus) for row in load.cores[:1])
    memory = {name.partition(".")[2]: role for name, role in MEMORY.items()}
    kept = memory.keys() <= load.series.keys()
    return NodeView(
        host,
        node.id,
        cpus,
        node,
        (load.line(BAND, "band"), load.line(BUSY, "main")),
        cores=load.cores if complete else (),
        foreign=tuple(process for process in sample.foreign if process.cpu in cpus),
        memory=tuple(load.line(name, role) for name, role in memory.items()) if kept else (),
    )


def _parts(sample: Sample) -> Iterator[tuple[str, int, NodeSample | GpuSample | Sample]]:
    """Yield the parts of a sample with their kind and number."""
    yield from (("node", node.id, node) for node in sample.nodes if node.cores)
    yield from (("gpu", gpu.index, gpu) for gpu in sample.gpus)
    yield "host", 0, sample


def sampled_value(name: str, part: NodeSample | GpuSample | Sample) -> float | None:
    """Return a number of a part of a sample by its kind and field, such as ``gpu.power_w``.

    Besides fields there are ``gpu.throttled``, the clock while it is held down, and
    ``host.foreign_cores``, the cores that are busy with what does not belong to the run.
    """
    field_name = name.partition(".")[2]
    if isinstance(part, GpuSample) and field_name == "throttled":
        return part.clock_mhz if part.throttling else None
    if isinstance(part, Sample):
        busy = sum(sum(node.cores) for node in part.nodes) / 100
        return max(0.0, busy - part.run_cpu_s / part.interval_s) if part.interval_s > 0 else None
    value: float | None = getattr(part, field_name)
    return value


class Loads:
    """The samples of every host of one run."""

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader
        self._store = LoadStore()
        self._begun = math.nan
        self._incomplete = False
        """Whether a history could not be read, and is to be read again."""
        self._latest: dict[str, Sample] = {}
        self._means: dict[str, Sample] = {}
        self.inspected: Mapping[str, Sample] = {}
        """What is shown of hosts instead of their newest samples or their means."""
        self._placement: dict[str, tuple[RankPlacement, ...]] = {}

    @property
    def averaged(self) -> bool:
        """Whether views show means over the training."""
        return bool(self._means) and not self.inspected

    def add(self, host: str, samples: tuple[Sample, ...], begun: float) -> None:
        """Add newer samples of a host. The first also load its history since the run began:
        ``begun``, the time of its first step.

        Raises OSError before any of them is added.
        """
        self._begun = begun
        if self._store.rows() > MOST_ROWS:
            self.restart(begun)
        if host not in self._latest and samples:
            self._add_history(host, samples[0].time, begun)
        for sample in samples:
            self._store.append(host, sample)
            self._latest[host] = sample
            if sample.placement:
                self._placement[host] = sample.placement

    def want(self, names: tuple[str, ...]) -> None:
        """Keep these numbers of the samples too, from the begin of the run on."""
        if not set(names) <= set(self._store.wanted):
            self._store.want(names)
            self._incomplete = True
        if self._incomplete:
            self.restart(self._begun)

    def restart(self, begun: float) -> None:
        """Load the history again, now that earlier steps are known, other numbers are wanted, or
        there are more rows than anybody sees.
        """
        self._incomplete = True
        self._store.clear()
        self._means = {}
        for host, sample in self._latest.items():
            self._add_history(host, sample.time, begun)
            self._store.append(host, sample)
        self._incomplete = False

    def sampled(self) -> dict[str, tuple[Sampled, ...]]:
        """Return the numbers that were wanted, by name."""
        return self._store.sampled()

    def _add_history(self, host: str, until: float, begun: float) -> None:
        """Add the samples of a host from the begin of the run to just before ``until``."""
        start = self._reader.metrics.start
        # A resumed run shows its earlier attempts too. The time is NaN before the first step, and 0
        # if it is unknown.
        since = begun if begun > 0 else until
        since = since if start is None else min(since, start.time)
        if until - since > 2:
            try:
                before = math.nextafter(until, 0)
                for rollup in self._reader.sample_history(host, since, before, HISTORY_ROWS):
                    self._store.append(host, rollup.mean)
            except OSError:
                self._store.forget(host)  # it is read again from its begin
                raise

    def average(self, steps_at: array[float]) -> None:
        """Once a run has ended, average each host from the first step of its last attempt to the
        last step.
        """
        state, metrics = self._reader.state, self._reader.metrics
        start, latest = metrics.start, metrics.latest
        if state is None or state.state not in FINAL_STATES or start is None or latest is None:
            self._means = {}
            return
        first = bisect_left(steps_at, start.time)
        if first == len(steps_at) or steps_at[first] >= latest.time:
            return
        for host in self._latest.keys() - self._means.keys():
            parts = self._reader.sample_history(host, steps_at[first], latest.time, HISTORY_ROWS)
            some = []
            while chunk := list(islice(parts, ROLLED_UP)):
                some.append(roll_up(chunk))
            if some:
                self._means[host] = roll_up(some).mean

    def nodes(self, machine: Machine | None) -> tuple[NodeView, ...]:
        """Return the NUMA nodes with cores of every host; ``machine`` numbers their cores."""
        cpus = {node.id: node.cpus for node in machine.numa_nodes} if machine else {}
        return self._store.nodes(self._shown, cpus)

    @property
    def _shown(self) -> dict[str, Sample]:
        """What is shown of each host."""
        return {**self._latest, **self._means, **self.inspected}

    def placement(self) -> tuple[RankPlacement, ...]:
        """Return where the ranks of every host were last seen."""
        return tuple(place for host in self._placement.values() for place in host)

    def gpus(self) -> tuple[GpuView, ...]:
        """Return the GPUs of every host."""
        return self._store.gpus(self._shown)


PARTS = ("data_s", "forward_s", "backward_s", "exposed_optimizer_s", "other_s")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything known about a run at one poll."""

    run: RunDirectory
    spec: RunSpec | None
    plan: Plan | None
    machine: Machine | None
    state: RunState | None
    start: StartRecord | None
    phase: PhaseRecord | None
    phases: tuple[PhaseRecord, ...]
    """What it did before the first step of its newest attempt; empty once there is one."""
    binding: BindingRecord | None
    end: EndRecord | None
    latest: StepRecord | None
    recent: tuple[StepRecord, ...]
    checkpoints: tuple[CheckpointRecord, ...]
    evaluations: Line | None
    """Loss on held-out data; None before the first evaluation."""
    resumes: tuple[ResumedRecord, ...]
    warnings: tuple[WarningRecord, ...]
    whole: StepSeries
    length: int
    """Number of rows of ``whole``."""
    unread_share: float
    """Share of the run's records that are still to be read; 0 once the charts are complete."""
    closer: StepSeries | None
    """The window that was zoomed to, where the whole run shows several steps per row."""
    nodes: tuple[NodeView, ...]
    gpus: tuple[GpuView, ...]
    placement: tuple[RankPlacement, ...]
    """Where the ranks were last seen."""
    sampled: Mapping[str, tuple[Sampled, ...]]
    """Numbers of the samples that charts want, by name."""
    inspected: Inspected | None
    """What is known of the cursor's position; nodes and GPUs show its samples then."""
    averaged: bool
    """Nodes and GPUs show means over the training, because the run has ended and its host now does
    other work.
    """
    log_lines: tuple[LogLine, ...]
    log_partial: str
    heartbeat_age_s: float
    """Seconds since the supervisor's heartbeat last moved, by this process's clock."""
    read_error: str = ""
    """Why this poll could not read; everything else is as of the poll before."""
    deleted: bool = False
    """The run's folder does not exist any more; everything else is as of the poll before."""
    stop_asked: bool = False
    checking: bool = False
    """Whether the run still lives is not known yet: its processes cannot be seen from here, and its
    heartbeat is old.
    """

    @property
    def live(self) -> bool:
        return self.state is not None and self.state.state not in FINAL_STATES and not self.deleted

    @property
    def training(self) -> bool:
        """Whether steps are being made, so that the newest figures are current."""
        state = self.state
        return (
            state is not None and state.state == "training" and not (self.deleted or self.checking)
        )

    @property
    def starting(self) -> bool:
        """Whether the newest attempt is on its way to its first step."""
        return self.live and before_first_step(self.state, self.latest)

    @property
    def on_gpus(self) -> bool:
        """Whether the ranks train on GPUs; assumed until the binding is known."""
        if self.binding is not None:
            gpus = [rank.gpu for rank in self.binding.ranks]
        else:
            gpus = [rank.gpu for rank in self.plan.binding] if self.plan is not None else []
        return not gpus or any(gpu is not None for gpu in gpus)

    @property
    def hosts(self) -> int:
        return len({node.host for node in self.nodes})

    @property
    def steps(self) -> array[float]:
        return self.whole.steps

    @property
    def times(self) -> array[float]:
        return self.whole.times

    @property
    def series(self) -> dict[str, Series]:
        return self.whole.series

    def has(self, metric: str) -> bool:
        """Return whether a metric has been read; which are follows from what the charts show."""
        return metric in self.whole.series

    def line(self, metric: str, role: str, axis: Axis | None = None) -> Line:
        """Return a metric, in full detail where that was read for the window that ``axis``
        shows.
        """
        closer = self.closer
        if closer is not None and axis is not None and closer.covers(*axis.in_steps()):
            return closer.line(metric, role, len(closer))
        return self.whole.line(metric, role, self.length)

    def mean_line(self, metric: str, role: str, axis: Axis | None = None) -> Line:
        """Return the mean of a metric over the last steps at each step."""
        return self.line(mean_of(metric), role, axis)

    def standing(self, x: float, unit: str) -> float:
        """Return ``x``, or the nearest last position of a row that stands for several steps, so
        that position and values agree.
        """
        positions = self.steps if unit == "step" else self.times
        axis = Axis(unit, x, x, 0.0, self.steps, self.times, self.length)
        if (
            not self.whole.halvings
            or not self.length
            or (self.closer is not None and self.closer.covers(*axis.in_steps()))
        ):
            return x
        right = bisect_left(positions, x, 0, self.length)
        near = positions[max(0, right - 1) : min(self.length, right + 1)]
        return min(near, key=lambda position: abs(position - x))

    @property
    def examined(self) -> tuple[StepRecord, ...]:
        """The step at the cursor, or the newest ones."""
        step = self.inspected.step if self.inspected is not None else None
        return self.recent if step is None else (step,)

    @property
    def step_s(self) -> float:
        """Median time of the newest steps; NaN without any."""
        times = [record.step_s for record in self.recent]
        return statistics.median(times) if times else math.nan


@dataclass(frozen=True, slots=True)
class HostView:
    """What is known of this host at one moment, without a run."""

    nodes: tuple[NodeView, ...]
    gpus: tuple[GpuView, ...]
    sampled: Mapping[str, tuple[Sampled, ...]]
    processes: tuple[HostProcess, ...]
    axis: Axis
    binding: BindingRecord | None = None
    inspected: Inspected | None = None
    averaged: bool = False
    hosts: int = 1


def before_first_step(state: RunState | None, latest: StepRecord | None) -> bool:
    """Return whether a state is one before the first step of its attempt; ``latest`` is the last
    step of all attempts.
    """
    begun = state is not None and latest is not None and latest.attempt >= state.attempt
    return state is not None and not begun and state.state in ("starting", "loading", "training")


def mean_of_parts(records: Sequence[StepRecord]) -> tuple[float, ...]:
    """Return the means of PARTS over some steps, at least one: unlike medians, they sum to the mean
    of the steps' time.
    """
    return tuple(sum(getattr(record, name) for record in records) / len(records) for name in PARTS)
