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
from so_tui.ui.line_looks import Look, look_of
from so_tui.ui.loss_curve import LossCurve, means_note, progress_text
from so_tui.ui.run_details import facts
from so_tui.ui.runlist import RunRow
from so_tui.ui.series import Axis
from so_tui.ui.text import distinct, plural
from so_tui.ui.widgets.chart import Chart
from so_tui.ui.widgets.rule import Rule

MOST_LINES = 4
"""Runs that are laid over each other: nobody can tell more lines apart."""
LEAST_NAME, LONGEST_NAME = 8, 34
"""Cells of a run's name in the legend."""
VALUE = 12
"""Cells of a value there, with the space between."""


def drawn_looks(
    marked: Sequence[RunDirectory], curves: Mapping[RunDirectory, LossCurve], *, coloured: bool
) -> dict[RunDirectory, Look]:
    """Return how those marked runs look whose losses are drawn: their lines, and their marks in the list."""
    drawn = [run for run in marked if run in curves][:MOST_LINES]
    return {run: look_of(at, coloured=coloured) for at, run in enumerate(drawn)}


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
        alone = {run: Look("main", "") for run in (row.run,) if run in curves}
        looks = drawn_looks(marked, curves, coloured=not self.app.no_color) if marked else alone
        drawn = [(run, curves[run]) for run in looks]
        lines = [
            replace(curve.line, role=looks[run].role, sign=looks[run].sign) for run, curve in drawn
        ]
        room = self.overlay.heading_room // max(1, len(looks)) - VALUE
        names = (
            distinct([run.name for run in looks], min(LONGEST_NAME, max(LEAST_NAME, room)))
            if marked
            else [curve.name for _, curve in drawn]
        )
        axis = None
        if drawn:
            low = min(curve.steps[0] for _, curve in drawn)
            axis = Axis("step", low, max(max(curve.steps[1] for _, curve in drawn), low + 1))
        shown = [curve for _, curve in drawn]
        self.overlay.show(
            lines,
            names,
            axis,
            notes=means_note(shown) if marked else (),
            progress=progress_text(shown),
        )
        own = curves.get(row.run)
        if self._columns:
            self.facts.update(
                facts(row, self._columns - 4, own.results if own is not None else None, exported)
            )
        else:
            self.facts.update(facts(row, self.app.size.width * 2 // 5 - 5, exported=exported))
