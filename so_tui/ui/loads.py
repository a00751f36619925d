"""The load of a run's hosts over time, by NUMA node and GPU, from the supervisors' samples.

The follower's thread appends; a view refers to its series together with their length.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from dataclasses import dataclass, field

from so_tui.machine.types import Machine
from so_tui.runs import RunReader
from so_tui.runs.records import FINAL_STATES, GpuSample, NodeSample, Sample
from so_tui.runs.rollup import roll_up
from so_tui.ui.series import Line, Series

HISTORY_ROWS = 1500


@dataclass(frozen=True, slots=True)
class NodeView:
    """One NUMA node of one host: its newest sample, and its load over time."""

    host: str
    id: int
    cpus: tuple[int, ...]
    sample: NodeSample
    mean: Series
    band: Series
    times: array[float]
    length: int

    def lines(self) -> tuple[Line, Line]:
        """Return band and mean, to be drawn in this order."""
        return Line(self.band, self.length, self.times, None, "band"), Line(self.mean, self.length, self.times, None, "main")


@dataclass(frozen=True, slots=True)
class GpuView:
    """One GPU of one host: its newest sample and its load over time."""

    host: str
    sample: GpuSample
    busy: Series
    times: array[float]
    length: int

    def line(self) -> Line:
        """Return its load, to be drawn over that of its node."""
        return Line(self.busy, self.length, self.times, None, "gpu")


@dataclass(slots=True)
class _Load:
    mean: Series = field(default_factory=Series)
    band: Series = field(default_factory=Series)
    times: array[float] = field(default_factory=lambda: array("d"))


class Loads:
    """The samples of every host of one run."""

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader
        self._nodes: dict[tuple[str, int], _Load] = {}
        self._gpus: dict[tuple[str, int], _Load] = {}
        self._latest: dict[str, Sample] = {}
        self._means: dict[str, Sample] = {}

    @property
    def averaged(self) -> bool:
        """Whether views show means over the training."""
        return bool(self._means)

    def add(self, host: str, samples: tuple[Sample, ...], begun: float) -> None:
        """Add newer samples of a host. The first also load its history since the run began: ``begun``, the time of its first step."""
        if host not in self._latest and samples:
            self._add_history(host, samples[0].time, begun)
        for sample in samples:
            self._append(host, sample)
            self._latest[host] = sample

    def restart(self, begun: float) -> None:
        """Load the history again, now that earlier steps are known."""
        self._nodes.clear()
        self._gpus.clear()
        self._means = {}
        for host, sample in self._latest.items():
            self._add_history(host, sample.time, begun)
            self._append(host, sample)

    def _add_history(self, host: str, until: float, begun: float) -> None:
        """Add the samples of a host from the begin of the run to just before ``until``."""
        start = self._reader.start
        # A resumed run shows its earlier attempts too. The time is NaN before the first step, and 0 if it is unknown.
        since = min([*([begun] if begun > 0 else []), *([start.time] if start is not None else [])], default=until)
        if until - since > 2:
            for rollup in self._reader.sample_history(host, since, math.nextafter(until, 0), HISTORY_ROWS):
                self._append(host, rollup.mean)

    def average(self, steps_at: array[float]) -> None:
        """Once a run has ended, average each host from the first step of its last attempt to the last step."""
        state, start, latest = self._reader.state, self._reader.start, self._reader.latest
        if state is None or state.state not in FINAL_STATES or start is None or latest is None:
            self._means = {}
            return
        first = bisect_left(steps_at, start.time)
        for host in self._latest.keys() - self._means.keys():
            since = steps_at[first] if first < len(steps_at) else math.inf
            parts = self._reader.sample_history(host, since, latest.time, HISTORY_ROWS) if since < latest.time else ()
            if parts:
                self._means[host] = roll_up(parts).mean

    def nodes(self, machine: Machine | None) -> tuple[NodeView, ...]:
        """Return the NUMA nodes with cores of every host; ``machine`` numbers their cores."""
        cpus = {node.id: node.cpus for node in machine.numa_nodes} if machine else {}
        views = []
        for host, sample in (self._latest | self._means).items():
            for node in sample.nodes:
                load = self._nodes.get((host, node.id))
                if load is not None and node.cores:
                    known = cpus.get(node.id, ())
                    numbers = known if len(known) == len(node.cores) else tuple(range(len(node.cores)))
                    views.append(NodeView(host, node.id, numbers, node, load.mean, load.band, load.times, len(load.mean)))
        return tuple(views)

    def gpus(self) -> tuple[GpuView, ...]:
        """Return the GPUs of every host."""
        return tuple(
            GpuView(host, gpu, load.mean, load.times, len(load.mean))
            for host, sample in (self._latest | self._means).items()
            for gpu in sample.gpus
            if (load := self._gpus.get((host, gpu.index))) is not None
        )

    def _append(self, host: str, sample: Sample) -> None:
        for node in sample.nodes:
            if not node.cores:
                continue
            load = self._nodes.setdefault((host, node.id), _Load())
            load.times.append(sample.time)
            load.mean.append(sum(node.cores) / len(node.cores))
            load.band.append_range(float(min(node.cores)), float(max(node.cores)))
        for gpu in sample.gpus:
            load = self._gpus.setdefault((host, gpu.index), _Load())
            load.times.append(sample.time)
            load.mean.append(math.nan if gpu.busy_percent is None else float(gpu.busy_percent))
