"""The heading of a chart, and its frame: the upper line holds the heading, and the lower one is the axis. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

LEAST_ROWS_FOR_MORE = 8
"""Rows of a chart from which on a second row of values leaves a plot."""


class Figure(NamedTuple):
    """What stands behind the title of a chart, with the space before it."""

    segments: list[Segment]
    kind: Literal["value", "raw", "note"] = "note"

    @property
    def cells(self) -> int:
        return Segment.get_line_length(self.segments)


class Heading(NamedTuple):
    """The heading of a chart."""

    title: list[Segment]
    beside: list[Segment]
    """Values and notes."""
    below: list[Segment]
    """Values that find no room beside the title."""


def arranged(title: list[Segment], figures: Sequence[Figure], room: int, height: int) -> Heading:
    """Return as many values and notes as fit beside the title; none is cut, since a cut number is another number.

    Args:
        title: The title, and what follows it whatever else there is.
        figures: Values and notes, in their order.
        room: Cells of the title and of what stands beside it, and of the row below.
        height: Rows of the chart.
    """
    free = room - Segment.get_line_length(title)
    if (
        height < LEAST_ROWS_FOR_MORE
        and sum(figure.cells for figure in figures if figure.kind != "note") > free
    ):
        figures = [
            figure for figure in figures if figure.kind != "raw"
        ]  # the least of what a chart says
    beside: list[Segment] = []
    below: list[Segment] = []
    free_below = room
    for figure in figures:
        if figure.cells <= free and (figure.kind == "note" or not below):
            beside += figure.segments
            free -= figure.cells
        elif figure.kind != "note" and figure.cells <= free_below:
            below += figure.segments
            free_below -= figure.cells
    return Heading(title, beside, below)


class ChartFrame(NamedTuple):
    """Makes the rows of a chart of ``width`` cells, with ``inset`` cells of a frame at either side: 1, or 0 without one."""

    width: int
    inset: int
    styles: Mapping[str, Style]

    def upper(self, heading: Heading) -> Strip:
        """Return the row of the heading."""
        line, base = self.styles["frame"], self.styles["base"]
        if not self.inset:
            return Strip([*heading.title, *heading.beside]).adjust_cell_length(self.width, base)
        left = [Segment("╭─ ", line), *heading.title, Segment(" ", line)]
        right = [*heading.beside, Segment(" ─╮", line)] if heading.beside else [Segment("╮", line)]
        between = self.width - Segment.get_line_length([*left, *right])
        if heading.beside:  # its first two cells are blank: one of them belongs to the line
            between += 1
            right[0] = Segment(right[0].text[1:], right[0].style)
        return Strip([*left, Segment("─" * between, line), *right]).adjust_cell_length(
            self.width, base
        )

    def row(self, row: Sequence[Segment]) -> Strip:
        """Return a row between the upper line and the lower one."""
        inside = Strip(row).adjust_cell_length(self.width - 2 * self.inset, self.styles["base"])
        side = Segment("│", self.styles["frame"])
        return Strip([side, *inside, side], self.width) if self.inset else inside

    def lower(self, row: Sequence[Segment], note: str = "") -> Strip:
        """Return the last row; in a frame, its end says ``note``."""
        if not self.inset:
            return self.row(row)
        line = self.styles["frame"]
        inside = Strip(row).adjust_cell_length(self.width - 2, line)
        if note:
            inside = Strip(
                [
                    *inside.crop(0, self.width - 4 - len(note)),
                    Segment(f" {note} ", self.styles["note"]),
                ]
            )
        return Strip([Segment("╰", line), *inside, Segment("╯", line)]).adjust_cell_length(
            self.width, self.styles["base"]
        )
