"""Configure: everything a run needs, and beside it the plan, updated while you type."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.cells import cell_len
from textual import getters, on, work
from textual.binding import Binding
from textual.containers import Horizontal
from textual.timer import Timer
from textual.widget import Widget
from textual.widgets import Button, Static
from textual.worker import get_current_worker

from so_tui.spec import InputError, Problem, Refused, RunSpec, with_values
from so_tui.spec.errors import reject
from so_tui.trust.text import printable_line
from so_tui.ui import plan_view, preset_actions
from so_tui.ui.configure.form import FieldRow, FormPanel
from so_tui.ui.configure.plan_pane import PlanPanel, WhatIf
from so_tui.ui.form import (
    GROUPS,
    LENGTH,
    LENGTH_KEYS,
    Strip,
    edits_between,
    label,
    length_of,
    problem_text,
    strips_for,
    text_of,
    typed_over,
    values_of,
    with_edit,
)
from so_tui.ui.messages import Failed, Planned
from so_tui.ui.page import OTHER_MACHINE, ResizablePage, Size
from so_tui.ui.text import Content, faint
from so_tui.ui.widgets import Divider, command_key
from so_tui.units import plural, thousands

if TYPE_CHECKING:
    from so_tui.launch.slurm.client import Partition
    from so_tui.machine.types import Machine
    from so_tui.plan.plan import Plan


# What is edited in Configure: presets with their unsaved edits. Without widgets.


class Drafts:
    """The preset in the form and the edits of every preset. The screen that shows them is the only
    one to change them.
    """

    def __init__(self) -> None:
        self.base: RunSpec | None = None
        """The preset in the form, as it is saved."""
        self.base_values: dict[str, str] = {}
        self._edits: dict[str, dict[str, str]] = {}
        self._recommended: dict[str, dict[str, str]] = {}
        """The part of each draft that a recommendation filled in. It need not be saved: choosing
        the preset again brings it back.
        """
        self._machines: dict[str, str] = {}
        """The machine that a recommendation is for, in words, by preset."""

    @property
    def edits(self) -> dict[str, str]:
        """The edits of the preset in the form."""
        return self._edits.get(self._name, {})

    @property
    def _name(self) -> str:
        return self.base.name if self.base else ""

    @property
    def values(self) -> dict[str, str]:
        """Every field as text, edited or not."""
        return {**self.base_values, **self.edits}

    @property
    def recommended(self) -> dict[str, str]:
        """What a recommendation filled in for the preset in the form, by field."""
        return self._recommended.get(self._name, {})

    @property
    def recommended_for(self) -> str:
        """The machine that the recommendation is for, which may not be the one that is planned for
        now.
        """
        return self._machines.get(self._name, "")

    @property
    def changes(self) -> dict[str, str]:
        """What the user changed of the preset and its recommendation, by field."""
        values = self.values
        return {path: values.get(path, "") for path in typed_over(self.edits, self.recommended)}

    @property
    def spec(self) -> RunSpec | None:
        """The preset with its edits; None while there is none. Raises InputError."""
        return with_values(self.base, self.edits) if self.base else None

    def open(self, base: RunSpec, wanted: RunSpec | None = None, machine: str = "") -> None:
        """Take a preset into the form; ``wanted``, a recommendation for ``machine``, is laid over
        its edits and replaces an earlier one.
        """
        name = base.name
        self.base, self.base_values = base, values_of(base)
        if wanted is not None:
            edits, changed = self.edits, typed_over(self.edits, self.recommended)
            typed = {path: edits[path] for path in changed if path in edits}
            self._recommended[name], self._machines[name] = edits_between(base, wanted), machine
            self._edits[name] = typed | self._recommended[name]

    def undo(self) -> None:
        """Go back to the preset with what was recommended for it."""
        if self.base:
            self._edits[self.base.name] = dict(self.recommended)

    def forget(self, preset: str) -> None:
        """Drop the edits of a preset, and what was recommended for it."""
        self._edits.pop(preset, None)
        self._recommended.pop(preset, None)

    def enter(self, path: str, text: str) -> bool:
        """Enter ``text`` into a field, and return whether that changed anything."""
        edits = with_edit(self.edits, self.base_values, path, text)
        if self.base is None or edits == self.edits:
            return False
        self._edits[self.base.name] = edits
        return True

    def unsaved(self) -> dict[str, int]:
        """Return how many fields of each preset the user has changed without saving them."""
        counts = {
            preset: len(typed_over(edits, self._recommended.get(preset, {})))
            for preset, edits in self._edits.items()
        }
        return {preset: count for preset, count in counts.items() if count}

    def shown_value(self, path: str) -> tuple[str, str]:
        """Return the key that a row of the form shows and its text."""
        if path == LENGTH:
            # An edited length hides those of the preset.
            typed = {key: text for key, text in self.edits.items() if key in LENGTH_KEYS}
            return length_of(typed or self.base_values)
        return path, self.values.get(path, "")

    def was(self, path: str) -> str | None:
        """Return what a field said when the preset was opened, if the user has changed it since;
        else None.
        """
        changed = self.changes
        opened = {**self.base_values, **self.recommended}
        if path != LENGTH:
            return opened.get(path, "") if path in changed else None
        if not any(key in changed for key in LENGTH_KEYS):
            return None
        key, text = length_of(opened)
        return f"{text} {key.rpartition('.')[2]}"

    def preset_value(self, path: str) -> str | None:
        """Return what the preset says of a field that has what was recommended instead; None for
        any other.
        """
        recommended = path in self.recommended and path not in self.changes
        return self.base_values.get(path, "") if recommended else None


# Notes that a plan adds to single fields of the form. Pure functions.


def _impossible_field(plan: Plan | None) -> dict[str, str]:
    """Return the reason by the field that makes a plan impossible on its machine, if one does."""
    from so_tui.plan.notes import NoSuchGpu, TooFewGpus

    if plan is None or plan.possible:
        return {}
    field = "gpus" if isinstance(plan.reasons[0], TooFewGpus | NoSuchGpu) else "offload.mode"
    return {field: f"{plan.reason_texts[0]}."}


def _problems_by_row(problems: Sequence[Problem]) -> dict[str, str]:
    """Return what to do about each row of the form that is wrong; a source of a mixture has no row
    of its own.
    """
    found: dict[str, str] = {}
    for problem in problems:
        path = LENGTH if problem.field in LENGTH_KEYS else problem.field.partition("[")[0]
        found.setdefault(path, problem.remedy or f"{problem.message}.")
    return found


def _field_note(path: str, plan: Plan | None, machine: Machine | None, given_mode: str) -> str:
    """Return what the plan derives from a field, where that says more than its range.
    ``given_mode`` is the offload mode in the form.
    """
    if path == "gpus" and machine is not None:
        return f"of {len(machine.gpus)}, or a list" if machine.gpus else "ranks: no GPU here"
    if plan is None:
        return ""
    if path == "offload.mode" and plan.spec.offload.mode != given_mode:
        return f"→ {plan.mode}"
    if path == "train.gradient_accumulation":
        spec = plan.spec
        steps = f"{spec.gradient_accumulation_steps} " if spec.train.tokens_per_step else ""
        return f"{steps}= {thousands(plan.tokens_per_step)} tokens"
    if path == LENGTH and plan.spec.train.steps:
        return plan_view.run_duration(plan)
    if path == "offload.cpu_adam_cores_fraction" and plan.binding and plan.binding[0].adam_cpus:
        rank, each = plan.binding[0], " a rank" if len(plan.binding) > 1 else ""
        return f"Adam {len(rank.adam_cpus)}, main {len(rank.main_cpus)}{each}"
    return ""


def _partition_note(partitions: Sequence[Partition], chosen: str, *, slurm: bool) -> str:
    """Return what the chosen partition offers, what it may be, or why none can be named here."""
    if not slurm:
        return "no Slurm here"
    named = {partition.name: partition for partition in partitions}
    found = named.get(chosen)
    if found is None:
        return printable_line(", ".join(named)) or "empty: here"
    parts = [
        "" if found.open else "closed now",
        f"{found.idle} of {plural(found.nodes, 'node')} free",
        f"{plural(found.gpus, 'GPU')} each" if found.gpus else "",
        f"at most {found.time_limit}" if found.time_limit else "",
    ]
    return printable_line(", ".join(filter(None, parts)))


# What was changed in Configure: its title, the list of what differs from the preset, and the way
# back.


def _changes_title(drafts: Drafts, width: int) -> Content:
    """Return the model, its preset, how many fields were changed, and what was recommended for
    which machine, in one line.

    Where those have no room, some are counted; = lists them all.
    """
    assert drafts.base is not None
    changed = plural(len(drafts.changes), "change") if drafts.changes else "no changes"
    preset = f"   preset {drafts.base.name}, {changed}"
    line = Content.assemble((drafts.base.label, "bold"), (preset, "$faint"))
    shown = [path for _, paths in GROUPS for path in paths]  # in this order
    paths = dict.fromkeys((*shown, *drafts.recommended))
    recommended = [label(path) for path in paths if drafts.preset_value(path) is not None]
    count = len(recommended)
    for named in range(count, 0, -1):
        names = ", ".join(recommended[:named])
        more = f" and {count - named} more" if named < count else ""
        text = f"   ★ recommended for {drafts.recommended_for}: {names}{more}"
        if line.cell_length + cell_len(text) <= width:
            return line + faint(text)
    text = f"   ★ {count} recommended"
    if count and line.cell_length + cell_len(text) <= width:
        return line + faint(text)
    return line


DEBOUNCE_S = 0.12
LEAST_PLAN = 44
"""Columns that are left for the plan, however wide the form is made."""


class ConfigureScreen(ResizablePage):
    PAGE = "configure"
    CSS_PATH = ["screen.tcss", "form.tcss"]
    AUTO_FOCUS = ""
    # Nothing is focused at first, so that single keys are commands; tab goes to the first field.
    HELP_TEXT = (
        "Every change is planned immediately: whether it fits, how fast it will be, which command "
        "would start. • marks fields that you changed, ★ those that have what is recommended for "
        "the machine instead of the preset's value, ✗ those that cannot run. Up and down move "
        "between fields, / finds one; − and + step a number, as shift with up and down does. The "
        "what-if strips show the step time over ratio and Adam cores: a bar a value, ✗ where it "
        "does not fit. Leave a text field with esc to use single keys."
    )
    SIZES = ("form",)
    BINDINGS = [
        command_key("l,f5", "launch", "Launch", "Start this run (asks once)", display="l/F5"),
        command_key("ctrl+s", "save", "Save", "Save these settings as a preset"),
        command_key(
            "equals_sign", "differences", "Changes", "What differs from the preset", display="="
        ),
        command_key("u", "reset", "Undo", "Undo your changes; once more, use the preset as it is"),
        command_key(
            "d",
            "preview_data",
            "Data",
            "See the data as the model will: rows, lengths, packing, what is dropped",
        ),
        command_key("y", "copy", "Copy", "Copy the exact command that would be started"),
        command_key("slash", "find", "Find", "Find a field by its name", display="/"),
        command_key(
            "k", "what_if", "What if", "Step ratio and Adam cores with left and right", show=False
        ),
        Binding("down", "field(1)", "Next field", show=False),
        Binding("up", "field(-1)", "Field before", show=False),
        OTHER_MACHINE,
    ]

    form = getters.query_one(FormPanel)
    plan = getters.query_one(PlanPanel)

    def __init__(self) -> None:
        self._drafts = Drafts()
        self._planned: Planned | None = None
        self._serial = 0
        self._timer: Timer | None = None
        self._partitions: tuple[Partition, ...] = ()
        self._when_planned: Callable[[Planned], None] | None = None
        """The command that waits for the plan of the newest edit."""
        super().__init__()

    def body(self) -> Iterable[Widget]:
        yield Static("reading the presets …", id="form-title")
        with Horizontal(id="columns"):
            with FormPanel(classes="panel") as form:
                form.border_title = "settings"
            yield Divider()
            with PlanPanel(id="plan", classes="panel") as plan:
                plan.border_title = "plan"

    def on_mount(self) -> None:
        self.watch(self.app, "machine", self._machine_known)

    def _machine_known(self) -> None:
        catalog = self.app.catalog
        if self.app.machine is None or catalog is None:
            return
        if self._drafts.base is None and catalog.presets:
            self.edit(list(catalog.presets)[-1])
        else:
            self.replan()

    # What is edited.

    def edit(self, preset: str, wanted: RunSpec | None = None, *, field: str = "") -> None:
        """Show a preset with its unsaved edits; ``wanted``, a recommendation, is laid over them and
        replaces an earlier one.

        The keyboard goes to ``field``, if a path is given.
        """
        catalog = self.app.catalog
        if catalog is None or preset not in catalog.presets:
            return
        machine = self.app.machine if self.app.machine_file else None
        name = "this machine" if machine is None else printable_line(machine.label)
        self._drafts.open(catalog.presets[preset].spec, wanted, name)
        self.call_after_refresh(self._show_form, field)

    def continue_with(self, preset: str) -> None:
        """Show the preset that the draft was saved as, and forget the draft."""
        for name in {preset, self._drafts.base.name if self._drafts.base else preset}:
            self._drafts.forget(name)
        self.edit(preset)

    def unsaved(self) -> dict[str, int]:
        """Return how many fields of each preset have unsaved edits."""
        return self._drafts.unsaved()

    async def _show_form(self, field: str = "") -> None:
        self._show_title()  # at once: making the fields takes a while
        slurm = preset_actions.has_slurm()
        if await self.form.show_values(self._drafts.shown_value, slurm=slurm) and slurm:
            self._ask_for_partitions()
        if field:
            self.form.go_to(field)
        self.replan()

    @on(FieldRow.Edited)
    def _edited(self, message: FieldRow.Edited) -> None:
        if self._drafts.base is None:
            return
        if self._set_field(message.path, message.text):
            self._timer = self.set_timer(DEBOUNCE_S, self.replan)

    def _set_field(self, path: str, text: str) -> bool:
        """Enter ``text`` into the draft, and return whether that changed it; the plan that is shown
        is then out of date.
        """
        if not self._drafts.enter(path, text):
            return False
        self._serial += 1
        self._when_planned = None
        if self._timer is not None:
            self._timer.stop()
        return True

    # The plan of it.

    def replan(self) -> None:
        """Plan the values in the form. The answer to an older request is dropped."""
        if self._drafts.base is None or self.app.machine is None:
            return
        if self._timer is not None:
            self._timer.stop()
        self._serial += 1
        self._plan(self._serial, self._drafts.base, dict(self._drafts.edits))

    @work(thread=True, exclusive=True, group="plan", name="plan this run", exit_on_error=False)
    def _plan(self, serial: int, base: RunSpec, edits: dict[str, str]) -> None:
        """Plan in a thread: post the plan, or what is wrong with the values, and then what other
        values would do, if still wanted.
        """
        machine = self.app.machine
        assert machine is not None
        from so_tui.launch.launch import preview
        from so_tui.launch.places import machine_of

        try:
            spec = with_values(base, edits)
            # A machine that a file describes is planned for as it is; this one as the run finds it.
            machine = machine if self.app.machine_file else machine_of(spec.slurm, machine)
            plan, launch = preview(spec, machine)
        except InputError as error:
            self.post_message(Planned(serial, None, error.problems))
            return
        except Refused as error:
            problem = reject(error.codes[0], "gpus", "", error.reasons[0], "").problems[0]
            self.post_message(Planned(serial, None, (problem,)))
            return
        self.post_message(Planned(serial, plan, (), launch))
        worker = get_current_worker()
        strips = strips_for(plan, machine, lambda: worker.is_cancelled)
        if strips is not None:
            self.call_later(self._show_strips, serial, strips)

    @work(thread=True, group="partitions", name="ask Slurm for its partitions", exit_on_error=False)
    def _ask_for_partitions(self) -> None:
        from so_tui.launch.slurm.client import SlurmError, partitions

        try:
            self.call_later(self._show_partitions, partitions())
        except SlurmError:  # the field takes any name, and submitting says what is wrong
            return

    def _show_partitions(self, partitions: tuple[Partition, ...]) -> None:
        self._partitions = partitions
        self.replan()

    @on(Planned)
    def _show_plan(self, message: Planned) -> None:
        if message.serial != self._serial or self._drafts.base is None:
            return
        self._planned = message
        self._mark_fields(message)
        self._show_title()
        self.plan.show(message)
        waiting, self._when_planned = self._when_planned, None
        if waiting is not None and self.is_current:
            waiting(message)

    def _show_strips(self, serial: int, strips: tuple[Strip, ...]) -> None:
        if serial == self._serial:
            self.plan.what_if.show(strips)

    @on(WhatIf.Stepped)
    def _stepped(self, message: WhatIf.Stepped) -> None:
        """Enter the value, and the mode that it belongs to where the preset leaves that to the
        planner.
        """
        plan = self._planned.plan if self._planned is not None else None
        values = {message.path: text_of(message.value)}
        if plan is not None and plan.spec.offload.mode != self._drafts.values.get("offload.mode"):
            values = {"offload.mode": plan.mode, "offload.ratio": text_of(plan.ratio), **values}
        changed = [self._set_field(path, text) for path, text in values.items()]
        for row in self.form.all_rows:
            if row.path in values:
                row.show_value(row.path, values[row.path])
        if any(changed):
            self._timer = self.set_timer(DEBOUNCE_S, self.replan)

    def on_resize(self) -> None:
        self.call_after_refresh(self.sizes_changed)

    def sizes_changed(self) -> None:
        chosen, size = self.app.settings.panels.form, self.size_of(None)
        self.form.styles.width = None
        if chosen is not None and size is not None:
            self.form.styles.width = replace(size, cells=chosen).grown(0)
        self.call_after_refresh(self.plan.lay_out)
        if self._drafts.base is not None:
            self._show_title()

    def size_of(self, panel: Widget | None) -> Size | None:
        """Return the columns of the form, unless the plan stands below it. The plan has what the
        form leaves.
        """
        if self.has_class("-narrow"):
            return None
        step = -4 if panel is not None and self.plan in panel.ancestors else 4
        most = self.size.width - LEAST_PLAN
        return Size("form", self.form.size.width, 40, most, step=step)

    def _mark_fields(self, message: Planned) -> None:
        """Mark fields that differ or are wrong, or make the plan impossible on this machine."""
        problems = _problems_by_row(message.problems) or _impossible_field(message.plan)
        drafts, slurm = self._drafts, preset_actions.has_slurm()
        values = drafts.values
        chosen, given_mode = values.get("slurm.partition", ""), values.get("offload.mode", "")
        for row in self.form.all_rows:
            path = row.path
            note = _field_note(path, message.plan, self.app.machine, given_mode)
            if path == "slurm.partition":
                note = _partition_note(self._partitions, chosen, slurm=slurm)
            row.show_status(
                was=drafts.was(path),
                preset=drafts.preset_value(path),
                problem=problems.get(path, ""),
                note=note,
            )
        self.form.refused = ""
        self.form.show_about()

    def _show_title(self) -> None:
        title = self.query_one("#form-title", Static)
        title.update(_changes_title(self._drafts, title.content_size.width or self.size.width))

    # Moving about.

    def action_field(self, distance: int) -> None:
        self.form.move(distance)

    def action_find(self) -> None:
        self.form.find.open()

    def action_what_if(self) -> None:
        if self.plan.what_if.strips:
            # The focus shows it where only the plan has room otherwise.
            self.set_focus(self.plan.what_if)
        else:
            self.notify("What if compares offload ratios and Adam cores: this plan has none")

    def action_leave_field(self) -> None:
        if self.form.close_find():
            self.set_focus(None)
        else:
            super().action_leave_field()

    # Commands.

    def _once_planned(self, command: Callable[[Planned], None]) -> None:
        """Run ``command`` with the plan of what is in the form now, which may not have been made
        yet.
        """
        entered = self.form.entered()
        if entered is not None:  # its last key press may not have been announced yet
            self._set_field(*entered)
        if self._planned is not None and self._planned.serial == self._serial:
            command(self._planned)
        elif self._drafts.base is not None and self.app.machine is not None:
            self._when_planned = command
            self.replan()

    def action_launch(self) -> None:
        self._once_planned(self._launch)

    def _launch(self, planned: Planned) -> None:
        plan = planned.plan
        if plan is not None and preset_actions.refused_elsewhere(self.app, plan.spec):
            return
        if plan is None or not plan.possible:
            # The first field that is wrong says so, in its own line.
            if not self.form.go_to_wrong("not launched"):
                texts = [*map(problem_text, planned.problems), *(plan.reason_texts if plan else ())]
                self.notify(texts[0], title="Not launched", severity="error", markup=False)
        elif not plan.fits:
            offer = preset_actions.launch_anyway(self.app, planned.launch)
            title = f"{plan.spec.label} does not fit here"
            self.app.post_message(Failed(title, plan.reason_texts, offer=offer))
        elif planned.launch is not None:
            preset_actions.ask_to_launch(self.app, planned.launch)

    def action_save(self) -> None:
        self._once_planned(self._save)

    def _save(self, planned: Planned) -> None:
        base = self._drafts.base
        if planned.plan is None or base is None:
            self.notify("Correct the marked fields first", severity="error")
            return
        spec = with_values(base, self._drafts.edits)
        preset_actions.ask_to_save(self.app, spec, base.name, self.continue_with)

    def action_preview_data(self) -> None:
        """Preview the data with the values in the form."""
        from so_tui.ui.data_preview import DataPreviewScreen

        try:
            if (spec := self._drafts.spec) is not None:
                self.app.push_screen(DataPreviewScreen(spec))
        except InputError as error:
            title = "Correct these fields before previewing the data"
            self.app.post_message(Failed(title, tuple(map(problem_text, error.problems))))

    def action_differences(self) -> None:
        """Show every field that differs from the preset."""
        from so_tui.ui.dialogs import Notice

        drafts = self._drafts
        changed = drafts.changes
        lines = []
        for path, text in sorted(drafts.edits.items()):
            before = drafts.base_values.get(path, "") or "empty"
            why = "" if path in changed else "   recommended"
            lines.append(f"{path}: {before} → {text or 'empty'}{why}")
        heading = "No preset chosen"
        if drafts.base is not None:
            heading = f"What differs from preset {drafts.base.name}"
        lines = lines or ["No field differs from the preset."]
        self.app.push_screen(Notice(heading, lines, bad=False))

    def action_reset(self) -> None:
        """Ask to undo the user's changes, or to give up what was recommended where there are
        none.
        """
        drafts = self._drafts
        if drafts.base is None or not (drafts.edits or drafts.changes):
            return
        preset, count = drafts.base.name, len(drafts.changes)
        recommended = ", ".join(map(label, drafts.recommended))

        def undo() -> None:
            if count:
                drafts.undo()
            else:
                drafts.forget(preset)
            self.call_after_refresh(self._show_form)

        line = f"What was recommended for {drafts.recommended_for} is given up: {recommended}."
        yes = "Use the preset as it is"
        if count:
            kept = f" What was recommended stays: {recommended}." if recommended else ""
            line, yes = f"{plural(count, 'change')} will be lost.{kept}", "Undo all changes"
        self.app.ask(f"Back to preset {preset}?", [line], undo, yes=yes)

    def action_copy(self) -> None:
        def copy(planned: Planned) -> None:
            if planned.command:
                self.app.copy_to_clipboard(planned.command)
                self.notify("Copied the command")

        self._once_planned(copy)

    @on(Button.Pressed)
    async def _button(self, event: Button.Pressed) -> None:
        await self.run_action(event.button.id or "")
