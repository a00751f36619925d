"""Presets: what this machine can train, by model and number of GPUs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from textual import getters, on, work
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.message import Message
from textual.reactive import var
from textual.widget import Widget
from textual.widgets import DataTable, Input, Static

from so_tui.ui import launching, slurm
from so_tui.ui.framing import framed
from so_tui.ui.glyphs import shows_ascii
from so_tui.ui.messages import Failed, answer
from so_tui.ui.page import OTHER_MACHINE, Page
from so_tui.ui.panels.preset_table import PresetTable
from so_tui.ui.screens.save_preset import ask_to_delete, is_own
from so_tui.ui.text import Content, plural
from so_tui.ui.widgets import plan_view
from so_tui.ui.widgets.find_field import FindField

if TYPE_CHECKING:
    from so_tui.machine import Machine
    from so_tui.plan.types import Plan, PlanRow

FIRST_VISIT = (
    "First time here? Choose a row: [$accent]enter[/] configures it, [$accent]l[/] launches it. "
    "[b]tiny[/] trains anywhere in about a minute and downloads nothing."
)


class TableReady(Message):
    """The models x GPU counts table was planned."""

    def __init__(self, counts: tuple[int, ...], rows: tuple[PlanRow, ...]) -> None:
        self.counts, self.rows = counts, rows
        super().__init__()


class PresetsScreen(Page):
    PAGE = "presets"
    AUTO_FOCUS = "#table"
    CSS_PATH = "presets.tcss"
    HELP_TEXT = (
        "Each row is a model, each column a number of GPUs. A cell shows whether that fits on this machine, which share of the "
        "optimizer states lives in host memory (the offload ratio; none: all on the GPU), and the predicted tokens per second. "
        "★ marks the recommended number of GPUs."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "l,f5",
            "launch",
            "Launch",
            key_display="l",
            id="launch",
            tooltip="Start this preset on this machine (asks once); F5 does the same",
        ),
        Binding(
            "d", "preview_data", "Data", id="preview-data", tooltip="See its data as the model will"
        ),
        Binding(
            "a",
            "add",
            "Add model",
            id="add",
            tooltip="Make a preset of any model: a hub id or a folder",
        ),
        Binding(
            "D,delete",
            "delete",
            "Delete",
            key_display="D",
            show=False,
            id="delete",
            tooltip="Delete a preset of your own (asks)",
        ),
        OTHER_MACHINE,
        Binding(
            "t",
            "train_tiny",
            "Train tiny",
            show=False,
            id="train-tiny",
            tooltip="Train the embedded tiny model on this machine now",
        ),
        Binding(
            "P",
            "partition",
            "Partition",
            show=False,
            id="partition",
            tooltip="Choose the Slurm partition that a run is submitted to",
        ),
        Binding(
            "slash",
            "find",
            "Filter",
            key_display="/",
            id="find",
            tooltip="Show only models whose name contains a text",
        ),
    ]

    filter = getters.query_one("#filter", FindField)
    table = getters.query_one(PresetTable)
    planned_for: var[Machine | None] = var(None)
    """The machine of ``rows``."""
    rows: var[tuple[PlanRow, ...]] = var(())
    counts: var[tuple[int, ...]] = var(())
    _to_select = ""
    """The preset to select once it is in the table."""
    _added: frozenset[str] = frozenset()
    """Presets that were added on this screen, which are shown wherever they can be trained."""
    _train_tiny_when_planned = False
    _slurm = False
    """Whether jobs can be submitted from here."""

    def body(self) -> Iterable[Widget]:
        yield Static(id="first-visit")
        yield Static(id="about-machine")
        yield Static(id="problems")
        yield FindField("show models whose name contains …", id="filter")
        yield PresetTable(id="table", cursor_type="cell", classes="panel")
        yield Static(id="folded")
        with Vertical(id="chosen", classes="panel") as chosen:
            chosen.border_title = "plan"
            yield Static(id="detail-title", classes="section")
            with VerticalScroll(id="detail-pane"):
                yield Static(id="detail")

    def on_mount(self) -> None:
        self._wait("inspecting this machine and planning every preset for it …")
        self.watch(self.app, "machine", self._machine_known)
        self.watch(self.app, "catalog", self._machine_known, init=False)
        self.watch(self.app, "runs", self._runs_known)
        self.app.theme_changed_signal.subscribe(self, lambda _: self._fill())

    def _runs_known(self) -> None:
        self.query_one("#first-visit", Static).update(Content.from_markup(FIRST_VISIT))
        self.query_one("#first-visit").display = (
            bool(self.rows) and not self.app.runs and not self.query_one("#about-machine").display
        )

    def _machine_known(self) -> None:
        catalog = self.app.catalog
        if self.app.machine is None or catalog is None:
            return
        self._tell_of(self.app.machine)
        problems = self.query_one("#problems", Static)
        problems.display = bool(catalog.problems)
        if catalog.problems:
            more = (
                f"   and {plural(len(catalog.problems) - 1, 'more problem')}"
                if len(catalog.problems) > 1
                else ""
            )
            problems.update(
                Content.assemble(
                    ("✗ one of your presets was ignored: ", "$error"),
                    str(catalog.problems[0]),
                    (more, "$faint"),
                )
            )
        if self.planned_for not in (None, self.app.machine):
            self.rows = ()
            self.table.clear()
            self.refresh_bindings()
            self._wait(f"planning every preset for {self.app.machine.label} …")
        self.planned_for = self.app.machine
        self.plan_all()

    def _wait(self, text: str) -> None:
        """Say what is awaited, where a plan will stand."""
        self.query_one("#detail-title", Static).update(Content.styled(text, "$faint"))
        self.query_one("#detail", Static).update("")

    def _tell_of(self, machine: Machine) -> None:
        """Say what can be done on a machine without a GPU, such as most login nodes; and how to come back from another machine."""
        from so_tui.ui import about_machine

        self._slurm = slurm.has_slurm()
        self.table.border_title = Content.assemble("what fits on ", (machine.label, "bold"))
        told = self.query_one("#about-machine", Static)
        told.display = bool(self.app.machine_file) or not machine.gpus
        width = self.size.width - 4
        if self.app.machine_file:
            told.update(about_machine.elsewhere(machine.label, self.app.machine_file, width))
        elif told.display:
            told.update(about_machine.without_gpu(width, slurm=self._slurm))
        self._runs_known()

    @work(thread=True, exclusive=True, group="plan", name="plan all presets", exit_on_error=False)
    def plan_all(self) -> None:
        """Plan every preset for every GPU count."""
        from so_tui.plan import plan_table, rank_counts
        from so_tui.spec import SoTuiError

        catalog, machine = self.app.catalog, self.app.machine
        assert catalog is not None
        assert machine is not None
        counts = rank_counts(machine)
        try:
            answer(
                self,
                TableReady(counts, plan_table(tuple(catalog.presets.values()), machine, counts)),
            )
        except SoTuiError as error:
            self.app.post_message(
                Failed("The presets could not be planned", tuple(str(error).splitlines()))
            )

    @on(TableReady)
    def _table_ready(self, message: TableReady) -> None:
        self.counts, self.rows = message.counts, message.rows
        self._runs_known()
        self._fill()
        self.refresh_bindings()
        if any(row.preset == self._to_select for row in self._shown_rows()):
            self.table.select(self._to_select)
            self._to_select = ""
        else:
            self.table.start_where_it_fits(on_gpus=bool(self.app.machine and self.app.machine.gpus))
        train_tiny, self._train_tiny_when_planned = self._train_tiny_when_planned, False
        if train_tiny and self.is_current:
            self.action_train_tiny()

    def _shown_rows(self) -> list[PlanRow]:
        """Return the rows that the filter finds; without one, all but those that are folded."""
        if wanted := self.filter.needle:
            return [
                row
                for row in self.rows
                if wanted in row.title.lower() or wanted in row.preset.lower()
            ]
        folded = self._folded_rows()
        return [row for row in self.rows if row not in folded]

    def _folded_rows(self) -> list[PlanRow]:
        """Return the models that this machine cannot train because it has no GPU: one line stands for them."""
        from so_tui.ui.about_machine import trains_without_gpu

        machine = self.app.machine
        if machine is None or machine.gpus or self.app.machine_file or self.filter.needle:
            return []
        return [
            row
            for row in self.rows
            if not trains_without_gpu(row) and row.preset not in self._added
        ]

    def _fill(self) -> None:
        if self.rows:
            self.table.show(
                self._shown_rows(),
                self.counts,
                "GPU" if self.app.machine and self.app.machine.gpus else "rank",
            )
            self._show_folded()

    def _show_folded(self) -> None:
        from so_tui.ui.about_machine import folded

        rows = self._folded_rows()
        line = self.query_one("#folded", Static)
        line.display = bool(rows)
        if rows:
            line.update(folded(rows))

    def on_resize(self) -> None:
        if self.planned_for is not None:
            self._tell_of(self.planned_for)
        self._fill()

    @on(DataTable.CellHighlighted)
    def _show_detail(self) -> None:
        chosen = self.table.chosen()
        if chosen is None:
            if self.rows:
                self.query_one("#detail-title", Static).update("no match; esc clears the filter")
                self.query_one("#detail", Static).update("")
            return
        row, plan = chosen
        noun = "GPU" if plan.on_gpus else "rank"
        title = Content.assemble((row.title, "bold"), (f" on {plural(plan.gpus, noun)}", "$faint"))
        width = max(40, self.size.width - (9 if framed(self) else 7))
        self.query_one("#detail-title", Static).update(plan_view.headline(plan, width, title))
        lines = plan_view.summary(plan, width, plain=shows_ascii(self.app))
        self.query_one("#detail", Static).update(Content("\n").join(lines))

    @on(DataTable.CellSelected)
    def _cell_selected(self) -> None:
        self.action_configure()

    def action_configure(self, field: str = "") -> None:
        """Configure the chosen plan, and go to a field of the form."""
        if self.table.chosen() is not None:
            self.app.switch_mode("configure")
            self._hand_over(field)

    def _hand_over(self, field: str = "", *, keep_edits: bool = False) -> None:
        """Give the page shown now, if it is Configure, the chosen plan."""
        if (chosen := self.table.chosen()) is not None:
            self.app.edit_plan(chosen[0].preset, chosen[1].spec, field, keep_edits=keep_edits)

    def left(self) -> None:
        self._hand_over(keep_edits=True)

    def action_partition(self) -> None:
        self.action_configure("slurm.partition")

    def action_launch(self) -> None:
        chosen = self.table.chosen()
        if chosen is None:
            return
        self._ask_launch(*chosen)

    def _ask_launch(self, row: PlanRow, plan: Plan) -> None:
        if launching.refused_elsewhere(self.app, plan.spec):
            return
        if not plan.fits:
            self.app.post_message(Failed(f"{row.title} does not fit here", plan.reason_texts))
            return
        from so_tui.launch import launch_of
        from so_tui.spec import Refused

        assert self.app.machine is not None
        try:
            launch = launch_of(plan, self.app.machine)
        except Refused as error:
            self.app.post_message(Failed(f"{row.title} cannot run here", error.reasons))
            return
        launching.ask_to_launch(self.app, launch)

    def action_train_tiny(self) -> None:
        row = next((row for row in self.rows if row.preset == "tiny"), None)
        self._train_tiny_when_planned = not self.rows
        if row is not None:
            plan = next((plan for plan in row.cells.values() if plan.recommended), None) or next(
                iter(row.cells.values())
            )
            self._ask_launch(row, plan)

    def action_preview_data(self) -> None:
        if (chosen := self.table.chosen()) is not None:
            from so_tui.ui.dialogs.data_preview import DataPreviewScreen

            self.app.push_screen(DataPreviewScreen(chosen[1].spec))

    def action_add(self) -> None:
        from so_tui.ui.dialogs.add_model import AddModel

        def added(name: str | None) -> None:
            if name:
                self._to_select, self._added = name, self._added | {name}
                self.action_leave_field()
                self.app.reload_presets()

        self.app.push_screen(AddModel(), added)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action in ("launch", "preview_data"):
            return bool(self.rows)
        if action == "partition":
            return self._slurm and bool(self.rows)
        return action != "delete" or is_own(self.app, self.table.preset_at(self.table.cursor_row))

    def action_delete(self) -> None:
        ask_to_delete(self.app, self.table.preset_at(self.table.cursor_row))

    # The filter.

    def action_find(self) -> None:
        self.filter.open()

    @on(Input.Changed, "#filter")
    def _filter_typed(self) -> None:
        self._fill()
        self._show_detail()

    @on(Input.Submitted, "#filter")
    def _filter_submitted(self) -> None:
        self.set_focus(self.table)

    def action_leave_field(self) -> None:
        if self.maximized is not None:
            self.minimize()
        else:
            self.filter.close()
            self.set_focus(self.table)
