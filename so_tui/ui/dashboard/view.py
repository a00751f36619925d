"""What the dashboard shows where: the axis that its charts share, runs that are laid over another,
and the rows and columns of its panels. Pure.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from so_tui.runs import RunDirectory
from so_tui.ui.chart_metrics import EVALUATIONS
from so_tui.ui.charts.chart import Metric
from so_tui.ui.charts.series import Axis, Line, Span, StepSeries, Unit, View, interpolated
from so_tui.ui.snapshot import Snapshot

# Another run whose metrics are laid over those of the run that is followed.


@dataclass(frozen=True, slots=True)
class Overlaid:
    """What is known of another run."""

    run: RunDirectory
    steps: StepSeries
    times: array[float]
    """When its rows would be if it had begun with the followed run."""
    more: bool
    """Whether some of it is still to be read."""
    evaluations: list[Line]
    """Loss on held-out data; none without evaluations."""
    sampled: Mapping[str, tuple[Line, ...]]
    """Numbers of the samples by name, a line for each GPU, node or host."""

    def lines(self, metric: Metric, role: str, sign: str = "") -> list[Line]:
        """Return the lines of a metric of which there is any value. They look alike: they are the
        run's.
        """
        found = self.evaluations if metric.key == EVALUATIONS else []
        found = [*found, *(line for name in metric.samples for line in self.sampled.get(name, ()))]
        # Fields that have been read, and their means where there are any.
        names = (self.steps.means.get(field, field) for field in metric.fields)
        found += [
            replace(self.steps.line(name, role, len(self.times)), times=self.times)
            for name in names
            if name in self.steps.series
        ]
        return [
            replace(line, role=role, sign=sign)
            for line in found
            if line.series.measured(line.length)
        ]

    @property
    def end(self) -> Span:
        """Its last step, and when that would be; zeros before the first."""
        rows = len(self.times)
        return (self.steps.steps[rows - 1], self.times[-1]) if rows else (0.0, 0.0)


def steps_at(times: Sequence[float], length: int, series: StepSeries) -> array[float]:
    """Return at which step of a run each of the first times is: between two steps, and infinite
    before the first and after the last.
    """
    rows = len(series)
    steps = array("d", series.begin[:1]) + series.steps[:rows]
    known = array("d", series.begin[1:]) + series.times[:rows]
    found = array("d")
    for time_s in times[:length]:
        step = interpolated(known, steps, rows + 1, time_s)
        if not known[0] <= time_s <= known[-1]:
            step = -math.inf if time_s < known[0] else math.inf
        found.append(max(step, found[-1]) if found else step)
    return found


def extent_of(snapshot: Snapshot, unit: Unit, overlays: Sequence[Overlaid] = ()) -> Span | None:
    """Return the first and last position of a run and those laid over it; None before there is
    anything to draw.
    """
    at = 0 if unit == "step" else 1
    ranges: list[Span] = []
    if snapshot.length:
        positions = snapshot.whole.times if at else snapshot.whole.steps
        ranges.append((snapshot.whole.begin[at], positions[snapshot.length - 1]))
    if unit == "time":
        loads = (node.load[0] for node in snapshot.hosts.nodes)
        ranges += [(load.times[0], load.times[load.length - 1]) for load in loads]
    if not ranges:
        return None
    low = min(start for start, _ in ranges)
    high = max([*(end for _, end in ranges), *(overlaid.end[at] for overlaid in overlays)])
    return (low, high) if high > low else (low, low + 1)


HELD_SHARE = 1 / 90
"""The right end of a growing axis moves in steps of about a dot: below that, a redrawn plot would
look the same.
"""


def axis_of(
    snapshot: Snapshot, view: View, held: Axis | None = None, overlays: Sequence[Overlaid] = ()
) -> Axis | None:
    """Return the axis that all charts of a snapshot share; before the first step it is time.
    ``held`` is the present axis.
    """
    unit: Unit = view.unit if snapshot.length else "time"
    extent = extent_of(snapshot, unit, overlays)
    if extent is None:
        return None
    low, high = view.resolved(extent) if unit == view.unit else extent
    origin = extent[0] if unit == "time" else 0.0
    same = held is not None and (held.unit, held.origin) == (unit, origin)
    if held is not None and same and snapshot.live and held.steps is snapshot.whole.steps:
        grown = high - held.high
        begun = bool(held.length) == bool(snapshot.length)
        if begun and abs(low - held.low) <= grown < HELD_SHARE * (high - low):
            low, high = held.low, held.high
    return Axis(
        unit, low, high, origin, snapshot.whole.steps, snapshot.whole.times, snapshot.length
    )


SIDE_FROM = 196
"""Columns of a terminal from which on a step's details and the log stand right of everything
else.
"""
SIDE = 68
"""Columns that they take: a line of the log fits."""
LEAST_MAIN = 100
"""Columns that are left for the rest, however wide they are made."""
LEAST_CHARTS = 6
"""Rows of the charts, however little room there is."""
MOST_PLOT = 8
"""Rows of history of each node, unless more are chosen."""


def side_columns(width: int, chosen: int | None = None) -> int:
    """Return the columns of the panels at the right of a terminal of ``width``; 0 where there is no
    room for them.
    """
    return 0 if width < SIDE_FROM else min(chosen or SIDE, width - LEAST_MAIN)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of each part of the dashboard."""

    charts: int
    plot: int
    """Rows of history of each node."""
    log: int

    def resized(self, nodes: int, charts: int | None, plot: int | None) -> Rows:
        """Return rows with those of charts and history that are given; what is left goes to the
        history, then to the log.
        """
        total = self.charts + _plot_rows(self.plot, nodes) + self.log
        if charts is None:
            charts = self.charts
            if plot is not None and not self.log:
                charts = max(LEAST_CHARTS, total - _plot_rows(plot, nodes))
        elif plot is None:
            most = self.plot if self.log else MOST_PLOT
            plot = max(0, min(most, (total - 1 - charts) // max(1, nodes)))
        plot = self.plot if plot is None else plot
        left = total - charts - _plot_rows(plot, nodes)
        return Rows(charts, plot, max(2, left) if self.log else 0)


def _plot_rows(plot: int, nodes: int) -> int:
    """Return the rows of the history of all nodes with its axis."""
    return plot * nodes + (1 if plot and nodes else 0)


def rows_for(height: int, nodes: int, fixed: int, grid: int = 0, *, log: bool = True) -> Rows:
    """Divide ``height`` rows: charts first, then some log, then history of each node; ``fixed``
    rows are taken already.

    Charts that stand above each other get ``grid`` rows at least. Without ``log``, which then has a
    place of its own, the history gets its rows. Parts that do not fit even so are reached by
    scrolling.
    """
    left = height - fixed
    if not log:
        plot = max(0, min(MOST_PLOT, (left - 1 - max(grid, 12, height // 3)) // max(1, nodes)))
        return Rows(max(LEAST_CHARTS, left - _plot_rows(plot, nodes)), plot, 0)
    if grid:
        charts = max(grid, min(height - fixed, left - 4))
        return Rows(charts, 0, max(2, left - charts))
    for plot, least_charts, least_log in (
        (4, 14, height // 6),
        (3, 14, 5),
        (0, 9, 4),
    ):
        rest = left - _plot_rows(plot, nodes)
        charts = rest - max(4, least_log)
        if charts >= least_charts:
            charts = min(charts, max(16, height * 2 // 5))
            break
    else:
        charts = max(LEAST_CHARTS, min(9, rest - 4))
    return Rows(charts, plot, max(2, rest - charts))
