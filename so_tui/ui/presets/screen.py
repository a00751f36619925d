"""Presets: what this machine can train, by model and number of GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from rich.cells import cell_len
from rich.text import Text
from textual import getters, on, work
from textual.containers import Container, Vertical, VerticalScroll
from textual.widget import Widget
from textual.widgets import DataTable, Input, Static
from textual.worker import get_current_worker

from so_tui.ui import plan_view, preset_actions
from so_tui.ui.messages import Failed, answer, failure, reporting
from so_tui.ui.page import FiltersTable
from so_tui.ui.plan_view import SIGNS, STYLES
from so_tui.ui.text import Content, faint, in_rows, shorten, shows_ascii
from so_tui.ui.textual_fixes import FittedTable
from so_tui.ui.widgets import FindField, framed, keys
from so_tui.units import count, memory_unit, plural, rate, thousands

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


# The table of Presets: a row a model, a column a number of GPUs, a cell the plan for both.


BESIDE = 140
"""Columns of a terminal that is wide enough for the plan next to the table."""
LEAST_PLAN = 54
"""Columns that are left for it there."""
_LEAST_TABLE = 66
"""Cells of the table there at least: the line that explains its marks."""
_NAMES = 36, 24, 16, 12
"""Cells that a model's name takes at most: as many as there is room for."""

Cells = Literal["words", "short", "tight"]
"""How much a cell says: ``★⇡ ✓ ratio 0.35 13.9k/s``, ``★⇡✓ 0.35 13.9k`` or ``★⇡✓ 13.9k``."""


@dataclass(frozen=True, slots=True)
class _Look:
    """How much of the table there is room for."""

    cells: Cells
    facts: int
    """Columns about the model: its name, its size, its tokens."""
    name: int
    """Cells of the longest name."""


def _looks() -> Iterator[_Look]:
    """Yield how the table may look, the best first. Names are shortened first, and then columns
    about the model are left out; figures are never cut.
    """
    kinds: tuple[tuple[Cells, int, tuple[int, ...]], ...] = (
        ("words", 3, _NAMES[:2]),
        ("words", 2, _NAMES[:2]),
        ("short", 2, _NAMES[:3]),
        ("short", 1, _NAMES[:3]),
        ("tight", 1, _NAMES),
    )
    for cells, facts, names in kinds:
        for name in names:
            yield _Look(cells, facts, name)


class _PresetTable(FittedTable):
    """Shows plans, and knows the one under the cursor."""

    BINDINGS = keys("table-of-presets")

    _shown: Sequence[PlanRow] = ()
    _counts: tuple[int, ...] = ()
    """Numbers of GPUs that are shown."""
    _all_counts: tuple[int, ...] = ()
    _first = 0
    """The first of them that is shown."""
    _noun = "GPU"
    _fixed = 2
    """Columns before those of the numbers of GPUs."""
    room = 80
    """Cells for all columns."""
    cells = 0
    """Cells that they take."""

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return action != "select_cursor" or self.row_count > 0

    def show(self, rows: Sequence[PlanRow], counts: tuple[int, ...], noun: str) -> None:
        """Show the plans of ``rows`` for each of ``counts`` GPUs, or ranks, as ``noun`` says. The
        cursor stays on its plan.
        """
        at, before = self.cursor_coordinate, self.chosen()
        # On the model, the cursor stays there.
        gpus = self._counts[at.column - self._fixed] if before and at.column >= self._fixed else 0
        self._shown, self._all_counts, self._noun = rows, counts, noun
        if gpus not in counts or gpus not in self._fill(min(self._first, len(counts) - 1)):
            self._fill(counts.index(gpus) if gpus in counts else 0)
        column = self._fixed + self._counts.index(gpus) if gpus in self._counts else at.column
        preset = before[0].preset if before is not None else ""
        line = self.get_row_index(preset) if preset in self.rows else at.row
        self.move_cursor(row=line, column=column)

    def _fill(self, first: int) -> tuple[int, ...]:
        """Show as many numbers of GPUs as there is room for, from one of them on, and return
        them.
        """
        for look in _looks():
            columns = self._columns(look, self._all_counts)
            if (left := self.room - self._width(columns)) >= 0:
                # Names have what is left.
                longest = max((name.cell_len for name in columns[0][1]), default=0)
                wider = replace(look, name=min(_NAMES[0], longest + left))
                columns = self._columns(wider, self._all_counts)
                break
        widths = [self._width(columns[: look.facts])]
        widths += [self._width([column]) for column in columns[look.facts :]]
        most = len(self._all_counts)
        while first and widths[0] + sum(widths[first : 1 + most]) <= self.room:
            first -= 1  # no column is left empty
        while most > first + 1 and widths[0] + sum(widths[1 + first : 1 + most]) > self.room:
            most -= 1
        shown = [*columns[: look.facts], *columns[look.facts :][first:most]]
        self._first, self._fixed, self._counts = first, look.facts, self._all_counts[first:most]
        filled = [
            (row.preset, [cells[index] for _, cells in shown])
            for index, row in enumerate(self._shown)
        ]
        self.cells = self._width(shown)
        self.fill([title for title, _ in shown], filled)
        return self._counts

    def _columns(self, look: _Look, counts: Sequence[int]) -> list[tuple[str, list[Text]]]:
        """Return title and cells of each column."""
        facts = zip(*(self._model(row, look) for row in self._shown), strict=True)
        columns = [*zip(("model", "size", "tokens")[: look.facts], map(list, facts), strict=False)]
        columns = columns or [("model", [])]
        for ranks in counts:
            plans = [row.cells[ranks] for row in self._shown]
            room = max((len(_speed(plan, look.cells)) for plan in plans if plan.fits), default=0)
            cells = [self._cell(row, row.cells[ranks], look.cells, room) for row in self._shown]
            columns.append(
                (f"{'  ' if look.cells == 'tight' else '   '}{plural(ranks, self._noun)}", cells)
            )
        return columns

    def _width(self, columns: Sequence[tuple[str, list[Text]]]) -> int:
        fitting = (max([cell_len(title), *(c.cell_len for c in cells)]) for title, cells in columns)
        return sum(width + 2 * self.cell_padding for width in fitting)

    def _model(self, row: PlanRow, look: _Look) -> list[Text]:
        """Return the cells about a model."""
        size = count(row.parameters, 1)
        if row.active_parameters < row.parameters:
            size += f" MoE, {count(row.active_parameters, 1)} active" if look.facts > 2 else " MoE"
        tokens = Text(thousands(row.sequence_length), style=self._colour("$faint"), justify="right")
        name = Text(shorten(row.title, look.name))
        return [name, Text(size, style=self._colour("$faint")), tokens][: look.facts]

    def _cell(self, row: PlanRow, plan: Plan, look: Cells, room: int) -> Text:
        """Return how a plan offloads and how fast it is, or ``✗ host 922 > 464``.

        Speeds take ``room`` cells.
        """
        from so_tui.plan.gist import compact_moments
        from so_tui.plan.show import shortfall

        sign = f"{' ' if look == 'words' else ''}{SIGNS[plan.verdict]} "
        verdict, strong, short = self._colour(STYLES[plan.verdict]), self._colour("$run"), ""
        if not plan.fits:
            short = shortfall(plan)
            if look == "tight":  # no marks: they are for what fits
                return Text.assemble((sign, verdict), short.replace(" > ", ">"))
        marks = f"{'★' if plan.recommended else ' '}{'⇡' if plan is _fastest(row) else ' '}"
        text = Text.assemble((marks, strong), (sign, verdict), short)
        if not plan.fits:
            return text
        if look != "tight":
            shown = (each for row in self._shown for each in row.cells.values())
            how, wide = f"{plan.ratio:.2f}", 10 if look == "words" else 4
            wide += any(map(compact_moments, shown))
            if look == "words":
                how = f"{'tight' if plan.verdict == 'tight' else 'ratio'} {how}"
            if compact_moments(plan):
                how += "*"
            if plan.mode == "gpu":
                how = "no offload" if look == "words" else "none"
            text.append(f"{how:<{wide}} ", self._colour("$faint"))
        return text.append(f"{_speed(plan, look):>{room}}", "bold")

    def _colour(self, variable: str) -> str:
        return self.app.theme_variables[variable.removeprefix("$")]

    def _turn(self, by: int) -> bool:
        """Show the number of GPUs that has no room beside the others, in place of one of them;
        return whether there is one.
        """
        first, column = self._first + by, self.cursor_column
        if not (first >= 0 and first + len(self._counts) <= len(self._all_counts)):
            return False
        row = self.cursor_row
        self._fill(first)
        self.move_cursor(row=row, column=column)
        return True

    def action_cursor_right(self) -> None:
        last = self.cursor_column == len(self.columns) - 1
        if not (last and self._turn(1)):
            super().action_cursor_right()

    def action_cursor_left(self) -> None:
        if not (self.cursor_column == self._fixed and self._turn(-1)):
            super().action_cursor_left()

    # The cursor.

    def chosen(self) -> tuple[PlanRow, Plan] | None:
        """Return the row under the cursor and its plan: the column's, or the recommended one where
        the cursor is on the model.
        """
        at = self.cursor_coordinate
        if at.row >= self.row_count:
            return None
        row = self._shown[at.row]
        if at.column < self._fixed:
            return row, _best(row)
        return row, row.cells[self._counts[at.column - self._fixed]]

    def _recommended(self, row: PlanRow) -> int:
        """Return the column of the recommended plan of a row, which fits; 0 where there is none."""
        columns = enumerate(self._counts, self._fixed)
        return next((column for column, ranks in columns if row.cells[ranks].recommended), 0)

    def select(self, preset: str) -> None:
        """Put the cursor on the recommended plan of a preset."""
        index = self.get_row_index(preset)
        column = self._recommended(self._shown[index])
        self.move_cursor(row=index, column=column or self._fixed)

    def start_where_it_fits(self, *, on_gpus: bool) -> None:
        """Put the cursor on the first recommended plan that fits, or on the last row, that of tiny,
        where none does or no GPU trains it.
        """
        columns = enumerate(map(self._recommended, self._shown if on_gpus else ()))
        last = max(0, len(self._shown) - 1), self._fixed
        if self._shown:
            last = last[0], self._recommended(self._shown[-1]) or self._fixed
        index, column = next((found for found in columns if found[1]), last)
        self.move_cursor(row=index, column=column)


def _best(row: PlanRow) -> Plan:
    """Return the recommended plan of a row, else its first."""
    return max(row.cells.values(), key=lambda plan: plan.recommended)


def _fastest(row: PlanRow) -> Plan | None:
    """Return the plan of a row with the most tokens per second; None where fewer than two fit."""
    fitting = [plan for plan in row.cells.values() if plan.fits and plan.useful_tokens_per_s_total]
    if len(fitting) < 2:
        return None
    return max(fitting, key=lambda plan: plan.useful_tokens_per_s_total or 0)


def _speed(plan: Plan, look: Cells) -> str:
    """Return ``13.9k/s``, or ``13.9k`` where there is little room; empty where no speed is
    predicted.
    """
    speed = plan.useful_tokens_per_s_total
    return f"{rate(speed)}{'/s' if look == 'words' else ''}" if speed else ""


def _legend(rows: Sequence[PlanRow], width: int) -> Content:
    """Return what the marks of the table mean, as much of it as one line holds."""
    from so_tui.plan.gist import compact_moments

    plans = [plan for row in rows for plan in row.cells.values()]
    shown = {plan.verdict for plan in plans}
    unfit, tight = STYLES["does not fit"], STYLES["tight"]
    entries = [
        ("★", "$run", "so-tui run starts this", any(plan.recommended for plan in plans)),
        ("⇡", "$run", "fastest", any(map(_fastest, rows))),
        ("*", "", "compact moments", any(p.fits and compact_moments(p) for p in plans)),
        ("✗", unfit, f"needs > has ({memory_unit()[1]})", "does not fit" in shown),
        ("~", tight, "tight", "tight" in shown),
        ("0.90", "", "offload ratio", any(plan.fits and plan.mode != "gpu" for plan in plans)),
        ("9.5k", "", "tokens a second", any(plan.useful_tokens_per_s_total for plan in plans)),
    ]
    line = Content("")
    for sign, style, meaning, of_use in entries:
        if not of_use:
            continue
        entry = Content.assemble((sign, style), (f" {meaning}", "$faint"))
        gap = faint(" · ") if line.plain else Content("")
        if line.cell_length + gap.cell_length + entry.cell_length <= width:
            line = line + gap + entry
    return line


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
        "trains most tokens per second."
    )
    BINDINGS = keys("presets", "all-reasons", "other-machine", "more-presets")

    table = getters.query_one(_PresetTable)
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
                yield _PresetTable(id="table", cursor_type="cell")
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
            room = self._table_room
            if beside := self.has_class("-beside"):
                room = min(room, max(_LEAST_TABLE, self.table.cells))
            self.query_one("#fitting").styles.width = room + 4 if beside else None
            self.query_one("#legend", Static).update(_legend(rows, room))
            folded = 0 if self.filter.needle else sum(map(self._needs_gpus, self.rows))
            line = self.query_one("#folded", Static)
            line.display = bool(folded)
            needs = f"{plural(folded, 'model')} need{'s' if folded == 1 else ''} GPUs: "
            line.update(Content.assemble(needs, FOLDED))

    @property
    def _table_room(self) -> int:
        """Cells for the columns of the table."""
        width = self.size.width - (LEAST_PLAN if self.size.width >= BESIDE else 0)
        return width - (6 if framed(self) else 2)

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
        self.detail.update(plan_view.as_roomy(plan, width, rows, plain=plain))

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
                self._ask_launch(row, _best(row))

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
