"""What this host does now, without a run: sampled in a worker thread, handed over as frozen views."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from so_tui.launch.host_processes import HostProcess, HostProcesses
from so_tui.launch.processes import ProcessTree
from so_tui.launch.sampler import Sampler
from so_tui.machine.types import Machine
from so_tui.runs.records import BindingRecord
from so_tui.runs.sample import Sample
from so_tui.ui.chart_metrics import HARDWARE, samples_of
from so_tui.ui.inspected import Inspected
from so_tui.ui.loads import CORES, MEMORY, GpuView, LoadStore, NodeView, Sampled
from so_tui.ui.series import Axis

WINDOW_S = 600.0
"""What the axis shows at most."""
_KEPT = 1800
"""Samples that are kept when there are twice as many."""
_PROCESSES_S = 3.0
_COST_SHARE = 1 / 100
"""Reading every process takes long where there are thousands; its interval grows so that it stays below this share of a core."""


@dataclass(frozen=True, slots=True)
class HostView:
    """What is known of this host at one moment."""

    nodes: tuple[NodeView, ...]
    gpus: tuple[GpuView, ...]
    sampled: Mapping[str, tuple[Sampled, ...]]
    processes: tuple[HostProcess, ...]
    axis: Axis
    binding: BindingRecord | None = None
    inspected: Inspected | None = None
    averaged: bool = False
    hosts: int = 1


class Monitor:
    """Samples this host. A sample that is being taken when it is closed is completed first."""

    def __init__(self, machine: Machine) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._cpus = {node.id: node.cpus for node in machine.numa_nodes}
        self._sampler = Sampler(
            machine, ProcessTree(frozenset(), os.getpid()), attempt=0
        )  # a tree without processes: there is no run
        self._processes = HostProcesses(machine.allowed_cpus)
        self._listed = self._processes.read({})
        self._listed_due = 0.0
        self._kept: deque[Sample] = deque(maxlen=_KEPT)
        self._store = LoadStore()
        self._store.want((*samples_of(HARDWARE), CORES, *MEMORY))

    def poll(self) -> HostView | None:
        """Take a sample and return what is known; None once it is closed."""
        with self._lock:
            return None if self._closed else self._sample()

    def close(self) -> None:
        """Close NVML."""
        with self._lock:
            self._closed = True
            self._sampler.close()

    def _sample(self) -> HostView:
        sample = msgspec.structs.replace(
            self._sampler.sample(), foreign=()
        )  # without a run nothing is foreign to it
        self._kept.append(sample)
        self._store.append("", sample)
        if self._store.rows() > 2 * _KEPT:
            self._store.clear()
            for kept in self._kept:
                self._store.append("", kept)
        self._list_processes()
        nodes = (self._store.node("", sample, node, self._cpus) for node in sample.nodes)
        gpus = (self._store.gpu("", gpu) for gpu in sample.gpus)
        begin = self._kept[0].time
        return HostView(
            nodes=tuple(view for view in nodes if view is not None),
            gpus=tuple(view for view in gpus if view is not None),
            sampled=self._store.sampled(),
            processes=self._listed,
            axis=Axis(
                "time", max(begin, sample.time - WINDOW_S), max(sample.time, begin + 1), begin
            ),
        )

    def _list_processes(self) -> None:
        now = time.monotonic()
        if now >= self._listed_due:
            started = time.process_time()
            self._listed = self._processes.read(self._sampler.gpu_uses())
            self._listed_due = now + max(
                _PROCESSES_S, (time.process_time() - started) / _COST_SHARE
            )
