"""What the list of runs shows of the chosen run, or of the marked ones: their losses over each other, and the facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from textual import getters
from textual.app import ComposeResult
from textual.containers import Container, Vertical
from textual.widgets import Static

from so_tui.runs import RunDirectory
from so_tui.ui.framing import BOTTOM, framed
from so_tui.ui.glyphs import GlyphName
from so_tui.ui.loss_curve import LossCurve, means_note, progress_text
from so_tui.ui.run_details import facts
from so_tui.ui.runlist import RunRow
from so_tui.ui.series import Axis
from so_tui.ui.text import plural, shorten
from so_tui.ui.widgets.chart import Chart
from so_tui.ui.widgets.rule import Rule

ROLES = ("main", "second", "third", "fourth")
"""Chart roles of overlaid runs: nobody can tell more than four lines apart."""


class RunPreview(Vertical):
    """Beside each other below the list; where it stands beside the list, the facts are below the losses, with the results."""

    heading = getters.query_one("#preview-rule", Rule)
    body = getters.query_one("#preview", Container)
    overlay = getters.query_one("#overlay", Chart)
    facts = getters.query_one("#facts", Static)

    def __init__(self, *, glyphs: GlyphName) -> None:
        self._glyphs = glyphs
        self._columns: int | None = None
        super().__init__()

    def compose(self) -> ComposeResult:
        yield Rule(id="preview-rule")
        with Container(id="preview", classes="frame"):
            yield Chart("loss", glyphs=self._glyphs, boxed=False, id="overlay")
            yield Static(id="facts")

    def on_mount(self) -> None:
        self.overlay.waiting = "no step yet"

    def set_size(self, columns: int | None, rows: int | None) -> None:
        """Take ``columns`` beside the list; None stands it below, with ``rows`` for losses and facts where they are given."""
        self._columns = columns
        self.styles.width = columns or "100%"
        frame = BOTTOM if framed(self) else 0
        self.body.styles.height = "1fr" if columns else rows and rows + frame

    @property
    def rows(self) -> int:
        """Rows of losses and facts."""
        return self.body.size.height

    def clear(self, text: str) -> None:
        """Say why no run is shown."""
        self.facts.update(text)

    def toggle_log_scale(self) -> None:
        """Switch the losses' logarithmic scale on or off."""
        self.overlay.log_scale = not self.overlay.log_scale
        self.overlay.redraw()

    def show(
        self,
        row: RunRow,
        marked: Sequence[RunDirectory],
        curves: Mapping[RunDirectory, LossCurve],
        progress: str,
        exported: Path | None = None,
    ) -> None:
        """Show the facts of a run, and its losses or those of the marked runs; ``progress`` is that of an export, ``exported`` the last."""
        title = f"{plural(len(marked), 'marked run')}, losses overlaid" if marked else row.run.name
        self.heading.update(title, progress)
        drawn = [(run, curves[run]) for run in marked or [row.run] if run in curves][: len(ROLES)]
        lines = [replace(curve.line, role=ROLES[index]) for index, (_, curve) in enumerate(drawn)]
        names = [shorten(run.name, 20) if marked else curve.name for run, curve in drawn]
        axis = None
        if drawn:
            low = min(curve.steps[0] for _, curve in drawn)
            axis = Axis("step", low, max(max(curve.steps[1] for _, curve in drawn), low + 1))
        shown = [curve for _, curve in drawn]
        self.overlay.show(lines, names, axis, notes=means_note(shown) if marked else (), progress=progress_text(shown))
        own = curves.get(row.run)
        if self._columns:
            self.facts.update(facts(row, self._columns - 4, own.results if own is not None else None, exported))
        else:
            self.facts.update(facts(row, self.app.size.width * 2 // 5 - 5, exported=exported))
