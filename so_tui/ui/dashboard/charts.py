"""The dashboard's charts: pages of the metrics that the user chose, in a grid, all over the axis
that the screen hands in.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
from textual.app import ComposeResult
from textual.containers import Container

from so_tui.runs.results import mean_name
from so_tui.ui.chart_metrics import (
    EVALUATIONS,
    ROOMY,
    ChartLayout,
    sampled_lines,
)
from so_tui.ui.charts.chart import Chart, Metric, look_of
from so_tui.ui.charts.drawing import Mark, value_at
from so_tui.ui.charts.series import Axis, Named, View, Wanted, mean_of
from so_tui.ui.dashboard.view import Overlaid
from so_tui.ui.lines import StyledLines
from so_tui.ui.snapshot import Snapshot
from so_tui.ui.text import Content, distinct, faint, in_rows, reading_text, wrapped
from so_tui.ui.textual_fixes import CachedLinesMixin
from so_tui.units import thousands

EVALUATION_CELLS = 17
"""What the newest evaluation takes in a heading."""


class ChartPanel(Container, CachedLinesMixin):
    """Draws the metrics of a snapshot. What the mouse asks of the axis leaves it as messages of
    ``Chart``.
    """

    def __init__(self, layout: ChartLayout) -> None:
        self.chart_layout = layout
        self.on_gpus = True
        """Whether the run has GPUs: if not, other charts stand for theirs."""
        self.instead: tuple[str, ...] = ()
        """Keys of metrics that are shown instead of those that the user chose."""
        self.room = self.app.size.width
        """Columns of the terminal that the charts have, with what surrounds them."""
        self.page = layout.page(0, self.room)
        super().__init__()

    def compose(self) -> ComposeResult:
        self._set_grid()
        yield from map(Chart, self.page.metrics)

    def _set_grid(self) -> None:
        self.styles.grid_size_columns = self.page.columns
        self.styles.grid_size_rows = self.page.rows

    @property
    def charts(self) -> list[Chart]:
        return [child for child in self.children if isinstance(child, Chart)]

    @property
    def wanted_layout(self) -> ChartLayout:
        """What the user wants, for a run such as this one."""
        return self.chart_layout if self.on_gpus else self.chart_layout.without_gpus()

    @property
    def focused(self) -> Chart | None:
        """The chart with the focus, else the first one; None while other charts are being laid
        out.
        """
        charts = self.charts
        return next((chart for chart in charts if chart.has_focus), charts[0] if charts else None)

    @property
    def metric(self) -> Metric:
        """The metric of the chart with the focus."""
        focused = self.focused
        return focused.metric if focused is not None else self.page.metrics[0]

    @property
    def wanted(self) -> Wanted:
        """What the charts of this page need to know of the steps."""
        return self.page.wanted(self.chart_layout.ema)

    @property
    def columns(self) -> int:
        """Columns of a plot: the distance that one press of an arrow key moves the cursor."""
        focused = self.focused
        return max(8, focused.columns) if focused is not None else 8

    def focus_first(self) -> None:
        """Give the keyboard to the first chart."""
        for chart in self.charts[:1]:
            self.screen.set_focus(chart)

    async def change(self, layout: ChartLayout, turned: int = 0) -> None:
        """Show what ``layout`` says, some pages further."""
        self.chart_layout = layout
        shown = self.wanted_layout
        if self.instead:
            shown = msgspec.structs.replace(layout, shown=self.instead)
        page = shown.page(self.page.number + turned, self.room)
        before, self.page = self.page, page
        if before == replace(page, number=before.number, pages=before.pages):
            return
        focused = next((chart.id for chart in self.charts if chart.has_focus), None)
        with self.app.batch_update():
            await self.remove_children()
            self._set_grid()
            await self.mount_all(map(Chart, page.metrics))
        if focused is not None:
            again = [chart for chart in self.charts if chart.id == focused] or self.charts
            self.screen.set_focus(again[0])

    def show(
        self, snapshot: Snapshot, view: View, axis: Axis | None, overlays: tuple[Overlaid, ...] = ()
    ) -> None:
        """Draw ``snapshot`` over ``axis``, with the cursor of ``view``, and other runs over it."""
        self._snapshot, self._view, self._overlays = snapshot, view, overlays
        self._axis = axis if snapshot.length else None
        events = snapshot.events
        marks = [
            *(Mark(float(saved.step), saved.time, "◆", "mark") for saved in events.checkpoints),
            *(Mark(float(resume.step), resume.time, "↻", "mark") for resume in events.resumes),
        ]
        for chart in self.charts:
            first = chart.metric is self.page.metrics[0]
            room = chart.heading_room
            chart.turns = self.page.note if first else ""
            self._show_metric(chart, room, marks)

    @property
    def _beyond_end(self) -> bool:
        """Whether the cursor stands after the last step of the run, where only another run has
        values.
        """
        cursor, whole, length = self._view.cursor, self._snapshot.whole, self._snapshot.length
        if cursor is None or not length or not self._overlays:
            return False
        return cursor > (whole.steps if self._view.unit == "step" else whole.times)[length - 1]

    def _show_metric(self, chart: Chart, room: int, marks: list[Mark]) -> None:
        metric, snapshot, layout = chart.metric, self._snapshot, self.chart_layout
        chart.log_scale, chart.robust = metric.key in layout.log, metric.key in layout.robust
        coloured = not self.app.no_color
        pairs = self._lines(metric, room, coloured=coloured)
        measured = any(line.series.measured(line.length) for line, _ in pairs)
        sampled = all(name in snapshot.hosts.sampled for name in metric.samples[:1])
        known = metric.key == EVALUATIONS or (
            sampled and set(metric.fields) <= snapshot.whole.series.keys()
        )
        chart.waiting = "no step yet" if snapshot.live else "this run completed no step"
        if snapshot.length and not measured:
            chart.waiting = "not measured in this run" if known else "reading …"
            pairs = []
        if self._beyond_end:
            pairs = [(line, "") for line, _ in pairs]
        for at, other in enumerate(self._overlays):
            look = look_of(at, coloured=coloured)
            pairs += [(line, "") for line in other.lines(metric, *look)]
        roomy = room >= ROOMY
        latest = snapshot.latest if self._view.cursor is None else None
        own = metric.notes(latest, snapshot.on_gpus, roomy)
        losses = snapshot.whole.series.get("loss")
        missing = losses.missing if losses is not None else 0
        chart.show(
            pairs,
            self._axis,
            marks=marks,
            marked=snapshot.hosts.sampled.get(metric.marked, ()),
            cursor=self._view.cursor,
            notes=[self._view.range_note, *own] if metric.leads else own,
            alarm=f"{thousands(missing)} NaN" if metric.leads and missing else "",
            progress=reading_text(snapshot.unread_share) if metric.leads else "",
        )

    def _lines(self, metric: Metric, room: int, *, coloured: bool) -> list[Named]:
        """Return the lines of a metric with their names in the heading. Where nothing is
        ``coloured``, parts of a step have signs.
        """
        snapshot, axis, roomy = self._snapshot, self._axis, room >= ROOMY
        crowded = (
            metric.key == "throughput" and not roomy
        )  # MFU says more than that the run has ended
        newest = "." if snapshot.training or self._view.cursor is not None or crowded else "last"
        evaluations = [] if snapshot.evaluations is None else [snapshot.evaluations]
        if metric.key == EVALUATIONS:
            return [(line, newest) for line in evaluations]
        if metric.samples:
            return sampled_lines(
                metric, snapshot.hosts.sampled, alone=not self._overlays, coloured=coloured
            )
        if not set(metric.fields) <= snapshot.whole.series.keys():
            return []
        if metric.roles:
            parts = zip(metric.fields, metric.roles, metric.names, strict=True)
            return [
                (
                    replace(
                        snapshot.line(field, role, axis), sign=look_of(at, coloured=coloured).sign
                    ),
                    name,
                )
                for at, (field, role, name) in enumerate(parts)
            ]
        field = metric.fields[0]
        if metric.leads and snapshot.training and self._view.cursor is None:
            newest = "now"
        smoothed = field in snapshot.whole.means
        pairs = [(snapshot.line(field, "raw" if smoothed else metric.role, axis), newest)]
        if smoothed:
            pairs.append((snapshot.line(mean_of(field), metric.role, axis), self._mean_name(room)))
        if metric.leads:
            pairs += [(line, "evaluation" if roomy else "eval") for line in evaluations]
        return pairs

    def _mean_name(self, room: int) -> str:
        """Return the name of the mean in as many words as leave room for the other values."""
        snapshot, whole = self._snapshot, self._snapshot.whole
        if whole.wanted.ema is not None:
            return mean_name(whole.span, whole.wanted.ema)
        if snapshot.evaluations is not None:
            room -= EVALUATION_CELLS
        return mean_name(whole.span) if room >= 40 else f"mean of {whole.span}"


# The legend of runs that are laid over each other: every one of them, with its value in the chart
# with the focus.


LONGEST_NAME = 34


class RunLegend(StyledLines):
    """As many rows as it takes: no run is left out."""

    room = 20
    """Cells that it has, which is known before it is shown. Its own width is not."""

    def show(
        self,
        snapshot: Snapshot,
        overlays: tuple[Overlaid, ...],
        metric: Metric,
        axis: Axis | None,
        cursor: float | None,
    ) -> None:
        """Name the followed run and those over it, with their newest values, or those at the
        cursor, in lines that fit.
        """
        self.display = bool(overlays)
        if not overlays:
            return
        followed, *others = distinct(
            [snapshot.run.name, *(overlaid.run.name for overlaid in overlays)], LONGEST_NAME
        )
        entries = [Content.assemble(("● ", "$run"), (followed, "bold"))]
        for index, (overlaid, name) in enumerate(zip(overlays, others, strict=True)):
            role, sign = look_of(index, coloured=not self.app.no_color)
            entry = Content.assemble((f"{sign or '●'} ", f"${role}"), name)
            entries.append(entry + faint(f" {_value_text(overlaid, metric, axis, cursor)}"))
        self.update(in_rows(wrapped(entries, self.room)))


def _value_text(overlaid: Overlaid, metric: Metric, axis: Axis | None, cursor: float | None) -> str:
    """Return the value of a run at the cursor, or its newest one; of several lines, the least and
    the greatest.
    """
    if overlaid.more:
        return "reading …"
    lines = overlaid.lines(metric, "main")
    if not lines or axis is None:
        return "not measured"
    if cursor is not None and cursor > overlaid.end[0 if axis.unit == "step" else 1]:
        return "-"
    measured = lines[:1] if metric.fields else lines  # of the parts of a step, the first one
    x = axis.high if cursor is None else cursor
    values = [value for line in measured if (value := value_at(line, axis, x)) is not None]
    per, _ = metric.shown_in
    ends = (min(values), max(values)) if values else ()
    return " to ".join(dict.fromkeys(metric.format_value(end / per) for end in ends)) or "-"
