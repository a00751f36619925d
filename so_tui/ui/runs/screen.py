"""Runs: every run, live or past; one is previewed, marked ones are compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
from so_tui.ui.charts.series import write_picture
from so_tui.ui.messages import is_working
from so_tui.ui.page import FiltersTable, ResizablePage, Size
from so_tui.ui.run_rows import CurveReader, Curves, LossCurve, RunRow
from so_tui.ui.runs.comparison import comparison
from so_tui.ui.runs.preview import RunPreview, drawn_looks
from so_tui.ui.runs.search import search
from so_tui.ui.runs.table import ORDERS, SORTED_COLUMNS, RunTable, ordered
from so_tui.ui.text import Content, shorten
from so_tui.ui.widgets import Divider, FindField, framed, keys
from so_tui.units import plural, thousands

EMPTY = (
    "No runs yet. Every run you start is listed here, with its loss, its settings and its "
    "checkpoints.\n\n"
    "Press [$accent]1[/], choose a row, and [$accent]l[/] launches it."
)
BESIDE, FRAME = 4, 4
"""Cells left and right of the table: its margins and a scrollbar, and those of a frame."""
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
        yield FindField("words, #tag, ratio=0.9, learning_rate=1e-5", id="filter")
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

    # Sizes.

    @on(events.Resize)
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

    # The list.

    @on(events.ScreenResume)
    def _listed(self) -> None:
        if not self.is_current:
            return
        self.filtered()
        curves, shown = self._curves, filter(None, self.table.shown)
        rows = [row for row in shown if row.run not in curves or curves[row.run].outdated(row)]
        if rows and not is_working(self, "curve"):
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
        rows = search(ordered(runs, self._curves, order), wanted)
        unread = self.app.unread_runs
        said = [f"{thousands(unread)} more to be read"] if unread else []
        said += [f"sorted by {order.sort}"] if order.sort != "started" else []
        said += [f"grouped by {order.group}"] if order.group != "none" else []
        if wanted:
            said.append(
                f"{plural(len(rows), 'run') if rows else 'no match'} for {shorten(wanted, 30)}"
            )
        self.table.border_title = Content(", ".join(("runs", *said)))
        listed = {row.run for row in runs}
        self._marked = [run for run in self._marked if run in listed]
        self.query_one("#empty").display = not runs
        self.query_one("#parts").display = bool(runs)
        looks = drawn_looks(self._marked, self._curves, coloured=not self.app.no_color)
        marks = dict.fromkeys(self._marked, Look("faint", "")) | looks
        room = self.size.width - self._beside - BESIDE - FRAME * framed(self.table)
        self.table.show(rows, self._curves, marks, order, room)
        self._preview()

    # The preview.

    @on(DataTable.RowHighlighted)
    def _preview(self) -> None:
        row = self.table.chosen()
        self.refresh_bindings()
        if row is None:
            self.preview.show_nothing("no match; esc clears the filter" if self.app.runs else "")
        else:
            self.preview.show(
                row, self._marked, self._curves, self._progress, self._exported.get(row.run)
            )

    # Commands.

    @on(DataTable.RowSelected)
    def _open(self) -> None:
        if (run := self.chosen_run) is not None:
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
        if (run := self.chosen_run) is not None:
            others = [marked for marked in self._marked if marked != run]
            self._marked = others if run in self._marked else [*others, run]
            self.filtered()

    def action_differences(self) -> None:
        if len(self._marked) >= 2:
            self._compare([row for run in self._marked for row in self.app.runs if row.run == run])
        elif (run := self._marked[0] if self._marked else self.chosen_run) is not None:
            run_actions.act(self.app, "differences", run)

    def _compare(self, rows: list[RunRow]) -> None:
        from so_tui.ui.dialogs import Notice

        unreadable = " and ".join(row.run.name for row in rows if row.spec is None)
        if unreadable:
            self.notify(
                f"The settings of {unreadable} cannot be read", severity="error", markup=False
            )
        else:
            results = {run: curve.results for run, curve in self._curves.items()}
            looks = drawn_looks(self._marked, self._curves, coloured=not self.app.no_color)
            title, table = comparison(rows, results, looks, self.app.settings.runs.sort)
            self.app.push_screen(Notice(title, [table], bad=False))

    def action_export(self) -> None:
        if (row := self.table.chosen()) is None:
            return
        curves = [
            (self._curves[other].line, other.name)
            for other in self._marked or [row.run]
            if other in self._curves
        ]
        log, picture = self.preview.overlay.log_scale, run_actions.PICTURE
        charts = run_actions.ChartExport(
            choices=[(f"{row.run.name}{picture}", "the chart as shown")],
            takes=lambda path: path.suffix == picture,
            write=lambda path: write_picture(path, "loss", curves, log=log),
        )
        run_actions.export(self, row.run, charts, self._exporting)

    def _exporting(self, run: RunDirectory, progress: str, written: Path | None) -> None:
        self._progress = progress
        if written is not None:
            self._exported[run] = written
        self._preview()

    def action_order(self, setting: str) -> None:
        """Sort or group by what comes next."""
        choices = ORDERS[setting]
        present = choices.index(getattr(self.app.settings.runs, setting))
        self._keep({"reverse": False, setting: choices[(present + 1) % len(choices)]})

    @on(DataTable.HeaderSelected)
    def _sort_by_column(self, event: DataTable.HeaderSelected) -> None:
        """Sort by the column whose heading was clicked, if that is an order of runs; a second click
        reverses.
        """
        column = self.table.columns_shown[event.column_index]
        before = self.app.settings.runs
        for order in [order for order, by in SORTED_COLUMNS.items() if by == column]:
            again = order == before.sort and not before.reverse
            self._keep({"sort": order, "reverse": again})

    def _keep(self, order: Mapping[str, object]) -> None:
        """Show and remember another order; the title of the table says which."""
        self.app.keep({f"runs.{name}": value for name, value in order.items()})
        self.filtered()

    def action_scale(self, _: str) -> None:
        """Switch the losses' logarithmic scale on or off."""
        overlay = self.preview.overlay
        overlay.log_scale = not overlay.log_scale
        overlay.redraw()
