"""Runs: every run, live or past; one is previewed, marked ones are compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from textual import events, getters, on, work
from textual.containers import Container
from textual.widget import Widget
from textual.widgets import DataTable, Static
from textual.worker import get_current_worker

from so_tui.runs import RunDirectory
from so_tui.ui import run_actions
from so_tui.ui.charts.chart import Look
from so_tui.ui.page import FiltersTable, ResizablePage, Size
from so_tui.ui.run_rows import CurveReader, Curves, LossCurve, RunRow
from so_tui.ui.runs.preview import RunPreview, comparison, drawn_looks
from so_tui.ui.runs.table import GROUPS, SORTED_COLUMNS, SORTS, RunTable, ordered
from so_tui.ui.text import Content
from so_tui.ui.widgets import Divider, FindField, keys
from so_tui.units import thousands

EMPTY = (
    "No runs yet. Every run you start is listed here, with its loss, its settings and its "
    "checkpoints.\n\n"
    "Press [$accent]1[/], choose a row, and [$accent]l[/] launches it."
)
BESIDE = 4
"""Cells left and right of the table: its margins, and a scrollbar."""
WIDE = 160
"""Columns of a terminal from which on the chosen run stands beside the list."""
LEAST_LIST, LEAST_ROWS = 70, 12
"""Columns and rows that are left for the list, however large the chosen run is made."""


class RunsScreen(FiltersTable, ResizablePage):
    PAGE = "runs"
    CSS_PATH = "screen.tcss"
    AUTO_FOCUS = "#table"
    HELP_TEXT = (
        "Every run in this folder. Space marks runs: their losses are overlaid, and = compares "
        "them."
    )
    SIZES = ("run", "run_beside")
    BINDINGS = keys("runs")

    table = getters.query_one(RunTable)
    preview = getters.query_one(RunPreview)

    def __init__(self) -> None:
        self._marked: list[RunDirectory] = []
        self._curves: Curves = {}
        self._curve_reader = CurveReader()
        self._progress = ""
        self._exported: dict[RunDirectory, Path] = {}
        """Where something of a run was written last."""
        self._beside = 0
        """Columns of the chosen run beside the list; 0 where it is below."""
        super().__init__()

    def body(self) -> Iterable[Widget]:
        yield Static(Content.from_markup(EMPTY), id="empty")
        yield FindField("show runs whose name, model, state, note or tags contain …", id="filter")
        with Container(id="parts"):
            with RunTable(id="table", cursor_type="row", classes="panel") as table:
                table.border_title = "runs"
            yield Divider()
            yield RunPreview()

    def on_mount(self) -> None:
        self.watch(self.app, "runs", self._listed)
        self.app.theme_changed_signal.subscribe(self, lambda _: self.filtered())

    @property
    def chosen_run(self) -> RunDirectory | None:
        row = self.table.chosen()
        return row.run if row is not None else None

    # The list.

    def on_resize(self) -> None:
        self.sizes_changed()

    # Sizes.

    def sizes_changed(self) -> None:
        sizes, width = self.app.settings.panels, self.size.width
        self._beside = 0
        if self.app.settings.screen.layout == "auto" and width >= WIDE:
            self._beside = min(sizes.run_beside or width * 2 // 5, width - LEAST_LIST)
        self.set_class(bool(self._beside), "-beside")
        self.preview.set_size(self._beside - 1 if self._beside else None, sizes.run)
        self.filtered()

    def size_of(self, panel: Widget | None) -> Size | None:
        """Return the size of what is shown of the chosen run; the list has what it leaves."""
        if self._beside:
            size = Size(
                "run_beside", self._beside, 40, self.size.width - LEAST_LIST, towards=-1, step=4
            )
        else:
            size = Size(
                "run", self.preview.body.size.height, 4, self.size.height - LEAST_ROWS, towards=-1
            )
        return replace(size, step=-size.step) if panel is self.table else size

    @on(events.ScreenResume)
    def _listed(self) -> None:
        if not self.is_current:
            return
        self.filtered()
        curves, shown = self._curves, self.table.shown
        rows = [row for row in shown if row.run not in curves or curves[row.run].outdated(row)]
        reading = any(worker.group == "curve" and worker.is_running for worker in self.workers)
        if rows and not reading:
            self._read_curves(rows)

    @work(thread=True, group="curve", name="read the losses", exit_on_error=False)
    def _read_curves(self, rows: list[RunRow]) -> None:
        """Read the curves, and long ones on until they are whole: nothing else would ask for them
        again while the list stays as it is.
        """
        worker = get_current_worker()
        while rows and self.is_current and not worker.is_cancelled:
            found: dict[RunDirectory, LossCurve] = {}
            for row in rows:
                try:
                    curve = self._curve_reader.read(row)
                except OSError:
                    continue  # deleted meanwhile, or unreadable: its row shows its state
                if curve is not None:
                    found[row.run] = curve
            self.call_later(self._show_curves, found)
            rows = [row for row in rows if row.run in found and found[row.run].unread_share]

    def _show_curves(self, found: Curves) -> None:
        self._curves = {**self._curves, **found}
        self.filtered()

    def filtered(self) -> None:
        """Redraw the table and keep the cursor on its run."""
        wanted, runs = self.filter.needle, self.app.runs
        order = self.app.settings.runs
        rows = [row for row in ordered(runs, self._curves, order) if wanted in row.searched]
        unread = self.app.unread_runs
        self.table.border_title = f"runs, {thousands(unread)} more to be read" if unread else "runs"
        listed = {row.run for row in runs}
        self._marked = [run for run in self._marked if run in listed]
        self.query_one("#empty").display = not runs
        self.query_one("#parts").display = bool(runs)
        looks = drawn_looks(self._marked, self._curves, coloured=not self.app.no_color)
        marks = dict.fromkeys(self._marked, Look("faint", "")) | looks
        self.table.show(rows, self._curves, marks, order, self.size.width - BESIDE - self._beside)
        self._preview()

    # The preview.

    @on(DataTable.RowHighlighted)
    def _preview(self) -> None:
        row = self.table.chosen()
        self.refresh_bindings()
        if row is None:
            self.preview.facts.update("no match; esc clears the filter" if self.app.runs else "")
            return
        self.preview.show(
            row, self._marked, self._curves, self._progress, self._exported.get(row.run)
        )

    # Commands.

    @on(DataTable.RowSelected)
    def _open(self) -> None:
        run = self.chosen_run
        if run is not None:
            self.app.open_run(run)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        row = self.table.chosen()
        if parameters == ("resume",):
            return row is not None and row.state.state in run_actions.RESUMABLE
        if parameters in (("stop",), ("delete",)):
            return row is not None and row.live == (parameters == ("stop",))
        return True

    def action_to_run(self, name: str) -> None:
        if (run := self.chosen_run) is not None:
            run_actions.act(self.app, name, run)

    def action_mark(self) -> None:
        run = self.chosen_run
        if run is None:
            return
        if run in self._marked:
            self._marked.remove(run)
        else:
            self._marked.append(run)
        self.filtered()

    def action_differences(self) -> None:
        if len(self._marked) >= 2:
            self._compare([row for run in self._marked for row in self.app.runs if row.run == run])
        elif (run := self._marked[0] if self._marked else self.chosen_run) is not None:
            run_actions.act(self.app, "differences", run)

    def _compare(self, rows: list[RunRow]) -> None:
        from so_tui.ui.dialogs import Notice

        compared = comparison(rows, {run: curve.results for run, curve in self._curves.items()})
        if compared is None:
            unreadable = " and ".join(row.run.name for row in rows if row.spec is None)
            self.notify(
                f"The settings of {unreadable} cannot be read", severity="error", markup=False
            )
        else:
            title, table = compared
            self.app.push_screen(Notice(title, [table], bad=False))

    def action_export(self) -> None:
        if (row := self.table.chosen()) is not None:
            curves = [
                (self._curves[other].line, other.name)
                for other in self._marked or [row.run]
                if other in self._curves
            ]
            run_actions.ask_to_export(self, row, curves, self._exporting)

    def _exporting(self, run: RunDirectory, progress: str, written: Path | None) -> None:
        self._progress = progress
        if written is not None:
            self._exported[run] = written
        self._preview()

    def action_sort(self) -> None:
        present = SORTS.index(self.app.settings.runs.sort)
        self._keep_order("sort", SORTS[(present + 1) % len(SORTS)], "Sorted by")

    @on(DataTable.HeaderSelected)
    def _sort_by_column(self, event: DataTable.HeaderSelected) -> None:
        """Sort by the column whose heading was clicked, if that is an order of runs."""
        column = self.table.columns_shown[event.column_index]
        for order in [order for order, by in SORTED_COLUMNS.items() if by == column]:
            self._keep_order("sort", order, "Sorted by")

    def action_group(self) -> None:
        present = GROUPS.index(self.app.settings.runs.group)
        self._keep_order("group", GROUPS[(present + 1) % len(GROUPS)], "Grouped by")

    def _keep_order(self, key: str, value: str, text: str) -> None:
        self.app.keep({f"runs.{key}": value})
        self.notify(f"{text} {value}", timeout=2)
        self.filtered()

    def action_scale(self, _: str) -> None:
        """Switch the losses' logarithmic scale on or off."""
        overlay = self.preview.overlay
        overlay.log_scale = not overlay.log_scale
        overlay.redraw()
