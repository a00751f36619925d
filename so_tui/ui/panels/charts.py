"""The dashboard's charts: loss, throughput and gradient norm side by side, all over the axis that the screen hands in."""

from __future__ import annotations

from typing import ClassVar

from textual import getters
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal

from so_tui.ui.follow import Snapshot
from so_tui.ui.glyphs import GlyphName
from so_tui.ui.series import Axis
from so_tui.ui.step_series import mean_name
from so_tui.ui.text import rate, reading_text, significant
from so_tui.ui.view import View
from so_tui.ui.widgets import run_lines
from so_tui.ui.widgets.chart import Chart
from so_tui.ui.widgets.drawing import GUTTER, Mark
from so_tui.units import thousands

ROOMY = 52
"""Cells of a chart from which on its heading has room for whole words."""
EVALUATION_CELLS = 17
"""What the newest evaluation takes in a heading."""


class ChartPanel(Horizontal):
    """Draws the metrics of a snapshot. Clicks and wheel turns leave it as ``Chart.CursorMoved`` and ``Chart.Zoomed``."""

    KEYS: ClassVar[tuple[BindingType, ...]] = (Binding("L", "log_scale", "Log y", show=False, id="log-scale", tooltip="Logarithmic loss"),)
    """Keys that act on this panel from anywhere on its screen, which binds them."""

    loss = getters.child_by_id("loss", Chart)
    throughput = getters.child_by_id("throughput", Chart)
    norm = getters.child_by_id("norm", Chart)

    def __init__(self, *, glyphs: GlyphName, id: str | None = None) -> None:
        self._glyphs = glyphs
        super().__init__(id=id)

    def compose(self) -> ComposeResult:
        yield Chart("loss", mark_gaps=True, glyphs=self._glyphs, id="loss")
        yield Chart("throughput", zero=True, glyphs=self._glyphs, id="throughput")
        yield Chart("gradient norm", glyphs=self._glyphs, id="norm")

    @property
    def columns(self) -> int:
        """Columns of the loss chart's plot: the distance that one press of an arrow key moves the cursor."""
        return max(8, self.loss.size.width - GUTTER)

    def set_rows(self, rows: int) -> None:
        """Make the panel ``rows`` high."""
        self.styles.height = rows

    def focus_first(self) -> None:
        """Give the keyboard to the loss chart."""
        self.loss.focus()

    def toggle_log_scale(self) -> None:
        """Switch the loss between a linear and a logarithmic scale."""
        self.loss.log_scale = not self.loss.log_scale
        self.loss.redraw()

    def show(self, snapshot: Snapshot, view: View, axis: Axis | None) -> None:
        """Draw ``snapshot`` over ``axis``, with the cursor of ``view``."""
        marks = [Mark(float(saved.step), saved.time, "◆", "mark") for saved in snapshot.checkpoints]
        marks += [Mark(float(resume.step), resume.time, "↻", "mark") for resume in snapshot.resumes]
        for chart in (self.loss, self.throughput, self.norm):
            chart.waiting = run_lines.waiting_text(snapshot)
        self._show_loss(snapshot, view, axis, marks)
        self._show_throughput(snapshot, view, axis, marks)
        if self.norm.display:
            self._show_norm(snapshot, view, axis, marks)

    def _show_loss(self, snapshot: Snapshot, view: View, axis: Axis | None, marks: list[Mark]) -> None:
        chart = self.loss
        lines = [snapshot.line("loss", "raw", axis), snapshot.mean_line("loss", "main", axis)]
        newest = "now" if snapshot.training else "last"
        names = [newest if view.cursor is None else ".", _mean_name(chart, snapshot)]
        if snapshot.evaluations is not None:
            lines.append(snapshot.evaluations)
            names.append("evaluation" if chart.size.width >= ROOMY else "eval")
        chart.show(
            lines,
            names,
            axis if snapshot.length else None,
            marks=marks,
            cursor=view.cursor,
            notes=view.range_notes,
            alarm=_nan_text(snapshot),
            progress=reading_text(snapshot.unread_share),
        )

    def _show_throughput(self, snapshot: Snapshot, view: View, axis: Axis | None, marks: list[Mark]) -> None:
        chart, latest = self.throughput, snapshot.latest
        roomy = chart.size.width >= ROOMY
        chart.title = "throughput" if roomy else "speed"
        per = "GPU" if snapshot.on_gpus else "rank"
        notes = [f"TFLOPS/{per}"]
        if latest is not None and view.cursor is None:
            tokens = rate(latest.useful_tokens_per_s_total)
            notes = [f"TFLOPS/{per}", f"{tokens} tokens/s"] if roomy else [f"TFLOPS  {tokens} tok/s"]
            if roomy and latest.mfu is not None:
                notes.append(f"MFU {100 * latest.mfu:.1f} %")
        names = ["." if snapshot.training or view.cursor is not None else "last"]
        lines = [snapshot.line("model_tflops_per_gpu", "main", axis)]
        chart.show(lines, names, axis if snapshot.length else None, marks=marks, cursor=view.cursor, notes=notes)

    def _show_norm(self, snapshot: Snapshot, view: View, axis: Axis | None, marks: list[Mark]) -> None:
        latest = snapshot.latest
        notes = [] if latest is None or view.cursor is not None else [f"learning rate {significant(latest.learning_rate)}"]
        lines = [snapshot.line("gradient_norm", "raw", axis), snapshot.mean_line("gradient_norm", "main", axis)]
        self.norm.show(
            lines, [".", _mean_name(self.norm, snapshot)], axis if snapshot.length else None, marks=marks, cursor=view.cursor, notes=notes
        )


def _mean_name(chart: Chart, snapshot: Snapshot) -> str:
    """Return the name of the mean in as many words as leave room for the other values."""
    span = snapshot.whole.span
    room = chart.size.width - (EVALUATION_CELLS if snapshot.evaluations is not None else 0)
    return mean_name(span) if room >= 40 else f"mean of {span}" if room >= 30 else "mean"


def _nan_text(snapshot: Snapshot) -> str:
    """Return how many steps have a loss that is not a number."""
    count = snapshot.series["loss"].missing(snapshot.length)
    return f"{thousands(count)} NaN" if count else ""
