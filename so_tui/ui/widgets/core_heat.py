"""Heat of cores over time: rows are cores, folded to fit, columns are time. Pure data in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

from so_tui.ui.glyphs import GlyphName
from so_tui.ui.widgets.bars import cells_of
from so_tui.ui.widgets.drawing import GUTTER
from so_tui.ui.widgets.heat import CoreGroup, level

_SAMPLES_A_COLUMN = 4
"""Samples that are averaged of a column, spread over it: more cost time and look the same."""


@dataclass(frozen=True, slots=True)
class HeatRow:
    """Neighbouring cores that do one thing, shown as one row."""

    sign: str
    role: str
    first_cpu: int
    positions: tuple[int, ...]
    """Where the cores stand among those of the node."""

    @property
    def label(self) -> str:
        """``A 216``: what the cores do, and the first of them."""
        return f"{self.sign}{self.first_cpu:>{GUTTER - 2}} "


def heat_rows(groups: Sequence[CoreGroup], height: int) -> list[HeatRow]:
    """Fold the cores of a node into at most ``height`` rows, a group's cores among themselves, as far as each group gets a row."""
    shown = groups[:height]
    counts = cells_of(
        [len(group.positions) for group in shown],
        min(height, sum(len(group.positions) for group in shown)),
    )
    rows: list[HeatRow] = []
    for group, count in zip(shown, counts, strict=True):
        edges = [index * len(group.positions) // count for index in range(count + 1)]
        rows += [
            HeatRow(group.sign, group.role, group.cpus[first], group.positions[first:last])
            for first, last in pairwise(edges)
        ]
    return rows


def heat_texts(
    rows: Sequence[HeatRow], history: Sequence[bytes], edges: Sequence[int], glyphs: GlyphName
) -> list[str]:
    """Return a text for each row, a character for each column.

    Args:
        history: Loads of all cores of the node in percent, a sample each.
        edges: Borders of the columns as indices into ``history``. A column without a sample shows the one before, if another follows.
    """
    columns = [_sampled(history, start, stop) for start, stop in pairwise(edges)]
    return [
        "".join(
            " " if not column else level(_mean(column, row.positions), glyphs) for column in columns
        )
        for row in rows
    ]


def _mean(column: Sequence[bytes], positions: tuple[int, ...]) -> float:
    """Return the mean load of some cores over some samples."""
    if len(positions) == 1:
        return sum(loads[positions[0]] for loads in column) / len(column)
    pick = itemgetter(*positions)
    return sum(sum(pick(loads)) for loads in column) / (len(column) * len(positions))


def _sampled(history: Sequence[bytes], start: int, stop: int) -> Sequence[bytes]:
    if stop > start:
        return history[start : stop : -(-(stop - start) // _SAMPLES_A_COLUMN)]
    return history[start - 1 : start] if 0 < start < len(history) else ()
