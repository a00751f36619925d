"""Choose runs whose metrics are laid over those of the run on the dashboard."""

from __future__ import annotations

from collections.abc import Sequence

from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Static

from so_tui.runs import RunDirectory
from so_tui.ui.dialogs.tick_dialog import TickDialog
from so_tui.ui.runlist import RunRow
from so_tui.ui.text import Content, plural, shorten
from so_tui.ui.widgets.entry import Entry
from so_tui.ui.widgets.tick_list import TickList
from so_tui.units import thousands

NAME_CELLS = 34


class ChooseRuns(TickDialog[tuple[RunDirectory, ...], RunDirectory]):
    """Runs with ticks, filtered by name while something is typed."""

    def __init__(self, rows: Sequence[RunRow], chosen: Sequence[RunDirectory]) -> None:
        self._rows = rows
        self._chosen = chosen
        super().__init__()

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static("Lay other runs over the charts", classes="dialog-title")
            yield Entry(placeholder="filter by name", compact=True, id="filter")
            yield TickList[RunDirectory](self._chosen, id="runs")
            yield Static(id="said", classes="dialog-answer")
            yield Static("space or a click ticks, a all that are listed, n none", classes="faint")
            yield from self.buttons("Show them")

    def on_mount(self) -> None:
        if self._rows:
            self.set_focus(self.ticks)

    def list_matching(self, text: str) -> None:
        self.ticks.list_items(
            [(row.run, _line(row)) for row in self._rows if text.lower() in row.run.name.lower()]
        )
        self._tell()

    @on(TickList.Changed)
    def _tell(self) -> None:
        said = (
            f"{plural(len(self.ticks.ticked), 'run')} ticked"
            if self._rows
            else "There is no other run yet."
        )
        self.say(said)

    def action_apply(self) -> None:
        self.dismiss(tuple(self.ticks.ticked))


def _line(row: RunRow) -> Content:
    model = row.spec.model.id if row.spec is not None else ""
    facts = f"{row.shown_state}, step {thousands(row.state.step)}  {shorten(model, 24)}"
    return Content.assemble(
        f"{shorten(row.run.name, NAME_CELLS):<{NAME_CELLS}}  ", (facts, "$faint")
    )
