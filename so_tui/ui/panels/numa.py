"""The hardware of a run or of this host: every NUMA node with its cores, memory and load over time, and every GPU."""

from __future__ import annotations

from typing import ClassVar, Protocol

from textual import getters
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widget import Widget

from so_tui.runs.records import BindingRecord
from so_tui.ui.framing import SIDE, framed
from so_tui.ui.glyphs import GlyphName
from so_tui.ui.inspected import Inspected
from so_tui.ui.kept_lines import KeptVertical
from so_tui.ui.loads import CORES, MEMORY, GpuView, NodeView
from so_tui.ui.series import Axis
from so_tui.ui.text import plural
from so_tui.ui.widgets import run_lines
from so_tui.ui.widgets.numa_nodes import PLOTS, NodePicture, NodePlot, NumaNodes, node_rows
from so_tui.ui.widgets.rule import Rule
from so_tui.ui.widgets.styled_lines import StyledLines


class ShowsHosts(Protocol):
    """What the panel needs to know of a run or of this host."""

    @property
    def nodes(self) -> tuple[NodeView, ...]:
        """NUMA nodes with cores."""

    @property
    def gpus(self) -> tuple[GpuView, ...]:
        """GPUs of all hosts."""

    @property
    def binding(self) -> BindingRecord | None:
        """Which cores a run's ranks have; None without a run."""

    @property
    def averaged(self) -> bool:
        """Whether nodes and GPUs show means over a run's training."""

    @property
    def inspected(self) -> Inspected | None:
        """What nodes and GPUs show instead of the newest samples."""

    @property
    def hosts(self) -> int:
        """Number of hosts."""


class NumaPanel(KeptVertical):
    """A title line, the NUMA nodes under each other, a line for each GPU, and what else is to stand below them."""

    heading = getters.child_by_id("nodes-rule", Rule)
    nodes = getters.query_one("#nodes", NumaNodes)
    gpus = getters.query_one("#gpus", StyledLines)

    KEYS: ClassVar[tuple[BindingType, ...]] = (
        Binding(
            "h",
            "node_plot",
            "Heat of cores",
            show=False,
            id="node-plot",
            tooltip="Nodes over time: load, heat of cores, memory",
        ),
    )
    """Keys that act on this panel from anywhere on its screen, which binds them."""

    def __init__(self, *below: Widget, glyphs: GlyphName, id: str | None = None) -> None:
        self._below = below
        """What else the frame surrounds."""
        self._glyphs = glyphs
        super().__init__(id=id)

    def compose(self) -> ComposeResult:
        yield Rule("NUMA nodes", id="nodes-rule")
        with KeptVertical(classes="frame"):
            yield NumaNodes(glyphs=self._glyphs, id="nodes")
            yield StyledLines(id="gpus")
            yield from self._below

    def show(
        self, shown: ShowsHosts, axis: Axis | None, width: int, cursor: float | None = None
    ) -> None:
        """Show the nodes over ``axis``, and the GPUs, in a panel of ``width`` cells."""
        self.gpus.display = bool(shown.gpus)
        self.gpus.update(run_lines.gpu_lines(shown.gpus, self.inner(width)))
        self.show_nodes(shown, axis, cursor)

    def show_nodes(self, shown: ShowsHosts, axis: Axis | None, cursor: float | None = None) -> None:
        """Show the nodes over another axis."""
        self.nodes.show(tuple(_picture(shown, node) for node in shown.nodes), axis, cursor)
        self.heading.update("NUMA", _figure(shown, self.nodes.plot))

    @property
    def wanted(self) -> tuple[str, ...]:
        """What must be kept of the samples."""
        return {"load": (), "cores": (CORES,), "memory": MEMORY}[self.nodes.plot]

    def next_plot(self) -> None:
        """Show something else of the nodes over time."""
        self.nodes.plot = PLOTS[(PLOTS.index(self.nodes.plot) + 1) % len(PLOTS)]

    @property
    def gpu_rows(self) -> int:
        """Rows that the GPUs take."""
        return self.gpus.rows if self.gpus.display else 0

    def node_rows(self, width: int) -> int:
        """Return how many nodes stand above each other in a panel of ``width`` cells."""
        return node_rows(len(self.nodes.pictures), self.inner(width))

    def inner(self, width: int) -> int:
        """Return the cells inside the frame of a panel of ``width``."""
        return width - 2 * SIDE if framed(self) else width

    def set_rows(self, history: int, *, heading: bool) -> None:
        """Give every node ``history`` rows of its load over time, and show or hide the title line and with it the frame."""
        self.heading.display = heading
        self.set_class(not heading, "-bare")
        self.nodes.set_plot_height(history)


def _figure(shown: ShowsHosts, plot: NodePlot) -> str:
    cores = sum(len(node.cpus) for node in shown.nodes)
    if not cores:
        return "waiting for the first sample"
    when = ", means while it trained" if shown.averaged else ""
    if shown.inspected is not None:
        when = (
            ", at the cursor"
            if shown.inspected.samples
            else ", now: nothing was sampled at the cursor"
        )
    hosts = f" of {plural(shown.hosts, 'host')}" if shown.hosts > 1 else ""
    counted = f"{plural(len(shown.nodes), 'node')}{hosts}, {plural(cores, 'core')}"
    over_time = {
        "load": "",
        "cores": "   rows are cores over time",
        "memory": "   memory in use, and the file cache in it",
    }[plot]
    cells = "   a cell is a core" + (
        ": A Adam, m main, o other" if shown.binding is not None else ""
    )
    return f"{counted}{when}{over_time}{cells}"


def _picture(shown: ShowsHosts, node: NodeView) -> NodePicture:
    """Join a node's load with the ranks and GPUs that are bound to it."""
    bound = shown.binding.ranks if shown.binding is not None else ()
    own = set(node.cpus)
    ranks = [rank for rank in bound if own.intersection(rank.cpus) and rank.host in (node.host, "")]
    names = " · ".join(
        f"rank {rank.rank}" + ("" if rank.gpu is None else f" · GPU {rank.gpu}") for rank in ranks
    )
    used = {rank.gpu for rank in ranks}
    return NodePicture(
        node,
        node.host if shown.hosts > 1 else "",
        names,
        frozenset(cpu for rank in ranks for cpu in rank.adam_cpus),
        frozenset(cpu for rank in ranks for cpu in rank.main_cpus),
        tuple(gpu for gpu in shown.gpus if gpu.host == node.host and gpu.sample.index in used),
    )
