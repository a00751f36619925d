"""Everything known about a run at one poll, as the screen draws it: frozen, and handed from the
follower's thread to the event loop.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from so_tui.launch.supervisor.samples import HostProcess
from so_tui.machine.types import Machine
from so_tui.plan.plan import Plan
from so_tui.runs import LogLine, RunDirectory, RunReader
from so_tui.runs.metrics import Events
from so_tui.runs.records import (
    FINAL_STATES,
    Cpus,
    ForeignProcess,
    GpuSample,
    NodeSample,
    RankBindingReport,
    RankPlacement,
    RunState,
    Sample,
    StepRecord,
)
from so_tui.runs.samples import roll_up
from so_tui.spec import RunSpec
from so_tui.ui.charts.series import Axis, Line, Series, Span, StepSeries, Unit

# What a run and its hosts did at the cursor: the record of its step, and the samples that were
# taken during it.


_STEPS_BACK = 50
"""How far the last recorded step may lie before the cursor: a run may record only some of its
steps.
"""
_STEPS_ON = 20
"""How many steps after the cursor are read as well, for their rows in the log."""
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

    position: Span
    """Step and time of the cursor."""
    step: StepRecord | None
    samples: Mapping[str, Sample]
    """Means of each host during the step."""
    around: tuple[StepRecord, ...] = ()
    """Steps before and after it."""


def inspect(reader: RunReader, position: Span) -> Inspected:
    """Return what is known of a position. Raises OSError."""
    step, time = position
    around = tuple(reader.metrics.steps(step - _STEPS_BACK, step + _STEPS_ON))
    record = next((record for record in reversed(around) if record.step <= step), None)
    begin = time
    if record is not None and abs(record.time - time) < _SAME_S:
        begin = record.time - record.step_s
    samples = {}
    for host, history in reader.samples.items():
        for reach_s in _REACHES_S:
            found = history.history(begin, time + reach_s, _EVERY_ROW)
            if rows := [row for row in found if row.mean.time - row.mean.interval_s <= time]:
                samples[host] = roll_up(rows).mean
                break
    return Inspected(position, record, samples, around)


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
NODE_BUSY, GPU_BUSY = "node.busy_percent", "gpu.busy_percent"
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
    cpus: Cpus
    sample: NodeSample
    load: tuple[Line, Line]
    """Band and mean of its cores, in the order in which they are drawn."""
    cores: Sequence[bytes]
    """Load of each core in percent over time, as long as ``load``; empty unless wanted."""
    foreign: tuple[ForeignProcess, ...]
    """Processes on its cores that are not the run's, busiest first."""
    memory: tuple[Line, ...]
    """Bytes in use, and those of them that are file cache; empty unless wanted."""


@dataclass(frozen=True, slots=True)
class GpuView:
    """One GPU of one host: its newest sample and its load over time."""

    host: str
    sample: GpuSample
    load: Line
    """To be drawn over that of its node."""


@dataclass(frozen=True, slots=True)
class _Sampled(Line):
    """One number of the samples over time, of one GPU, node or host."""

    host: str = ""
    index: int = 0


SampledLines = Mapping[str, tuple[_Sampled, ...]]
"""Numbers of the samples by name."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hardware of a run, or of this host, at one moment."""

    nodes: tuple[NodeView, ...]
    gpus: tuple[GpuView, ...]
    sampled: SampledLines
    """What charts want."""
    ranks: tuple[RankBindingReport, ...] = ()
    """Where the ranks were bound; empty until that is known."""
    placement: tuple[RankPlacement, ...] = ()
    """Where they were last seen."""
    inspected: Inspected | None = None
    """What is known of the cursor's position; nodes and GPUs show its samples then."""
    gpu_nodes: Mapping[int, int | None] = field(default_factory=dict)
    """NUMA node of each GPU by its index, as far as that is known."""
    averaged: bool = False
    """Nodes and GPUs show means over the training, because the run has ended and its host now does
    other work.
    """

    @property
    def count(self) -> int:
        return len({node.host for node in self.nodes})


@dataclass(slots=True)
class _Load:
    """What is known of one node, GPU or host over time: rows of several series."""

    times: array[float] = field(default_factory=lambda: array("d"))
    cores: list[bytes] = field(default_factory=list)
    """Load of each core of a node in percent, if wanted."""
    series: defaultdict[str, Series] = field(default_factory=lambda: defaultdict(Series))

    def line(self, name: str, role: str) -> Line:
        """Return a series as a line of a chart."""
        return Line(self.series[name], len(self.times), self.times, None, role)


class LoadStore:
    """Samples of hosts as series: the load of every node and GPU, and whatever else is wanted."""

    def __init__(self) -> None:
        self.want(())

    def clear(self) -> None:
        """Forget all samples."""
        self._loads: defaultdict[tuple[str, str, int], _Load] = defaultdict(_Load)

    def want(self, names: Iterable[str]) -> None:
        """Keep these numbers (of ``sampled_value``) from now on, and forget the samples so far,
        which lack some of them.
        """
        self.wanted = tuple(names)
        self._kept: defaultdict[str, list[str]] = defaultdict(list)
        """Numbers of each kind of part."""
        for name in {NODE_BUSY, GPU_BUSY, *names} - {CORES}:
            self._kept[name.partition(".")[0]].append(name)
        self.clear()

    def append(self, host: str, sample: Sample) -> None:
        """Add a newer sample of a host."""
        for kind, index, part in _parts(sample):
            load = self._loads[kind, host, index]
            load.times.append(sample.time)
            if isinstance(part, NodeSample):
                load.series[BAND].extend((min(part.cores), max(part.cores)), 2)
                if CORES in self.wanted:
                    cores = bytes(min(100, max(0, core)) for core in part.cores)
                    count = len(load.cores[0]) if load.cores else len(cores)
                    load.cores.append(cores[:count].ljust(count, b"\0"))  # as many as at first
            for name in self._kept[kind]:
                value = sampled_value(name, part)
                load.series[name].append(math.nan if value is None else float(value))

    def rows(self) -> int:
        """Return the number of samples of the host that has most."""
        return max((len(load.times) for load in self._loads.values()), default=0)

    def view(self, samples: Mapping[str, Sample], cpus: Mapping[int, Cpus]) -> Hosts:
        """Return what is shown of a sample of each host, but parts of which none has been added;
        ``cpus`` are the numbers of the nodes' cores.
        """
        nodes = tuple(
            _node_view(host, sample, node, load, cpus.get(node.id, ()))
            for host, sample in samples.items()
            for node in sample.nodes
            if node.cores and (load := self._loads.get(("node", host, node.id)))
        )
        gpus = tuple(
            GpuView(host, gpu, load.line(GPU_BUSY, "gpu"))
            for host, sample in samples.items()
            for gpu in sample.gpus
            if (load := self._loads.get(("gpu", host, gpu.index)))
        )
        return Hosts(nodes, gpus, self.sampled())

    def sampled(self) -> SampledLines:
        """Return what was wanted, by name."""
        found = {
            name: tuple(
                _Sampled(series, len(load.times), load.times, None, "main", "", host, index)
                for (_, host, index), load in self._loads.items()
                if (series := load.series.get(name)) is not None
            )
            for name in self.wanted
        }
        return {name: lines for name, lines in found.items() if lines}


def _node_view(host: str, sample: Sample, node: NodeSample, load: _Load, known: Cpus) -> NodeView:
    """Return a node with cores, whose numbers are those ``known`` if they are as many."""
    cpus = known if len(known) == len(node.cores) else tuple(range(len(node.cores)))
    kept = MEMORY.keys() <= load.series.keys()
    return NodeView(
        host,
        cpus,
        node,
        (load.line(BAND, "band"), load.line(NODE_BUSY, "main")),
        load.cores if load.cores and len(load.cores[0]) == len(cpus) else (),
        tuple([process for process in sample.foreign if process.cpu in cpus]),
        tuple([load.line(name, role) for name, role in MEMORY.items()]) if kept else (),
    )


def _parts(sample: Sample) -> Iterator[tuple[str, int, NodeSample | GpuSample | Sample]]:
    """Yield the parts of a sample with their kind and number."""
    yield from (("node", node.id, node) for node in sample.nodes if node.cores)
    yield from (("gpu", gpu.index, gpu) for gpu in sample.gpus)
    yield "host", 0, sample


def sampled_value(name: str, part: NodeSample | GpuSample | Sample) -> float | None:
    """Return a number of a part of a sample by its kind and field, such as ``gpu.power_w``.

    Besides fields there are ``node.busy_percent``, the mean of its cores, ``gpu.throttled``, the
    clock while it is held down, and ``host.foreign_cores``, the cores that are busy with what does
    not belong to the run.
    """
    match name, part:
        case "node.busy_percent", NodeSample(cores=cores):
            return sum(cores) / len(cores)
        case "gpu.throttled", GpuSample():
            return part.clock_mhz if part.throttling else None
        case "host.foreign_cores", Sample():
            busy = sum(sum(node.cores) for node in part.nodes) / 100
            cpu_s, interval_s = part.run_cpu_s, part.interval_s
            return max(0.0, busy - cpu_s / interval_s) if interval_s > 0 else None
    value: float | None = getattr(part, name.partition(".")[2])
    return value


class Loads:
    """The samples of every host of one run."""

    def __init__(self, reader: RunReader) -> None:
        self.store = LoadStore()
        self._reader = reader
        self._begun = math.nan
        self._incomplete = False
        """Whether a history could not be read, and is to be read again."""
        self._latest: dict[str, Sample] = {}
        self._means: dict[str, Sample] = {}
        self._placement: dict[str, tuple[RankPlacement, ...]] = {}

    def add(self, host: str, samples: tuple[Sample, ...], begun: float) -> None:
        """Add newer samples of a host. The first also load its history since the run began:
        ``begun``, the time of its first step.

        Raises OSError before any of them is added.
        """
        self._begun = begun
        if self.store.rows() > MOST_ROWS:
            self._restart()
        if host not in self._latest and samples:
            self._add_history(host, samples[0].time)
        for sample in samples:
            self.store.append(host, sample)
            self._latest[host] = sample
            if sample.placement:
                self._placement[host] = sample.placement

    def want(self, names: tuple[str, ...]) -> None:
        """Keep these numbers of the samples too, from the begin of the run on."""
        if not set(names) <= set(self.store.wanted):
            self.store.want(names)
            self._incomplete = True
        if self._incomplete:
            self._restart()

    def _restart(self) -> None:
        """Load the history again, now that earlier steps are known, other numbers are wanted, or
        there are more rows than anybody sees.
        """
        self._incomplete = True
        self.store.clear()
        self._means = {}
        for host, sample in self._latest.items():
            self._add_history(host, sample.time)
            self.store.append(host, sample)
        self._incomplete = False

    def _add_history(self, host: str, until: float) -> None:
        """Add the samples of a host from the begin of the run to just before ``until``."""
        start = self._reader.metrics.events.start
        # A resumed run shows its earlier attempts too. The time is NaN before the first step, and 0
        # if it is unknown.
        since = self._begun if self._begun > 0 else until
        since = since if start is None else min(since, start.time)
        if until - since > 2:
            history = self._reader.samples[host].history(
                since, math.nextafter(until, 0), HISTORY_ROWS
            )
            for rollup in list(history):  # all of them or none: it is read again from its begin
                self.store.append(host, rollup.mean)

    def average(self, steps_at: array[float]) -> None:
        """Once a run has ended, average each host from the first step of its last attempt to the
        last step.
        """
        state, metrics = self._reader.state, self._reader.metrics
        start, latest = metrics.events.start, metrics.latest
        if state is None or state.state not in FINAL_STATES or start is None or latest is None:
            self._means = {}
            return
        first = bisect_left(steps_at, start.time)
        if first == len(steps_at) or steps_at[first] >= latest.time:
            return
        for host in self._latest.keys() - self._means.keys():
            parts = self._reader.samples[host].history(steps_at[first], latest.time, HISTORY_ROWS)
            some = []
            while chunk := list(islice(parts, ROLLED_UP)):
                some.append(roll_up(chunk))
            if some:
                self._means[host] = roll_up(some).mean

    def view(self, machine: Machine | None, inspected: Inspected | None) -> Hosts:
        """Return the hosts at the cursor, or averaged, or as they are; ``machine`` numbers their
        cores.
        """
        cpus = {node.id: node.cpus for node in machine.numa_nodes} if machine else {}
        during = inspected.samples if inspected is not None else {}
        binding = self._reader.metrics.events.binding
        gpus = machine.gpus if machine else ()
        return replace(
            self.store.view({**self._latest, **self._means, **during}, cpus),
            ranks=binding.ranks if binding is not None else (),
            placement=tuple(place for host in self._placement.values() for place in host),
            inspected=inspected,
            gpu_nodes={gpu.index: gpu.numa_node for gpu in gpus},
            averaged=bool(self._means) and not during,
        )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything known about a run at one poll."""

    run: RunDirectory
    spec: RunSpec | None
    plan: Plan | None
    state: RunState | None
    events: Events
    latest: StepRecord | None
    recent: tuple[StepRecord, ...]
    evaluations: Line | None
    """Loss on held-out data; None before the first evaluation."""
    whole: StepSeries
    length: int
    """Number of rows of ``whole``."""
    unread_share: float
    """Share of the run's records that are still to be read; 0 once the charts are complete."""
    closer: StepSeries | None
    """The window that was zoomed to, where the whole run shows several steps per row."""
    hosts: Hosts
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
        state, latest = self.state, self.latest
        if state is None or (latest is not None and latest.attempt >= state.attempt):
            return False
        return self.live and state.state in ("starting", "loading", "training")

    @property
    def on_gpus(self) -> bool:
        """Whether the ranks train on GPUs; assumed until the binding is known."""
        ranks = self.hosts.ranks or (self.plan.binding if self.plan is not None else ())
        return not ranks or any(rank.gpu is not None for rank in ranks)

    def line(self, metric: str, role: str, axis: Axis | None = None) -> Line:
        """Return a metric, in full detail where that was read for the window that ``axis``
        shows.
        """
        closer = self.closer
        if closer is not None and axis is not None and closer.covers(*axis.in_steps()):
            return closer.line(metric, role, len(closer))
        return self.whole.line(metric, role, self.length)

    def standing(self, x: float, unit: Unit) -> float:
        """Return ``x``, or the nearest last position of a row that stands for several steps, so
        that position and values agree.
        """
        positions = self.whole.steps if unit == "step" else self.whole.times
        axis = Axis(unit, x, x, 0.0, self.whole.steps, self.whole.times, self.length)
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
        inspected = self.hosts.inspected
        return (inspected.step,) if inspected is not None and inspected.step else self.recent


@dataclass(frozen=True, slots=True)
class HostView:
    """What is known of this host at one moment, without a run."""

    hosts: Hosts
    processes: tuple[HostProcess, ...]
    axis: Axis
