"""Presets: what this machine can train, by model and number of GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from textual import getters, on, work
from textual.containers import Container, Vertical, VerticalScroll
from textual.widget import Widget
from textual.widgets import DataTable, Input, Static
from textual.worker import get_current_worker

from so_tui.ui import plan_view, preset_actions
from so_tui.ui.messages import Failed, answer, failure, reporting
from so_tui.ui.page import FiltersTable
from so_tui.ui.presets.table import PresetTable, best_plan
from so_tui.ui.text import Content, faint, in_rows, shows_ascii
from so_tui.ui.widgets import FindField, framed, keys
from so_tui.units import plural

if TYPE_CHECKING:
    from so_tui.machine import Machine
    from so_tui.plan.plan import Plan, PlanRow
    from so_tui.spec import Catalog, Preset


# What Presets says of the machine that it plans for: what it is, what can be done there, and how
# good the figures are. Pure functions.


MOST_PARAMETERS_WITHOUT_GPU = 1_000_000_000
"""What fits in the memory of a machine without a GPU and has more takes many minutes a step
there.
"""
PUBLISHED = "published figures, not measured"
_SOURCE_FROM_CELLS = 100
"""Cells from which a line also names its source."""


def _without_gpu(width: int, *, slurm: bool) -> Content:
    """Return what can be done on a machine without a GPU, such as most login nodes, a line each.

    Args:
        width: Cells of a line; details that do not fit are left out.
        slurm: Whether jobs can be submitted from here.
    """
    from so_tui.machine.known import MACHINES

    tiny, known = "about a minute, downloads nothing", ", ".join(list(MACHINES)[:3])
    others = f"{known} and others, or a file that describes one"
    there = "Configure plans for its nodes and submits there"
    commands = [
        ("t", "[@click=screen.train_tiny]train tiny here, now[/]", tiny),
        ("o", "[@click=app.other_machine]plan for another machine[/]", others),
        ("P", "[@click=screen.configure('slurm.partition')]choose a Slurm partition[/]", there),
    ]
    lines = [Content.styled("This machine has no GPU.", "bold")]
    for key, command, details in commands if slurm else commands[:2]:
        line = Content.assemble((f"{key}  ", "$accent"), Content.from_markup(command))
        if line.cell_length + len(details) + 3 <= width:
            line += faint(f"   {details}")
        lines.append(line)
    return in_rows(lines)


def _elsewhere(label: str, machine_file: str, width: int) -> Content:
    """Return for which other machine is planned and, of one that is known by name, where its
    figures come from.

    Args:
        label: What the machine is called.
        machine_file: Its name in ``MACHINES``, or the file that describes it.
        width: Cells of a line; a narrow one leaves the source out.
    """
    from so_tui.machine.known import MACHINES

    described, line = MACHINES.get(machine_file), Content.assemble("Plans for ", (label, "bold"))
    if described is not None:
        source = f": {described.source}" if width >= _SOURCE_FROM_CELLS else ""
        line += Content.assemble(", ", (PUBLISHED, "$warning"), source)
    return line + Content.from_markup(". [@click=app.other_machine]o changes it[/].")


BESIDE = 140
"""Columns of a terminal that is wide enough for the plan next to the table."""
LEAST_PLAN = 62
"""Columns that are left for it there: names of terms are whole."""
_LEAST_TABLE = 78
"""Cells of the table there at least: as many as in a terminal of 80 columns."""
_LEAST_ROWS = 20
"""Rows of a terminal from which on a line says what the program is for."""
PURPOSE = "Full-parameter fine-tuning of 8B-70B models on GH200 superchips."
FOLDED = Content.from_markup(
    "[@click=app.other_machine]o plans them for another machine[/][$faint], / finds one by name[/]"
)
FIRST_VISIT = (
    "First time here? Choose a row: [$accent]enter[/] configures it, [$accent]l[/] launches it. "
    "[b]tiny[/] trains anywhere in about a minute and downloads nothing."
)


class PresetsScreen(FiltersTable):
    PAGE = "presets"
    AUTO_FOCUS = "#table"
    CSS_PATH = "screen.tcss"
    HELP_TEXT = (
        "Each row is a model, each column a number of GPUs. A cell shows whether that fits on this "
        "machine, which share of the optimizer states lives in host memory (the offload ratio; "
        "none: all on the GPU), and the predicted tokens per second; or, behind ✗, what memory it "
        "needs and what is there. ★ marks what `so-tui run` starts, ⇡ the number of GPUs that "
        "trains most tokens per second, and * a plan with compact moments, because it does not fit "
        "with fp32 moments. While the cursor is on a model, the plan of the underlined cell is "
        "shown."
    )
    BINDINGS = keys("presets", "all-reasons", "other-machine", "more-presets")

    table = getters.query_one(PresetTable)
    about_machine = getters.query_one("#about-machine", Static)
    title_shown = getters.query_one("#detail-title", Static)
    detail = getters.query_one("#detail", Static)
    planned_for: Machine | None = None
    """The machine of ``rows``."""
    rows: tuple[PlanRow, ...] = ()
    counts: tuple[int, ...] = ()
    _to_select = ""
    """The preset to select once it is in the table."""
    _added: frozenset[str] = frozenset()
    """Presets that were added on this screen, which are shown wherever they can be trained."""
    _train_tiny_when_planned = False
    _slurm = False
    """Whether jobs can be submitted from here."""

    def body(self) -> Iterable[Widget]:
        yield Static(faint(PURPOSE), id="purpose")
        yield Static(Content.from_markup(FIRST_VISIT), id="first-visit")
        yield Static(id="about-machine")
        yield Static(id="problems")
        yield FindField("show models whose name contains …", id="filter")
        with Container(id="panels"):
            with Vertical(id="fitting", classes="panel"):
                yield PresetTable(id="table", cursor_type="cell")
                yield Static(id="legend")
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
        first = bool(self.rows) and not self.app.runs and not self.about_machine.display
        self.query_one("#first-visit").display = first

    def _machine_known(self) -> None:
        catalog, machine = self.app.catalog, self.app.machine
        if machine is None or catalog is None:
            return
        self._tell_of(machine)
        problems = self.query_one("#problems", Static)
        problems.display = bool(catalog.problems)
        if catalog.problems:
            # A preset that others can write is listed, but it cannot allow the model's code.
            listed = catalog.problems[0].code == "trust-not-own"
            ignored = "! " if listed else "✗ one of your presets was ignored: "
            others = len(catalog.problems) - 1
            more = f"   and {plural(others, 'more problem')}" if others else ""
            problems.update(
                Content.assemble((ignored, "$error"), str(catalog.problems[0]), (more, "$faint"))
            )
        if self.planned_for not in (None, machine):
            self.rows = ()
            self.table.clear()
            self.refresh_bindings()
            self._wait(f"planning every preset for {machine.label} …")
        self.planned_for = machine
        self.plan_all(catalog, machine)

    def _wait(self, text: str) -> None:
        """Say what is awaited, where a plan will stand."""
        self.title_shown.update(faint(text))
        self.detail.update("")

    def _tell_of(self, machine: Machine) -> None:
        """Say what can be done on a machine without a GPU, such as most login nodes; and how to
        come back from another machine.
        """
        self._slurm = preset_actions.has_slurm()
        self.query_one("#fitting").border_title = Content.assemble(
            "what fits on ", (machine.label, "bold")
        )
        told, file, width = self.about_machine, self.app.machine_file, self.size.width - 4
        told.display = bool(file) or not machine.gpus
        if file:
            told.update(_elsewhere(machine.label, file, width))
        elif told.display:
            told.update(_without_gpu(width, slurm=self._slurm))
        self._runs_known()

    @work(thread=True, exclusive=True, group="plan", name="plan all presets", exit_on_error=False)
    def plan_all(self, catalog: Catalog, machine: Machine) -> None:
        """Plan every preset for every GPU count."""
        from so_tui.plan.planner import plan_table
        from so_tui.plan.resources import rank_counts
        from so_tui.spec import SoTuiError

        counts = rank_counts(machine)
        try:
            rows = plan_table(tuple(catalog.presets.values()), machine, counts)
            answer(self, self._show_table, counts, rows)
        except SoTuiError as error:
            self.app.post_message(failure("The presets could not be planned", error))

    @property
    def _on_gpus(self) -> bool:
        """Whether the machine that is planned for has GPUs."""
        return bool(self.planned_for and self.planned_for.gpus)

    def _show_table(self, counts: tuple[int, ...], rows: tuple[PlanRow, ...]) -> None:
        self.counts, self.rows = counts, rows
        self._runs_known()
        self._fill()
        self.refresh_bindings()
        if self._to_select in self.table.rows:
            self.table.select(self._to_select)
            self._to_select = ""
        else:
            self.table.start_where_it_fits(on_gpus=self._on_gpus)
        train_tiny, self._train_tiny_when_planned = self._train_tiny_when_planned, False
        if train_tiny and self.is_current:
            self.action_train_tiny()

    def _shown_rows(self) -> list[PlanRow]:
        """Return the rows that the filter finds; without one, all but those that are folded."""
        if wanted := self.filter.needle:
            return [row for row in self.rows if wanted in f"{row.title}\n{row.preset}".lower()]
        return [row for row in self.rows if not self._needs_gpus(row)]

    def _needs_gpus(self, row: PlanRow) -> bool:
        """Return whether this machine cannot train a model because it has no GPU. One line stands
        for all such models.
        """
        if self._on_gpus or self.app.machine_file or row.preset in self._added:
            return False
        small = row.parameters <= MOST_PARAMETERS_WITHOUT_GPU
        return not (small and any(plan.fits for plan in row.cells.values()))

    def _fill(self) -> None:
        if self.rows:
            rows = self._shown_rows()
            self.table.room = self._table_room
            self.table.show(rows, self.counts, "GPU" if self._on_gpus else "rank")
            room = self.table.room
            if beside := self.has_class("-beside"):
                room = max(_LEAST_TABLE, self.table.cells)
            self.query_one("#fitting").styles.width = room + 4 if beside else None
            self.query_one("#legend", Static).update(self.table.legend(room))
            folded = 0 if self.filter.needle else sum(map(self._needs_gpus, self.rows))
            line = self.query_one("#folded", Static)
            line.display = bool(folded)
            needs = f"{plural(folded, 'model')} need{'s' if folded == 1 else ''} GPUs: "
            line.update(Content.assemble(needs, FOLDED))

    @property
    def _table_room(self) -> int:
        """Cells for the columns of the table."""
        width = self.size.width - (6 if framed(self) else 2)
        beside = self.size.width >= BESIDE
        return max(_LEAST_TABLE, width - LEAST_PLAN) if beside else width

    def on_resize(self) -> None:
        self.set_class(self.size.width >= BESIDE, "-beside")
        self.query_one("#purpose").display = self.size.height >= _LEAST_ROWS
        if self.planned_for is not None:
            self._tell_of(self.planned_for)
        self._fill()
        self.call_after_refresh(self._show_detail)

    @on(DataTable.CellHighlighted)
    def _show_detail(self) -> None:
        chosen = self.table.chosen()
        if chosen is None:
            if self.rows:
                self.title_shown.update("no match; esc clears the filter")
                self.detail.update("")
            return
        row, plan = chosen
        noun = "GPU" if plan.on_gpus else "rank"
        title = Content.assemble((row.title, "bold"), (f" on {plural(plan.gpus, noun)}", "$faint"))
        pane = self.query_one("#detail-pane")
        width = max(36, self.title_shown.content_size.width - 1)
        self.title_shown.update(plan_view.headline(plan, width, title))
        plain, rows = shows_ascii(self.app), pane.content_size.height
        self.detail.update(
            plan_view.as_roomy(plan, width, rows, fastest=row.fastest_plan, plain=plain)
        )

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

    def action_all_reasons(self) -> None:
        if (chosen := self.table.chosen()) is not None:
            preset_actions.show_plan(self.app, chosen[0].title, chosen[1])

    def action_launch(self) -> None:
        if (chosen := self.table.chosen()) is not None:
            self._ask_launch(*chosen)

    def _ask_launch(self, row: PlanRow, plan: Plan) -> None:
        from so_tui.launch.launch import launch_of
        from so_tui.spec import Refused

        if self.planned_for is None or preset_actions.refused_elsewhere(self.app, plan.spec):
            return
        try:
            preset_actions.ask_to_launch(self.app, launch_of(plan, self.planned_for))
        except Refused as error:
            verb = "cannot run" if plan.fits else "does not fit"
            self.app.post_message(Failed(f"{row.title} {verb} here", error.reasons))

    def action_train_tiny(self) -> None:
        self._train_tiny_when_planned = not self.rows
        for row in self.rows:
            if row.preset == "tiny":
                self._ask_launch(row, best_plan(row))

    def action_preview_data(self) -> None:
        if (chosen := self.table.chosen()) is not None:
            from so_tui.ui.data_preview import DataPreviewScreen

            self.app.push_screen(DataPreviewScreen(chosen[1].spec))

    def action_add(self) -> None:
        """Make a preset of any model, whose shape a helper process reads."""
        from so_tui.spec import SoTuiError, create_preset
        from so_tui.ui.dialogs import AskText, show_dialog

        def read(model: str, name: str) -> tuple[str, Sequence[str]]:
            from so_tui.launch.helper_jobs import describe_model  # in the thread: it takes a while

            if not model:
                raise SoTuiError("Type a hub id or a folder first.")
            spec, notes = describe_model(model, name=name or None)
            if not get_current_worker().is_cancelled:  # as it is once the dialog was left
                create_preset(spec)
            return spec.name, notes

        def added(described: tuple[str, Sequence[str]]) -> None:
            name, notes = described
            for note in notes:
                self.app.notify(note, markup=False)
            self._to_select, self._added = name, self._added | {name}
            self.action_leave_field()
            self.app.reload_presets()

        model = "hub id such as Qwen/Qwen3-8B, or a folder"
        name = "name of the preset (empty: derived from the model's)"
        dialog = AskText(
            "Add a model",
            "Only its config.json is read. No weights are downloaded.",
            Input(placeholder=model, id="model", compact=True),
            Input(placeholder=name, id="name", compact=True),
            yes="Add",
            read=read,
            may_be_empty=True,
            slow="reading the shape of {} …",
        )
        show_dialog(self.app, dialog, added)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action in ("launch", "preview_data", "all_reasons"):
            return bool(self.rows)
        if action == "configure":
            return self._slurm and bool(self.rows)
        return action != "delete" or self._own_preset is not None

    @property
    def _own_preset(self) -> Preset | None:
        """The preset under the cursor, if it is the user's own."""
        chosen = self.table.chosen()
        preset = self.app.presets.get(chosen[0].preset) if chosen else None
        return preset if preset is not None and preset.origin == "user" else None

    def action_delete(self) -> None:
        """Ask whether to delete a preset of the user, and delete it."""
        from so_tui.spec import delete_preset

        if (preset := self._own_preset) is None:
            return
        name = preset.spec.name

        def delete() -> None:
            with reporting(self.app, "The preset", "deleted"):
                delete_preset(name)
            self.app.reload_presets()

        self.app.ask(
            f"Delete your preset {name}?",
            [preset.path, "Runs that were started with it stay."],
            delete,
            yes="Delete",
            no="No, keep it",
        )

    def filtered(self) -> None:
        self._fill()
        self._show_detail()
