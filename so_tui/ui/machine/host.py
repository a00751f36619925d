"""This host as it works now: its nodes and GPUs over time, and the processes that use GPUs or are
bound to cores.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
import time
from collections import deque
from collections.abc import Sequence

import msgspec
from textual import getters
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical

from so_tui.launch.supervisor.processes import ProcessTree
from so_tui.launch.supervisor.samples import HostProcess, HostProcesses, Sampler
from so_tui.machine.host import cpu_ranges
from so_tui.machine.types import Machine
from so_tui.runs.records import Sample
from so_tui.ui.chart_metrics import (
    BY_KEY,
    HARDWARE,
    hardware_keys,
    sampled_lines,
    samples_of,
)
from so_tui.ui.charts.chart import Chart
from so_tui.ui.charts.series import Axis
from so_tui.ui.lines import StyledLines
from so_tui.ui.numa_nodes import NumaPanel
from so_tui.ui.snapshot import CORES, MEMORY, HostView, LoadStore
from so_tui.ui.text import Content, faint, in_rows, shorten
from so_tui.ui.widgets import BOTTOM, Rule, framed
from so_tui.units import memory_size as memory

# What this host does now, without a run: sampled in a worker thread, handed over as frozen views.


WINDOW_S = 600.0
"""What the axis shows at most."""
_KEPT = 1800
"""Samples that are kept when there are twice as many."""
_PROCESSES_S = 3.0
_COST_SHARE = 1 / 100
"""Reading every process takes long where there are thousands; its interval grows so that it stays
below this share of a core.
"""


class Monitor:
    """Samples this host. A sample that is being taken when it is closed is completed first."""

    def __init__(self, machine: Machine) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._cpus = {node.id: node.cpus for node in machine.numa_nodes}
        self._gpu_nodes = {gpu.index: gpu.numa_node for gpu in machine.gpus}
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
            self._sampler.gpus.close()

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
        now = time.monotonic()
        if now >= self._listed_due:
            started = time.process_time()
            self._listed = self._processes.read(self._sampler.gpus.processes())
            took = time.process_time() - started
            self._listed_due = now + max(_PROCESSES_S, took / _COST_SHARE)
        begin = self._kept[0].time
        axis = Axis("time", max(begin, sample.time - WINDOW_S), max(sample.time, begin + 1), begin)
        hosts = dataclasses.replace(
            self._store.view({"": sample}, self._cpus), gpu_nodes=self._gpu_nodes
        )
        return HostView(hosts, self._listed, axis)


CHART_WIDTH = 40
"""Cells of a chart at least."""
_CHART_ROWS = (9, 14)
"""Rows of the charts, at least and at most."""
_MOST_PLOT_ROWS = 12
_LEAST_PROCESS_ROWS = 6
_NOT_HERE = ("cores", "foreign")
"""Charts that say nothing here: the nodes show their cores, and without a run nothing is
foreign.
"""


class HostPanel(Vertical):
    """Owns the charts and the list of processes; the nodes have a panel of their own."""

    DEFAULT_CSS = """
    HostPanel { height: 1fr; }
    HostPanel #host-charts { height: auto; }
    HostPanel StyledLines { text-wrap: nowrap; }
    """

    numa = getters.query_one(NumaPanel)
    row = getters.child_by_id("host-charts", Horizontal)
    processes_rule = getters.child_by_id("processes-rule", Rule)
    processes = getters.query_one("#processes", StyledLines)

    def __init__(self) -> None:
        self._drawing = asyncio.Lock()
        """Held while charts are exchanged: a sample may come during a resize."""
        self.first = 0
        """Position of the first chart among those that this host has."""
        super().__init__()

    def compose(self) -> ComposeResult:
        yield NumaPanel()
        yield Horizontal(id="host-charts")
        yield Rule("processes", id="processes-rule")
        with Vertical(classes="frame"):
            yield StyledLines(id="processes")

    async def show(self, host: HostView) -> None:
        """Show this host as it is now."""
        width, height = self.size
        keys = [key for key in hardware_keys(host.hosts.gpus) if key not in _NOT_HERE]
        count = min(len(keys), max(1, width // CHART_WIDTH))
        self.first %= len(keys)
        shown = [keys[(self.first + at) % len(keys)] for at in range(count)]
        async with self._drawing:
            await self._show_charts(shown, host)
        self.numa.show(host.hosts, host.axis, width)
        nodes = max(1, self.numa.node_rows(width))
        frames = 2 * BOTTOM if framed(self) else 0
        left = height - 3 - frames - self.numa.nodes.lines  # two title lines and the axis
        charts = min(_CHART_ROWS[1], max(_CHART_ROWS[0], left // 3))
        if left - charts < nodes + _LEAST_PROCESS_ROWS:
            charts = 0
        most = (
            max((len(view.cpus) for view in host.hosts.nodes), default=0)
            if self.numa.nodes.plot == "cores"
            else _MOST_PLOT_ROWS
        )
        plot = max(0, min(most, _MOST_PLOT_ROWS, (left - charts - _LEAST_PROCESS_ROWS) // nodes))
        self.row.display, self.row.styles.height = bool(charts), charts
        self.numa.set_rows(plot, heading=True)
        rows = max(2, left - charts - plot * nodes)
        on_gpus = sum(bool(process.gpu_bytes) for process in host.processes)
        bound = sum(bool(process.bound) for process in host.processes)
        self.processes_rule.update("processes", f"{on_gpus} on GPUs, {bound} bound to cores")
        self.processes.update(_process_lines(host.processes, self.numa.inner(width), rows))

    async def _show_charts(self, keys: list[str], host: HostView) -> None:
        if [chart.id for chart in self.row.query(Chart)] != keys:
            await self.row.remove_children()
            await self.row.mount_all(Chart(BY_KEY[key]) for key in keys)
        sampled = host.hosts.sampled
        for chart in self.row.query(Chart):
            named = sampled_lines(chart.metric, sampled, coloured=not self.app.no_color)
            chart.show(named, host.axis, marked=sampled.get(chart.metric.marked, ()))


def _process_lines(processes: Sequence[HostProcess], width: int, rows: int) -> Content:
    """Return a heading and a line for each process, in at most ``rows`` lines; the last says how
    many are not shown.
    """
    shown = processes if len(processes) < rows else processes[: max(0, rows - 2)]
    gpus = any(process.gpu_bytes for process in processes)
    head = (
        f"{'pid':>7}  {'user':<9} {'cores':>6} {'memory':>9}"
        + (f" {'GPU':>5} {'GPU memory':>10}" if gpus else "")
        + (f"  {'bound':<{_BOUND}}" if _shows_bound(width, gpus=gpus) else "")
        + "  command"
    )
    lines = [
        faint(head[:width]),
        *(_process_line(process, width, gpus=gpus) for process in shown),
    ]
    if len(shown) < len(processes):
        lines.append(faint(f"{'':>7}  {len(processes) - len(shown)} more"))
    return in_rows(lines)


_FIGURES, _ON_GPUS, _BOUND, _COMMAND = 35, 17, 12, 24
"""Cells of the columns: pid to memory, both of the GPUs, the cores, and at least of the command."""


def _shows_bound(width: int, *, gpus: bool) -> bool:
    """Return whether the cores that processes are bound to have room beside their commands."""
    return width >= _FIGURES + gpus * _ON_GPUS + _BOUND + _COMMAND + 4


def _process_line(process: HostProcess, width: int, *, gpus: bool) -> Content:
    on = ",".join(map(str, process.gpu_bytes))
    used = memory(process.gpu_total_bytes) if process.gpu_total_bytes else ""
    resident = memory(process.memory_bytes) if process.memory_bytes is not None else ""
    bound = f"  {shorten(cpu_ranges(process.bound), _BOUND):<{_BOUND}}"
    line = Content.assemble(
        (f"{process.pid:>7}  {shorten(process.user, 9):<9} ", "$faint"),
        f"{process.cores:>6.1f} {resident:>9}",
        (f" {on:>5} {used:>10}" if gpus else "", "$gpu"),
        (bound if _shows_bound(width, gpus=gpus) else "", "$adam"),
    )
    return line + Content.styled(f"  {_command(process, width - line.cell_length - 2)}", "bold")


def _command(process: HostProcess, width: int) -> str:
    """Return what a process runs, without the folder of its program; its name where that is not
    known.
    """
    if not process.command:
        return shorten(process.name, width)
    program, *arguments = process.command
    return shorten(" ".join((program.rpartition("/")[2], *arguments)), width)
