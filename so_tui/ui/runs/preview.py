"""What the list of runs shows of the chosen run, or of the marked ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.cells import cell_len
from textual import getters
from textual.app import ComposeResult
from textual.containers import Container, Vertical
from textual.widgets import Static

from so_tui.runs import RunDirectory
from so_tui.runs.results import RESULTS, RunResults, mean_name, result_text
from so_tui.trust.text import brief_message
from so_tui.ui.charts.chart import Chart, Look, Metric, look_of
from so_tui.ui.charts.series import Axis
from so_tui.ui.lines import Pieces
from so_tui.ui.run_rows import Curves, LossCurve, RunRow
from so_tui.ui.run_status import state_piece
from so_tui.ui.text import (
    Content,
    distinct,
    in_rows,
    reading_text,
    shorten,
    shorten_path,
)
from so_tui.ui.widgets import BOTTOM, Rule, framed
from so_tui.units import plural, thousands

RESULT = 14
"""Cells of a result where two stand beside each other."""


def _facts(
    row: RunRow, width: int, results: RunResults | None = None, exported: Path | None = None
) -> Content:
    """Return state and reason, model, checkpoints and the last export of a run, and results where
    they are given, for ``width`` cells.
    """
    state = row.state
    lines: list[Pieces] = [[state_piece(row.shown_state)]]
    if state.reason:
        style = "$error" if state.state in ("failed", "lost") else "$warning"
        lines.append([(brief_message(state.reason), style)])
    saved, spec = state.saved_step, row.spec
    checkpoint = "no checkpoint" if saved is None else f"checkpoint of step {thousands(saved)}"
    named = (
        ("next: ", brief_message(state.suggestion)),
        ("", brief_message(state.detail) if row.live else ""),
        ("trains ", f"{spec.model.id} with {spec.offload.mode}" if spec is not None else ""),
        ("on ", _data_text(row.sources, width - 3)),
        ("saved ", f"{checkpoint}, {plural(state.attempt, 'attempt')}"),
    )
    lines += [[(name, "$faint"), text] for name, text in named if text]
    if row.notes.note or row.notes.tags:
        tags = " ".join(f"#{tag}" for tag in row.notes.tags)
        note = brief_message(row.notes.note)
        lines.append([("note ", "$faint"), f"{note} ", (tags, "$accent")])
    lines.append(_place("folder", row.run.path, width))
    if exported is not None:
        lines.append(_place("exported", exported, width))
    texts = {name: result_text(results or RunResults(), key) for key, name in RESULTS.items()}
    measured: list[Pieces] = [
        [(f"{name:<16}", "$faint"), f"{text:<{RESULT}}"] for name, text in texts.items() if text
    ]
    rows = -(-len(measured) // (2 if width >= 2 * (16 + RESULT) else 1))
    lines += [[]] * bool(measured)
    lines += [[piece for each in measured[at::rows] for piece in each] for at in range(rows)]
    return in_rows(Content.assemble(*line) for line in lines)


def _data_text(sources: Sequence[str], width: int) -> str:
    """Return what a run trains on: its source, or those of a mixture."""
    if len(sources) == 1:
        return shorten_path(sources[0], width)
    return shorten(", ".join(source.rpartition("/")[2] for source in sources), width)


def _place(name: str, path: Path, width: int) -> Pieces:
    """Return a path behind its name, or below it where the path's own name has no room beside
    it.
    """
    below = len(name) + 1 + len("…/") + cell_len(path.name) > width
    room = width - (2 if below else len(name) + 1)
    before = f"{name}\n  " if below else f"{name} "
    return [(before, "$faint"), shorten_path(str(path), max(18, room))]


# What the list of runs shows of the chosen run, or of the marked ones: their losses over each
# other, and the facts.


MOST_LINES = 4
"""Runs that are laid over each other: nobody can tell more lines apart."""
LEAST_NAME, LONGEST_NAME = 8, 34
"""Cells of a run's name in the legend."""
VALUE = 12
"""Cells of a value there, with the space between."""


def drawn_looks(
    marked: Sequence[RunDirectory], curves: Curves, *, coloured: bool
) -> dict[RunDirectory, Look]:
    """Return how those marked runs look whose losses are drawn: their lines, and their marks in the
    list.
    """
    drawn = [run for run in marked if run in curves][:MOST_LINES]
    return {run: look_of(at, coloured=coloured) for at, run in enumerate(drawn)}


def _means_note(curves: Sequence[LossCurve]) -> tuple[str, ...]:
    """Return what the values of overlaid curves are, for the heading of their chart."""
    spans = sorted({curve.span for curve in curves})
    if len(spans) < 2:
        return tuple(map(mean_name, spans))
    return (f"means of {spans[0]} to {spans[-1]} steps",)


LOSS = Metric("overlay", "loss", "of runs over each other")


class RunPreview(Vertical):
    """Beside each other below the list; where it stands beside the list, the facts are below the
    losses, with the results.
    """

    heading = getters.query_one("#preview-rule", Rule)
    body = getters.query_one("#preview", Container)
    overlay = getters.query_one("#overlay", Chart)
    facts = getters.query_one("#facts", Static)

    def __init__(self) -> None:
        self._columns: int | None = None
        super().__init__()

    def compose(self) -> ComposeResult:
        yield Rule(id="preview-rule")
        with Container(id="preview", classes="frame"):
            yield Chart(LOSS, boxed=False)
            yield Static(id="facts")

    def set_size(self, columns: int | None, rows: int | None) -> None:
        """Take ``columns`` beside the list; None stands it below, with ``rows`` for losses and
        facts where they are given.
        """
        self._columns = columns
        self.styles.width = columns or "100%"
        frame = BOTTOM if framed(self) else 0
        self.body.styles.height = "1fr" if columns else rows and rows + frame

    def show_nothing(self, why: str) -> None:
        """Show why there is no run."""
        self.heading.update("")
        self.overlay.waiting = ""
        self.overlay.show([], None)
        self.facts.update(why)

    def show(
        self,
        row: RunRow,
        marked: Sequence[RunDirectory],
        curves: Curves,
        progress: str,
        exported: Path | None = None,
    ) -> None:
        """Show the facts of a run, and its losses or those of the marked runs; ``progress`` is that
        of an export, ``exported`` the last.
        """
        title = f"{plural(len(marked), 'marked run')}, losses overlaid" if marked else row.run.name
        self.heading.update(title, progress)
        own = curves.get(row.run)
        self.overlay.waiting = "no step yet"
        if marked:
            looks = drawn_looks(marked, curves, coloured=not self.app.no_color)
            room = self.overlay.heading_room // max(1, len(looks)) - VALUE
            most = min(LONGEST_NAME, max(LEAST_NAME, room))
            names = distinct([run.name for run in looks], most)
        else:
            looks = {row.run: Look("main", "")} if own is not None else {}
            names = [mean_name(own.span)] if own is not None else []
        shown = [curves[run] for run in looks]
        lines = [
            replace(curve.line, role=look.role, sign=look.sign)
            for curve, look in zip(shown, looks.values(), strict=True)
        ]
        axis = None
        if shown:
            low = min(curve.steps[0] for curve in shown)
            axis = Axis("step", low, max(low + 1, *(curve.steps[1] for curve in shown)))
        self.overlay.show(
            list(zip(lines, names, strict=True)),
            axis,
            notes=_means_note(shown) if marked else (),
            progress=reading_text(max((curve.unread_share for curve in shown), default=0.0)),
        )
        results = own.results if own is not None else None
        width = (self._columns or self.app.size.width * 2 // 5 - 1) - 4
        self.facts.update(_facts(row, width, results, exported))
