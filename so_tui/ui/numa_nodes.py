"""NUMA nodes over time (load as mean and band, heat of cores, or memory), one cell per core with
Adam and main cores marked, and memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, pairwise
from operator import itemgetter
from typing import Literal, NamedTuple

from rich.segment import Segment
from rich.style import Style
from textual import getters
from textual.app import ComposeResult
from textual.strip import Strip
from textual.widget import Widget

from so_tui.trust.text import brief_line
from so_tui.ui import run_status
from so_tui.ui.charts.drawing import (
    GUTTER,
    RoleStyles,
    Scale,
    axis_row,
    cells_in,
    gutter_text,
    joined,
    plot_key,
    plot_rows,
    with_cursor,
)
from so_tui.ui.charts.series import Axis, Line
from so_tui.ui.lines import StyledLines, cells_of
from so_tui.ui.snapshot import CORES, MEMORY, GpuView, Hosts, NodeView
from so_tui.ui.text import GlyphName, glyphs_of, shorten
from so_tui.ui.textual_fixes import DrawnRowsMixin, KeptVertical
from so_tui.ui.widgets import SIDE, Rule, framed
from so_tui.units import memory_of, memory_unit, plural
from so_tui.units import memory_size as memory

# Cores as cells: one cell a core where there is room, averages of neighbours where there is not.
# Pure data in, text out.


LEVELS: dict[GlyphName, str] = {"braille": "▁▂▃▄▅▆▇█", "block": "▁▂▃▄▅▆▇█", "ascii": ".:-=+*#@"}
_Numbers = tuple[int, ...]
_Cells = list[tuple[str, str]]
"""Texts with their roles."""


class _CoreGroup(NamedTuple):
    """Cores of a node that do one thing; ``sign`` leads them on the row, so that groups differ
    without colour as well.
    """

    name: str
    sign: str
    role: str
    cpus: _Numbers
    positions: _Numbers
    """Where its cores stand among those of the node."""


_USES = (("adam", "Adam", "A"), ("main-core", "main", "m"), ("other", "other", "o"))
"""Role, name and sign of each group, in their order on the row."""
_Busy = Sequence[tuple[_CoreGroup, Sequence[int]]]
"""Groups with the load of each of their cores, in percent."""


@lru_cache(maxsize=64)
def _group_cores(
    cpus: _Numbers, adam: frozenset[int], main: frozenset[int]
) -> tuple[_CoreGroup, ...]:
    """Group a node's cores by the run's use of them, which stays the same from one sample to the
    next; groups without a core are left out.
    """
    roles = ["adam" if cpu in adam else "main-core" if cpu in main else "other" for cpu in cpus]
    return tuple(
        _CoreGroup(name, sign, role, tuple(cpus[at] for at in found), found)
        for role, name, sign in _USES
        if (found := tuple(at for at, own in enumerate(roles) if own == role))
    )


def _heat_cells(busy: _Busy, width: int, glyphs: GlyphName) -> _Cells:
    """Return one row: each group's sign and its cores, in at most ``width`` cells."""
    room = width - 2 * len(busy)
    cores = sum(len(loads) for _, loads in busy)
    cells: _Cells = []
    for group, loads in busy:
        parts = _equal_parts(loads, max(1, min(len(loads), room * len(loads) // cores)))
        shown = [_level(sum(part) / len(part), glyphs) for part in parts]
        cells += [(" ", "empty"), (group.sign, "sign"), ("".join(shown), group.role)]
    return cells[1:]


@lru_cache(maxsize=1024)  # hundreds of cores are drawn each second
def _level(load: float, glyphs: GlyphName) -> str:
    """Return the character of one core's load (percent)."""
    levels = LEVELS[glyphs]
    return levels[min(len(levels) - 1, max(0, int(load / 100 * len(levels))))]


def _equal_parts(values: Sequence[int], count: int) -> list[Sequence[int]]:
    """Return ``count`` parts that follow each other."""
    length = len(values)
    return [values[at * length // count : (at + 1) * length // count] for at in range(count)]


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


def _heat_rows(groups: Sequence[_CoreGroup], height: int) -> list[_HeatRow]:
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
            _equal_parts(group.cpus, count), _equal_parts(group.positions, count), strict=True
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
            " " if not column else _level(_mean(column, row.positions), glyphs)
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
    "cores": ((CORES,), "   rows are cores over time"),
    "memory": (tuple(MEMORY), "   memory in use, and the file cache in it"),
}
"""What can be drawn of each node over time, with what must be kept of the samples for it, and what
the panel's heading says of it.
"""
TWO_COLUMNS = 148
"""Cells from which on nodes stand in two columns: a row of 72 cores and most of a heading fit into
each.
"""
GAP = 2
"""Cells between two columns."""


class _NodePicture(NamedTuple):
    """A node with the ranks and GPUs that are bound to it."""

    view: NodeView
    host: str
    """Its host, where the run has several; else empty."""
    ranks: str
    """``rank 0 · GPU 0``; empty where no rank is bound."""
    groups: tuple[_CoreGroup, ...]
    gpus: tuple[GpuView, ...]
    """GPUs attached to this node whose load is drawn."""


_Rows = list[list[Segment]]


def _node_rows(nodes: int, width: int) -> int:
    """Return how many nodes stand above each other in ``width`` cells."""
    return math.ceil(nodes / _node_columns(nodes, width))


def _node_columns(nodes: int, width: int) -> int:
    """Return how many nodes stand beside each other in ``width`` cells."""
    return 2 if nodes > 1 and width >= TWO_COLUMNS else 1


class NumaNodes(DrawnRowsMixin, can_focus=True):
    """Nodes in one or two columns, each with a heading, ``plot_height`` rows of history and a row
    of cores, above the x axis.
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
        "adam": "$adam",
        "main-core": "$main-core",
        "other": "$other-core",
        "sign": "$faint",
        "empty": "",
        "cursor": "$warning",
        "stale": "$warning",
        "full": "bold $warning",
    }
    DEFAULT_CSS = "NumaNodes { height: auto; }"

    def __init__(self) -> None:
        super().__init__(id="nodes")
        self.pictures: tuple[_NodePicture, ...] = ()
        self.axis: Axis | None = None
        self.cursor: float | None = None
        self.plot_height = 2
        self.plot: NodePlot = "load"
        self._role_styles = RoleStyles(self.ROLES, {"title": "bold underline $accent"})
        self._plots: dict[tuple[str, int], tuple[object, _Rows]] = {}
        """What each node's plot was drawn for, and its rows."""

    def show(
        self, pictures: tuple[_NodePicture, ...], axis: Axis | None, cursor: float | None = None
    ) -> None:
        """Show new data."""
        rows = len(self.pictures)
        self.pictures, self.axis, self.cursor = pictures, axis, cursor
        if rows != len(pictures):
            self.redraw(layout=True)
        else:
            self.repaint()

    def row_key(self) -> tuple[object, ...]:
        return *super().row_key(), glyphs_of(self.app), self.plot_height, self.plot

    def get_content_height(self, container: object, viewport: object, width: int) -> int:
        rows = _node_rows(len(self.pictures), width) * (2 + self.plot_height)
        return max(1, rows + bool(self.plot_height))

    def draw_rows(self) -> list[Strip]:
        styles = self._role_styles.get(self)
        base = styles["base"]
        nodes, (whole, height) = len(self.pictures), self.size
        if not nodes:
            nothing = Segment("no samples of this host yet", styles["note"])
            return [Strip([nothing]).adjust_cell_length(whole, base)]
        columns = _node_columns(nodes, whole)
        width = (whole - GAP * (columns - 1)) // columns
        plot = self.plot_height
        if self.is_maximized:
            plot = max(plot, (height - 1) // _node_rows(nodes, whole) - 2)
        axis = self.axis if width > GUTTER + 4 else None
        blocks = []
        for picture in self.pictures:
            cores = picture.view.sample.cores
            busy = [(group, [cores[at] for at in group.positions]) for group in picture.groups]
            rows = [joined(_heading(picture, busy, width), styles)]
            if plot and axis is not None:
                rows += self._plotted(picture, axis, (width - GUTTER, plot), styles)
            cells = _heat_cells(busy, width - 1, glyphs_of(self.app))
            indent = min(GUTTER, max(1, width - sum(len(text) for text, _ in cells)))
            blocks.append([*rows, joined([(" " * indent, "note"), *cells], styles)])
        strips = _beside_each_other(blocks, columns, width, whole, base)
        if plot and axis is not None:
            corner = Segment(f"{axis.unit} "[-GUTTER:].rjust(GUTTER), styles["label"])
            labels = [corner, *axis_row(axis, width - GUTTER, (), styles)]
            strips += _beside_each_other([[labels]] * columns, columns, width, whole, base)
        return strips

    def _plotted(
        self, picture: _NodePicture, axis: Axis, size: tuple[int, int], styles: dict[str, Style]
    ) -> _Rows:
        """Return the plot of a node with its labels and the cursor, cached but for that while the
        range does not move.
        """
        view = picture.view
        heat = _heat_rows(picture.groups, size[1]) if self.plot == "cores" and view.cores else []
        lines = (*view.load, *(gpu.load for gpu in picture.gpus))
        if self.plot == "memory":
            lines = view.memory
        look = size, glyphs_of(self.app), id(styles), self.plot, memory_unit()
        key = look, heat, plot_key(lines, axis)
        name = (view.host, view.sample.id)
        if name not in self._plots or self._plots[name][0] != key:
            if self.plot == "cores":
                drawn = self._heat(view, heat, axis, size, styles)
            else:
                drawn = self._curves(view, lines, axis, size, styles)
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
        body = plot_rows(lines, axis, lambda _: scale, size, glyphs_of(self.app), styles)[0]
        labels = [" " * GUTTER] * len(body)
        if len(body) > 2:
            labels = gutter_text(scale, len(body), lambda value: f"{value:.0f} {unit}", per)
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
        rows: list[_Cells] = [
            [(row.label, "sign"), (text, row.role)] for row, text in zip(heat, texts, strict=True)
        ]
        rest = ["" if view.cores else "reading …", *[""] * height][: height - len(rows)]
        rows += [[(" " * GUTTER + text, "note")] for text in rest]
        return [joined(row, styles) for row in rows]


def _heading(picture: _NodePicture, busy: _Busy, width: int) -> _Cells:
    """Return ``node 0 · rank 0 · GPU 0 cpu 78 % Adam 65 cores 86 % main 7 cores 44 % 88 of 117
    GiB``, shortened to fit.
    """
    node = (picture.host, f"node {picture.view.sample.id}")
    for ranks, long, whose in (
        (picture.ranks, True, True),
        (picture.ranks, False, True),
        (picture.ranks, False, False),
        ("", False, False),
    ):
        name = shorten(" · ".join(filter(None, (*node, ranks))), 30)
        parts = [[(name, "title")], *_figures(picture, busy, long=long, whose=whose)]
        if cells_in(chain(*parts)) <= width:
            break
    while cells_in(chain(*parts)) > width and len(parts) > 1:
        parts.pop()  # whole: a cut number is another number
    return list(chain(*parts))


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


def _figures(picture: _NodePicture, busy: _Busy, *, long: bool, whose: bool) -> list[_Cells]:
    """Return a node's figures, each with the space before it: load, GPUs, groups of cores, foreign
    processes and ``whose``, memory.
    """
    sample = picture.view.sample
    mean = sum(sample.cores) / len(sample.cores)
    parts: list[_Cells] = [[("  cpu ", "note"), (f"{mean:3.0f} %", "value")]]
    gpus = [gpu.sample for gpu in picture.gpus] if long else []
    parts += [
        [(f"  GPU {gpu.index}", "gpu"), (f" {gpu.busy_percent} %", "label")]
        for gpu in gpus
        if gpu.busy_percent is not None
    ]
    for group, loads in busy:
        mean = sum(loads) / len(loads)
        if long or group.role != "other" or len(busy) == 1 or mean >= 5:
            cores = f" {plural(len(loads), 'core')}" if long else ""
            name = (f"{group.name}{cores}", group.role)
            parts.append([(f"  {group.sign} ", "sign"), name, (f" {mean:.0f} %", "label")])
    for process in picture.view.foreign[: 3 if long else 1]:
        core = "core " if whose else ""
        owner = " of another user" if whose and not process.own else ""
        who = f"{brief_line(process.name, 15)}{owner}"
        parts.append([(f"  ! {who} {process.cores:.1f} cores on {core}{process.cpu}", "full")])
    # File cache gives way, so a node full of it is not full.
    full = sample.memory_used_bytes - sample.file_cache_bytes > 0.94 * sample.memory_total_bytes
    used = memory_of(sample.memory_used_bytes, sample.memory_total_bytes, 0)
    parts.append([("  memory " if long else "  ", "note"), (used, "full" if full else "value")])
    if long:
        parts[-1].append((f", cache {memory(sample.file_cache_bytes, 0)}", "note"))
    return parts


# The hardware of a run or of this host: every NUMA node with its cores, memory and load over time,
# and every GPU.


class NumaPanel(KeptVertical):
    """A title line, the NUMA nodes under each other, a line for each GPU, and what else is to stand
    below them.
    """

    heading = getters.child_by_id("nodes-rule", Rule)
    nodes = getters.query_one("#nodes", NumaNodes)
    gpus = getters.query_one("#gpus", StyledLines)

    def __init__(self, *below: Widget) -> None:
        self._below = below
        """What else the frame surrounds."""
        super().__init__()

    def compose(self) -> ComposeResult:
        yield Rule("NUMA nodes", id="nodes-rule")
        with KeptVertical(classes="frame"):
            yield NumaNodes()
            yield StyledLines(id="gpus")
            yield from self._below

    def show(
        self, shown: Hosts, axis: Axis | None, width: int, cursor: float | None = None
    ) -> None:
        """Show the nodes over ``axis``, and the GPUs, in a panel of ``width`` cells."""
        self.gpus.display = bool(shown.gpus)
        self.gpus.update(run_status.gpu_lines(shown.gpus, self.inner(width)))
        self.show_nodes(shown, axis, cursor)

    def show_nodes(self, shown: Hosts, axis: Axis | None, cursor: float | None = None) -> None:
        """Show the nodes over another axis."""
        self.nodes.show(tuple(_picture(shown, node) for node in shown.nodes), axis, cursor)
        self.heading.update("NUMA", _figure(shown, self.nodes.plot))

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
        self.heading.display = heading
        self.set_class(not heading, "-bare")
        if history != self.nodes.plot_height:
            self.nodes.plot_height = history
            self.nodes.redraw(layout=True)


def _figure(shown: Hosts, plot: NodePlot) -> str:
    cores = sum(len(node.cpus) for node in shown.nodes)
    if not cores:
        return "waiting for the first sample"
    when = ", means while it trained" if shown.averaged else ""
    if shown.inspected is not None:
        sampled = shown.inspected.samples
        when = ", at the cursor" if sampled else ", now: nothing was sampled at the cursor"
    hosts = f" of {plural(shown.count, 'host')}" if shown.count > 1 else ""
    counted = f"{plural(len(shown.nodes), 'node')}{hosts}, {plural(cores, 'core')}"
    signs = ": A Adam, m main, o other" if shown.ranks else ""
    return f"{counted}{when}{_PLOTS[plot][1]}   a cell is a core{signs}"


def rank_name(rank: int, gpu: int | None) -> str:
    """Return ``rank 0 · GPU 0``, or ``rank 0``."""
    return f"rank {rank}" if gpu is None else f"rank {rank} · GPU {gpu}"


def _picture(shown: Hosts, node: NodeView) -> _NodePicture:
    """Join a node's load with the ranks and GPUs that are bound to it."""
    own = set(node.cpus)
    ranks = [
        rank for rank in shown.ranks if own.intersection(rank.cpus) and rank.host in (node.host, "")
    ]
    adam = frozenset(cpu for rank in ranks for cpu in rank.adam_cpus)
    main = frozenset(cpu for rank in ranks for cpu in rank.main_cpus)
    used = {rank.gpu for rank in ranks}
    return _NodePicture(
        node,
        node.host if shown.count > 1 else "",
        " · ".join(rank_name(rank.rank, rank.gpu) for rank in ranks),
        _group_cores(node.cpus, adam, main),
        tuple(gpu for gpu in shown.gpus if gpu.host == node.host and gpu.sample.index in used),
    )
