"""The hardware of a run or of this host: a line for each NUMA node and GPU, one where they are one
chip, and nodes over time (load as mean and band, heat of cores, or memory).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Literal, NamedTuple

from rich.segment import Segment
from rich.style import Style
from textual import getters
from textual.app import ComposeResult
from textual.strip import Strip
from textual.widget import Widget

from so_tui.ui.charts.drawing import (
    GUTTER,
    RoleStyles,
    Scale,
    axis_row,
    gutter_text,
    joined,
    plot_key,
    plot_rows,
    with_cursor,
    with_even_ticks,
)
from so_tui.ui.charts.series import Axis, Line
from so_tui.ui.lines import cells_of
from so_tui.ui.node_lines import (
    Cells,
    CoreGroup,
    NodePicture,
    Table,
    equal_parts,
    group_cores,
    level_of,
    table_of,
)
from so_tui.ui.snapshot import CORES, MEMORY, GpuView, Hosts, NodeView
from so_tui.ui.text import GlyphName, glyphs_of, shorten
from so_tui.ui.textual_fixes import DrawnRowsMixin, KeptVertical
from so_tui.ui.widgets import SIDE, Rule, columns_title, framed
from so_tui.units import memory_unit, plural

# Heat of cores over time: rows are cores, folded to fit, columns are time. Pure data in, text out.


_SAMPLES_A_COLUMN = 4
"""Samples that are averaged of a column, spread over it: more cost time and look the same."""


class _HeatRow(NamedTuple):
    """Neighbouring cores that do one thing, shown as one row."""

    label: str
    """``A 216``: what the cores do, and the first of them."""
    role: str
    positions: Sequence[int]
    """Where the cores stand among those of the node."""


def _heat_rows(groups: Sequence[CoreGroup], height: int) -> list[_HeatRow]:
    """Fold the cores of a node into at most ``height`` rows, a group's cores among themselves, as
    far as each group gets a row.
    """
    shown = groups[:height]
    cores = [len(group.cpus) for group in shown]
    counts = cells_of(cores, min(height, sum(cores)))
    return [
        _HeatRow(f"{group.sign}{cpus[0]:>{GUTTER - 2}} ", group.role, positions)
        for group, count in zip(shown, counts, strict=True)
        for cpus, positions in zip(
            equal_parts(group.cpus, count), equal_parts(group.positions, count), strict=True
        )
        if cpus  # rounding may give a group more rows than it has cores
    ]


def _heat_texts(
    rows: Sequence[_HeatRow], history: Sequence[bytes], edges: Sequence[int], glyphs: GlyphName
) -> list[str]:
    """Return a text for each row, a character for each column.

    Args:
        history: Loads of all cores of the node in percent, a sample each.
        edges: Borders of the columns as indices into ``history``. A column without a sample shows
            the one before, if another follows.
    """
    columns = []
    for start, stop in pairwise(edges):
        if stop == start and 0 < start < len(history):
            start -= 1
        columns.append(history[start : stop : max(1, -(-(stop - start) // _SAMPLES_A_COLUMN))])
    return [
        "".join(
            " " if not column else level_of(_mean(column, row.positions), glyphs)
            for column in columns
        )
        for row in rows
    ]


def _mean(column: Sequence[bytes], positions: Sequence[int]) -> float:
    """Return the mean load of some cores over some samples."""
    if len(positions) == 1:
        return sum(loads[positions[0]] for loads in column) / len(column)
    pick = itemgetter(*positions)
    return sum(sum(pick(loads)) for loads in column) / (len(column) * len(positions))


PERCENT = Scale(0, 100)
NodePlot = Literal["load", "cores", "memory"]
_PLOTS: dict[NodePlot, tuple[Sequence[str], str]] = {
    "load": ((), ""),
    "cores": ((CORES,), "rows are cores over time"),
    "memory": (tuple(MEMORY), "memory in use, and the file cache in it"),
}
"""What can be drawn of each node over time, with what must be kept of the samples for it, and what
the panel's heading says of it.
"""
TWO_COLUMNS = 100
"""Least cells for nodes over time in two columns."""
FEW_CORES = 2
"""Cores of a node up to which a band between the idlest and the busiest says nothing."""
GAP = 2
"""Cells between two columns."""


_Rows = list[list[Segment]]


def _node_rows(nodes: int, width: int) -> int:
    """Return how many nodes stand above each other in ``width`` cells."""
    return math.ceil(nodes / _node_columns(nodes, width))


def _node_columns(nodes: int, width: int) -> int:
    """Return how many nodes stand beside each other in ``width`` cells."""
    return 2 if nodes > 1 and width >= TWO_COLUMNS else 1


class NumaNodes(DrawnRowsMixin, can_focus=True):
    """A line for each node and GPU in aligned columns, and below them ``plot_height`` rows of
    history of each node, in one or two columns, above the x axis.
    """

    ALLOW_MAXIMIZE = True
    ROLES = {
        "band": "$raw-line",
        "main": "$adam",
        "memory": "$memory",
        "gpu": "$gpu",
        "axis": "$rule",
        "label": "$faint",
        "note": "$faint",
        "title": "bold",
        "value": "bold",
        "adam": "$adam-strip",
        "main-core": "$main-core",
        "other": "$other-core",
        "sign": "$faint",
        "empty": "",
        "cursor": "$warning",
        "full": "bold $warning",
        "over": "bold $error",
    }
    DEFAULT_CSS = "NumaNodes { height: auto; }"

    def __init__(self) -> None:
        super().__init__(id="nodes")
        self.pictures: tuple[NodePicture, ...] = ()
        self.loose: tuple[GpuView, ...] = ()
        """GPUs with a line of their own."""
        self.labelled = True
        """Whether the columns are named above."""
        self.axis: Axis | None = None
        self.cursor: float | None = None
        self.plot_height = 2
        self.plot: NodePlot = "load"
        self._role_styles = RoleStyles(self.ROLES, {"title": "bold underline $accent"})
        self._plots: dict[tuple[str, int], tuple[object, _Rows]] = {}
        """What each node's plot was drawn for, and its rows."""
        self._lines_of: tuple[object, object, object] = (None, None, None)
        """Width, look and data of the lines."""
        self._table = Table([], [])

    def show(
        self,
        pictures: tuple[NodePicture, ...],
        loose: tuple[GpuView, ...],
        axis: Axis | None,
        cursor: float | None = None,
    ) -> None:
        """Show new data."""
        rows = self.lines
        self.pictures, self.loose, self.axis, self.cursor = pictures, loose, axis, cursor
        if rows != self.lines:
            self.redraw(layout=True)
        else:
            self.repaint()

    def row_key(self) -> tuple[object, ...]:
        look = self.plot_height, self.plot, self.labelled
        return *super().row_key(), glyphs_of(self.app), *look

    def get_content_height(self, container: object, viewport: object, width: int) -> int:
        rows = _node_rows(len(self.pictures), width) * self.plot_height
        return max(1, self.lines + rows + bool(self.plot_height))

    @property
    def lines(self) -> int:
        """Lines of nodes and GPUs."""
        return len(self.pictures) + len(self.loose)

    def table(self, width: int) -> Table:
        """Return the lines in ``width`` cells, made once for what is shown."""
        labelled = self.labelled and not self.is_maximized
        look = width, glyphs_of(self.app), labelled, memory_unit()
        known, pictures, loose = self._lines_of
        if known != look or pictures is not self.pictures or loose is not self.loose:
            self._lines_of = look, self.pictures, self.loose
            self._table = table_of(self.pictures, self.loose, *look[:3])
        return self._table

    def draw_rows(self) -> list[Strip]:
        styles = self._role_styles.get(self)
        base = styles["base"]
        nodes, (whole, height) = len(self.pictures), self.size
        if not self.lines:
            nothing = Segment("no samples of this host yet", styles["note"])
            return [Strip([nothing]).adjust_cell_length(whole, base)]
        strips = [
            Strip(joined(cells, styles)).adjust_cell_length(whole, base)
            for cells in self.table(whole).lines
        ]
        columns = _node_columns(nodes, whole)
        width = (whole - GAP * (columns - 1)) // columns
        plot = self.plot_height
        if self.is_maximized and nodes:
            plot = max(plot, (height - 1 - self.lines) // _node_rows(nodes, whole))
        axis = self.axis if width > GUTTER + 4 else None
        if not plot or axis is None or not nodes:
            return strips
        size = width - GUTTER, plot
        blocks = [self._plotted(picture, axis, size, styles) for picture in self.pictures]
        blocks += [[[] for _ in range(plot)]] * (-len(blocks) % columns)
        strips += _beside_each_other(blocks, columns, width, whole, base)
        corner = Segment(f"{axis.unit} "[-GUTTER:].rjust(GUTTER), styles["label"])
        labels = [corner, *axis_row(axis, width - GUTTER, (), styles)]
        return strips + _beside_each_other([[labels]] * columns, columns, width, whole, base)

    def _plotted(
        self, picture: NodePicture, axis: Axis, size: tuple[int, int], styles: dict[str, Style]
    ) -> _Rows:
        """Return the plot of a node with its labels and the cursor, cached but for that while the
        range does not move.
        """
        view = picture.view
        named = picture.short if len(self.pictures) > 1 else ""
        rows = size[1] - bool(named and size[1] > len(picture.groups))
        heat = _heat_rows(picture.groups, rows) if self.plot == "cores" and view.cores else []
        load = view.load[len(view.cpus) <= FEW_CORES :]
        lines = (*load, *(gpu.load for gpu in picture.gpus))
        if self.plot == "memory":
            lines = view.memory
        look = size, glyphs_of(self.app), id(styles), self.plot, memory_unit()
        key = look, heat, plot_key(lines, axis)
        name = (view.host, view.sample.id)
        if name not in self._plots or self._plots[name][0] != key:
            if self.plot == "cores":
                drawn = self._heat(view, heat, axis, (size[0], rows), styles)
                if rows < size[1]:
                    drawn.insert(0, [Segment(named, styles["title"])])
            else:
                drawn = self._curves(view, lines, axis, size, styles)
                if named:  # in place of the highest label: the scale is in the lines above
                    label = f"{shorten(named, GUTTER - 1):<{GUTTER}}"
                    drawn[0][0] = Segment(label, styles["title"])
            self._plots[name] = key, drawn
        return [
            [label, *with_cursor(row, axis, self.cursor, size[0], styles["cursor"])]
            for label, *row in self._plots[name][1]
        ]

    def _curves(
        self,
        view: NodeView,
        lines: Sequence[Line],
        axis: Axis,
        size: tuple[int, int],
        styles: dict[str, Style],
    ) -> _Rows:
        """Return load or memory as lines."""
        scale, per, unit = PERCENT, 1.0, "%"
        if self.plot == "memory":
            scale = Scale(0, max(1, view.sample.memory_total_bytes))
            per, unit = memory_unit()[0], "G"
        glyphs = glyphs_of(self.app)
        scale = with_even_ticks(scale, size[1], glyphs, per)
        body = plot_rows(lines, axis, lambda _: scale, size, glyphs, styles)[0]
        labels = [" " * GUTTER] * len(body)
        if len(body) > 2:
            labels = gutter_text(scale, size[1], glyphs, lambda value: f"{value:g} {unit}", per)
        return [
            [Segment(label, styles["label"]), *row] for label, row in zip(labels, body, strict=True)
        ]

    def _heat(
        self,
        view: NodeView,
        heat: Sequence[_HeatRow],
        axis: Axis,
        size: tuple[int, int],
        styles: dict[str, Style],
    ) -> _Rows:
        """Return the heat of cores over time."""
        width, height = size
        edges = axis.indices(view.load[1], width)
        texts = _heat_texts(heat, view.cores, edges, glyphs_of(self.app))
        rows: list[Cells] = [
            [(row.label, "sign"), (text, row.role)] for row, text in zip(heat, texts, strict=True)
        ]
        rest = ["" if view.cores else "reading …", *[""] * height][: height - len(rows)]
        rows += [[(" " * GUTTER + text, "note")] for text in rest]
        return [joined(row, styles) for row in rows]


def _beside_each_other(
    blocks: Sequence[Sequence[list[Segment]]], columns: int, width: int, whole: int, base: Style
) -> list[Strip]:
    """Return blocks of equally many rows, ``columns`` of them of ``width`` cells beside each other
    in ``whole`` cells.
    """
    gap = Strip.blank(GAP, base)
    strips = []
    for at in range(0, len(blocks), columns):
        for rows in zip(*blocks[at : at + columns], strict=True):
            parts = [
                part for row in rows for part in (Strip(row).adjust_cell_length(width, base), gap)
            ]
            strips.append(Strip.join(parts[:-1]).adjust_cell_length(whole, base))
    return strips


# The hardware of a run or of this host: every NUMA node with its cores, memory and load over time,
# and every GPU.


class NumaPanel(KeptVertical):
    """A title line that names the columns, NUMA nodes and GPUs in lines, and what else is to stand
    below them.
    """

    heading = getters.query_one("#nodes-rule", Rule)
    nodes = getters.query_one("#nodes", NumaNodes)

    def __init__(self, *below: Widget) -> None:
        self._below = below
        """What else the frame surrounds."""
        self._width, self._headed = 0, True
        super().__init__()

    def compose(self) -> ComposeResult:
        yield Rule("NUMA nodes", id="nodes-rule")
        with KeptVertical(classes="frame"):
            yield NumaNodes()
            yield from self._below

    def show(
        self, shown: Hosts, axis: Axis | None, width: int, cursor: float | None = None
    ) -> None:
        """Show nodes, over ``axis``, and GPUs in a panel of ``width`` cells."""
        self._width = width
        self.show_nodes(shown, axis, cursor)

    def show_nodes(self, shown: Hosts, axis: Axis | None, cursor: float | None = None) -> None:
        """Show the nodes over another axis."""
        pictures = tuple([_picture(shown, node) for node in shown.nodes])
        joined_gpus = {id(picture.gpus[0]) for picture in pictures if picture.alone is not None}
        loose = tuple([view for view in shown.gpus if id(view) not in joined_gpus])
        counted, note = _figure(shown, self.nodes.plot)
        # The title line names the columns unless something must be known of their figures.
        self.nodes.labelled = self._headed and not note
        self.nodes.show(pictures, loose, axis, cursor)
        title = "NUMA nodes"
        if self.nodes.labelled and self.nodes.lines and self._width:
            labels = self.nodes.table(self.inner(self._width)).labels
            first = self.nodes.pictures[0].short.partition(" ")[0] if self.nodes.pictures else "GPU"
            title = columns_title(first, labels, SIDE if framed(self) else 0, self._width)
        self.heading.update(title, *((f"{counted}   {note}", note) if note else (counted,)))

    @property
    def wanted(self) -> Sequence[str]:
        """What must be kept of the samples."""
        return _PLOTS[self.nodes.plot][0]

    def next_plot(self) -> None:
        """Show something else of the nodes over time."""
        plots = list(_PLOTS)
        self.nodes.plot = plots[(plots.index(self.nodes.plot) + 1) % len(plots)]

    def node_rows(self, width: int) -> int:
        """Return how many nodes stand above each other in a panel of ``width`` cells."""
        return _node_rows(len(self.nodes.pictures), self.inner(width))

    def inner(self, width: int) -> int:
        """Return the cells inside the frame of a panel of ``width``."""
        return width - 2 * SIDE if framed(self) else width

    def set_rows(self, history: int, *, heading: bool) -> None:
        """Give every node ``history`` rows of its load over time, and show or hide the title line
        and with it the frame.
        """
        self.heading.display = self._headed = heading
        self.set_class(not heading, "-bare")
        if history != self.nodes.plot_height:
            self.nodes.plot_height = history
            self.nodes.redraw(layout=True)


def _figure(shown: Hosts, plot: NodePlot) -> tuple[str, str]:
    """Return how much hardware is shown, and what must be known of its figures."""
    cores = sum(len(node.cpus) for node in shown.nodes)
    if not cores:
        return "", "waiting for the first sample"
    when = "means while it trained" if shown.averaged else ""
    if shown.inspected is not None:
        sampled = shown.inspected.samples
        when = "at the cursor" if sampled else "now: nothing was sampled at the cursor"
    hosts = f" of {plural(shown.count, 'host')}" if shown.count > 1 else ""
    counted = f"{plural(len(shown.nodes), 'node')}{hosts}, {plural(cores, 'core')}"
    return counted, "   ".join(filter(None, (when, _PLOTS[plot][1])))


def _picture(shown: Hosts, node: NodeView) -> NodePicture:
    """Join a node's load with the ranks that are bound to it, and their GPUs or those attached."""
    own = set(node.cpus)
    ranks = [
        rank for rank in shown.ranks if own.intersection(rank.cpus) and rank.host in (node.host, "")
    ]
    adam = frozenset(cpu for rank in ranks for cpu in rank.adam_cpus)
    main = frozenset(cpu for rank in ranks for cpu in rank.main_cpus)
    used = {rank.gpu for rank in ranks}

    def attached(gpu: GpuView) -> bool:
        at = shown.gpu_nodes.get(gpu.sample.index)
        return gpu.sample.index in used if at is None else at == node.sample.id

    return NodePicture(
        node,
        node.host if shown.count > 1 else "",
        tuple(sorted(rank.rank for rank in ranks)),
        group_cores(node.cpus, adam, main),
        tuple([gpu for gpu in shown.gpus if gpu.host == node.host and attached(gpu)]),
    )
