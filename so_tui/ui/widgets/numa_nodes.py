"""NUMA nodes over time (load as mean and band, heat of cores, or memory), one cell per core with Adam and main cores marked, and memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from so_tui.trust.printable import brief_line
from so_tui.ui.glyphs import GlyphName
from so_tui.ui.loads import GpuView, NodeView
from so_tui.ui.printable import DrawsPrintable
from so_tui.ui.series import Axis, Line
from so_tui.ui.text import memory, memory_of, plural, shorten
from so_tui.ui.widgets.core_heat import HeatRow, heat_rows, heat_texts
from so_tui.ui.widgets.drawing import (
    GUTTER,
    RoleStyles,
    axis_row,
    gutter_text,
    joined,
    plot_key,
    plot_rows,
    repaint,
    with_cursor,
)
from so_tui.ui.widgets.heat import CoreGroup, group_cores, heat_cells
from so_tui.ui.widgets.plot import GLYPHS, Scale
from so_tui.units import memory_unit

PERCENT = Scale(0, 100)
NodePlot = Literal["load", "cores", "memory"]
PLOTS: tuple[NodePlot, ...] = get_args(NodePlot)
"""What is drawn of each node over time."""
INDENT = GUTTER
TWO_COLUMNS = 148
"""Cells from which on nodes stand in two columns: a row of 72 cores and most of a heading fit into each."""
GAP = 2
"""Cells between two columns."""
HEAT_ROLES = {"main": "main-core"}
"""Component classes of cores, where they differ from the role of their group: that of lines has the name, too."""


def percent(value: float) -> str:
    """Return ``50 %``."""
    return f"{value:.0f} %"


def giga(value: float) -> str:
    """Return ``100 G``."""
    return f"{value:.0f} G"


@dataclass(frozen=True, slots=True)
class NodePicture:
    """A node with the ranks and GPUs that are bound to it."""

    view: NodeView
    host: str
    """Its host, where the run has several; else empty."""
    ranks: str
    """``rank 0 · GPU 0``; empty where no rank is bound."""
    adam: frozenset[int]
    main: frozenset[int]
    gpus: tuple[GpuView, ...] = ()
    """GPUs attached to this node whose load is drawn."""

    def groups(self) -> tuple[CoreGroup, ...]:
        return group_cores(self.view.sample.cores, self.view.cpus, self.adam, self.main)


def node_rows(nodes: int, width: int) -> int:
    """Return how many nodes stand above each other in ``width`` cells."""
    return math.ceil(nodes / node_columns(nodes, width))


def node_columns(nodes: int, width: int) -> int:
    """Return how many nodes stand beside each other in ``width`` cells."""
    return 2 if nodes > 1 and width >= TWO_COLUMNS else 1


class NumaNodes(DrawsPrintable, can_focus=True):
    """Nodes in one or two columns, each with a heading, ``plot_height`` rows of history and a row of cores, above the x axis."""

    ALLOW_MAXIMIZE = True
    ROLES = (
        "band",
        "main",
        "memory",
        "gpu",
        "axis",
        "label",
        "note",
        "title",
        "value",
        "adam",
        "main-core",
        "other",
        "sign",
        "empty",
        "cursor",
        "stale",
        "full",
    )
    COMPONENT_CLASSES: ClassVar[set[str]] = {f"nodes--{role}" for role in ROLES}
    DEFAULT_CSS = """
    NumaNodes {
        height: auto;
        .nodes--band { color: $raw-line; }
        .nodes--main { color: $adam; }
        .nodes--memory { color: $memory; }
        .nodes--gpu { color: $gpu; }
        .nodes--axis { color: $rule; }
        .nodes--label { color: $faint; }
        .nodes--note { color: $faint; }
        .nodes--title { text-style: bold; }
        .nodes--value { text-style: bold; }
        .nodes--adam { color: $adam; }
        .nodes--main-core { color: $main-core; }
        .nodes--other { color: $other-core; }
        .nodes--sign { color: $faint; }
        .nodes--cursor { color: $warning; }
        .nodes--stale { color: $warning; }
        .nodes--full { color: $warning; text-style: bold; }
        &:focus .nodes--title { color: $accent; text-style: bold underline; }
    }
    """

    def __init__(self, *, glyphs: GlyphName = "braille", id: str | None = None) -> None:
        super().__init__(id=id)
        self.glyphs = glyphs
        self.pictures: tuple[NodePicture, ...] = ()
        self.axis: Axis | None = None
        self.cursor: float | None = None
        self.plot_height = 2
        self.plot: NodePlot = "load"
        self._strips: list[Strip] = []
        self._drawn: tuple[object, ...] = ()
        self._role_styles = RoleStyles("nodes", self.ROLES)
        self._plots: dict[tuple[str, int], tuple[tuple[object, ...], list[list[Segment]]]] = {}

    def show(
        self, pictures: tuple[NodePicture, ...], axis: Axis | None, cursor: float | None = None
    ) -> None:
        """Show new data."""
        rows = len(self.pictures)
        self.pictures, self.axis, self.cursor = pictures, axis, cursor
        if rows != len(pictures) or self._drawn != self._render_key():
            self._drawn = ()
            self.refresh(layout=rows != len(pictures))
            return
        before, self._strips = self._strips, self._draw()
        repaint(self, before, self._strips)

    def _render_key(self) -> tuple[object, ...]:
        """Return what strips depend on besides the data."""
        return (
            self.outer_size,
            self.has_focus,
            self.app.theme,
            self.glyphs,
            self.plot_height,
            self.plot,
        )

    def set_plot_height(self, rows: int) -> None:
        """Set the rows of history of each node."""
        if rows != self.plot_height:
            self.plot_height, self._drawn = rows, ()
            self.refresh(layout=True)

    def get_content_height(self, container: object, viewport: object, width: int) -> int:
        return max(
            1,
            node_rows(len(self.pictures), width) * (2 + self.plot_height)
            + (1 if self.plot_height else 0),
        )

    def notify_style_update(self) -> None:
        self._drawn = ()
        super().notify_style_update()

    def draw_line(self, y: int) -> Strip:
        key = self._render_key()
        if key != self._drawn:
            self._strips, self._drawn = self._draw(), key
        return (
            self._strips[y]
            if y < len(self._strips)
            else Strip.blank(self.size.width, self.rich_style)
        )

    def _draw(self) -> list[Strip]:
        styles = self._role_styles.get(self)
        base = styles["base"]
        if not self.pictures:
            return [
                Strip([Segment("no samples of this host yet", styles["note"])]).adjust_cell_length(
                    self.size.width, base
                )
            ]
        columns = node_columns(len(self.pictures), self.size.width)
        width = (self.size.width - GAP * (columns - 1)) // columns
        plot = self.plot_height
        if self.is_maximized:
            plot = max(
                plot, (self.size.height - 1) // node_rows(len(self.pictures), self.size.width) - 2
            )
        if self.axis is None or width <= GUTTER + 4:
            plot = 0
        blocks = [self._block(picture, width, plot, styles) for picture in self.pictures]
        strips = beside_each_other(blocks, columns, width, self.size.width, base)
        if plot and self.axis is not None:
            corner = f"{self.axis.unit} "[-GUTTER:].rjust(GUTTER)
            axis = [
                Segment(corner, styles["label"]),
                *axis_row(self.axis, width - GUTTER, (), styles),
            ]
            strips += beside_each_other([[axis]] * columns, columns, width, self.size.width, base)
        return strips

    def _block(
        self, picture: NodePicture, width: int, plot: int, styles: dict[str, Style]
    ) -> list[list[Segment]]:
        """Return the rows of one node: its heading, ``plot`` rows of history, and its cores."""
        groups = picture.groups()
        rows = [self._heading(picture, groups, styles, width)]
        if plot:
            plotted = self._plotted(picture, (width - GUTTER, plot), styles)
            rows += [
                [label, *with_cursor(row, self.axis, self.cursor, width - GUTTER, styles["cursor"])]
                for label, *row in plotted
            ]
        cells = self._cores(groups, width - 1)
        indent = min(INDENT, max(1, width - sum(len(text) for text, _ in cells)))
        return [*rows, [Segment(" " * indent, styles["note"]), *joined(cells, styles)]]

    def _plotted(
        self, picture: NodePicture, size: tuple[int, int], styles: dict[str, Style]
    ) -> list[list[Segment]]:
        """Return the plot of a node with its labels, cached while the range does not move."""
        assert self.axis is not None
        view = picture.view
        heat = heat_rows(picture.groups(), size[1]) if self.plot == "cores" and view.cores else []
        lines = (
            (*view.lines(), *(gpu.line() for gpu in picture.gpus))
            if self.plot != "memory"
            else view.memory_lines()
        )
        key = (
            size,
            self.glyphs,
            id(styles),
            self.plot,
            memory_unit(),
            heat,
            *plot_key(lines, self.axis),
        )
        name = (view.host, view.id)
        if self._plots.get(name, ((), []))[0] != key:
            drawn = (
                self._heat(view, heat, size, styles)
                if self.plot == "cores"
                else self._curves(view, lines, size, styles)
            )
            self._plots[name] = (key, drawn)
        return self._plots[name][1]

    def _curves(
        self, view: NodeView, lines: Sequence[Line], size: tuple[int, int], styles: dict[str, Style]
    ) -> list[list[Segment]]:
        """Return load or memory as lines."""
        assert self.axis is not None
        height = size[1]
        in_bytes = self.plot == "memory"
        scale = Scale(0, max(1, view.sample.memory_total_bytes)) if in_bytes else PERCENT
        body = plot_rows(lines, self.axis, scale, size, GLYPHS[self.glyphs], styles)[0]
        per = memory_unit()[0] if in_bytes else 1
        labels = (
            gutter_text(scale, height, giga if in_bytes else percent, per)
            if height > 2
            else [" " * GUTTER] * height
        )
        return [
            [Segment(label, styles["label"]), *row] for label, row in zip(labels, body, strict=True)
        ]

    def _heat(
        self,
        view: NodeView,
        heat: Sequence[HeatRow],
        size: tuple[int, int],
        styles: dict[str, Style],
    ) -> list[list[Segment]]:
        """Return the heat of cores over time."""
        assert self.axis is not None
        width, height = size
        edges = self.axis.indices(view.lines()[1], width)
        texts = heat_texts(heat, view.cores, edges, self.glyphs)
        rows = [
            [
                Segment(row.label, styles["sign"]),
                Segment(text, styles[HEAT_ROLES.get(row.role, row.role)]),
            ]
            for row, text in zip(heat, texts, strict=True)
        ]
        rest = ["" if view.cores else "reading …", *[""] * height][: height - len(rows)]
        return [*rows, *([Segment(" " * GUTTER + text, styles["note"])] for text in rest)]

    def _cores(self, groups: tuple[CoreGroup, ...], width: int) -> list[tuple[str, str]]:
        return [
            (text, HEAT_ROLES.get(role, role))
            for text, role in heat_cells(groups, width, self.glyphs)
        ]

    def _heading(
        self,
        picture: NodePicture,
        groups: tuple[CoreGroup, ...],
        styles: Mapping[str, Style],
        width: int,
    ) -> list[Segment]:
        """Return ``node 0 · rank 0 · GPU 0   cpu 78 %   Adam 65 cores 86 %   main 7 cores 44 %   88 of 117 GiB``, shortened to fit."""
        node = (picture.host, f"node {picture.view.id}")
        for ranks, long, whose in (
            (picture.ranks, True, True),
            (picture.ranks, False, True),
            (picture.ranks, False, False),
            ("", False, False),
        ):
            name = shorten(" · ".join(filter(None, (*node, ranks))), 30)
            parts = [
                [Segment(name, styles["title"])],
                *_figures(picture, groups, styles, long=long, whose=whose),
            ]
            if _cells(parts) <= width:
                break
        while _cells(parts) > width and len(parts) > 1:
            parts.pop()  # whole: a cut number is another number
        return [segment for part in parts for segment in part]


def beside_each_other(
    blocks: Sequence[Sequence[list[Segment]]], columns: int, width: int, whole: int, base: Style
) -> list[Strip]:
    """Return blocks of equally many rows, ``columns`` of them of ``width`` cells beside each other in ``whole`` cells."""
    gap = Strip.blank(GAP, base)
    strips = []
    for at in range(0, len(blocks), columns):
        for rows in zip(*blocks[at : at + columns], strict=True):
            parts = [
                part for row in rows for part in (Strip(row).adjust_cell_length(width, base), gap)
            ]
            strips.append(Strip.join(parts[:-1]).adjust_cell_length(whole, base))
    return strips


def _cells(parts: Iterable[Sequence[Segment]]) -> int:
    return sum(segment.cell_length for part in parts for segment in part)


def _figures(
    picture: NodePicture,
    groups: tuple[CoreGroup, ...],
    styles: Mapping[str, Style],
    *,
    long: bool,
    whose: bool,
) -> list[list[Segment]]:
    """Return a node's figures, each with the space before it: load, GPUs, groups of cores, foreign processes and ``whose``, memory."""
    sample = picture.view.sample
    mean = sum(sample.cores) / len(sample.cores)
    parts = [[Segment("  cpu ", styles["note"]), Segment(f"{mean:3.0f} %", styles["value"])]]
    for gpu in picture.gpus:
        if long and gpu.sample.busy_percent is not None:
            name = Segment(f"GPU {gpu.sample.index}", styles["gpu"])
            parts.append(
                [
                    Segment("  ", styles["note"]),
                    name,
                    Segment(f" {gpu.sample.busy_percent} %", styles["label"]),
                ]
            )
    colours = {"adam": "adam", "main": "main-core", "other": "other"}
    for group in groups:
        if group.role == "other" and len(groups) > 1 and group.mean < 5 and not long:
            continue
        cores = f" {plural(len(group.loads), 'core')}" if long else ""
        name = Segment(f"{group.name}{cores}", styles[colours[group.role]])
        parts.append(
            [
                Segment(f"  {group.sign} ", styles["sign"]),
                name,
                Segment(f" {group.mean:.0f} %", styles["label"]),
            ]
        )
    for process in picture.view.foreign[: 3 if long else 1]:
        where = f" on core {process.cpu}" if whose else f" on {process.cpu}"
        owner = " of another user" if whose and not process.own else ""
        parts.append(
            [
                Segment(
                    f"  ! {brief_line(process.name, 15)}{owner} {process.cores:.1f} cores{where}",
                    styles["full"],
                )
            ]
        )
    # File cache gives way, so a node full of it is not full.
    full = sample.memory_used_bytes - sample.file_cache_bytes > 0.94 * sample.memory_total_bytes
    used = Segment(
        memory_of(sample.memory_used_bytes, sample.memory_total_bytes, 0),
        styles["full" if full else "value"],
    )
    parts.append([Segment("  memory " if long else "  ", styles["note"]), used])
    if long:
        parts[-1].append(Segment(f", cache {memory(sample.file_cache_bytes, 0)}", styles["note"]))
    return parts
