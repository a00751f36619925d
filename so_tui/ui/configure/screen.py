"""Configure: everything a run needs, and beside it the plan, updated while you type."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from textual import getters, on, work
from textual.containers import Horizontal
from textual.widget import Widget
from textual.widgets import Button, Input, Static
from textual.worker import get_current_worker

from so_tui.spec import InputError, Refused, RunSpec, with_values
from so_tui.spec.errors import reject
from so_tui.trust.text import printable_line
from so_tui.ui import plan_view, preset_actions
from so_tui.ui.configure.form import FieldRow, FormPanel
from so_tui.ui.configure.plan_pane import PlanPanel, WhatIf
from so_tui.ui.form import (
    AUTO,
    LENGTH,
    LENGTH_KEYS,
    Draft,
    Planned,
    Strip,
    Texts,
    problem_text,
    strips_for,
    text_of,
)
from so_tui.ui.messages import Failed, answer, reporting
from so_tui.ui.page import ResizablePage, Size
from so_tui.ui.text import Content
from so_tui.ui.widgets import Divider, keys
from so_tui.units import plural, thousands

if TYPE_CHECKING:
    from so_tui.launch.slurm.client import Partition
    from so_tui.machine.types import Machine
    from so_tui.plan.plan import Plan


# Notes that a plan adds to single fields of the form. Pure functions.


def _problems_by_row(planned: Planned) -> Texts:
    """Return what to do about each row of the form that is wrong, or makes the plan impossible on
    its machine; a source of a mixture has no row of its own.
    """
    from so_tui.plan.notes import NoSuchGpu, TooFewCores, TooFewGpus

    found: Texts = {}
    for problem in planned.problems:
        path = LENGTH if problem.field in LENGTH_KEYS else problem.field.partition("[")[0]
        found.setdefault(path, problem.remedy or f"{problem.message}.")
    plan = planned.plan
    if plan is not None and not plan.possible:
        on_gpus = isinstance(plan.reasons[0], TooFewGpus | TooFewCores | NoSuchGpu)
        found["gpus" if on_gpus else "offload.mode"] = f"{plan.reason_texts[0]}."
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


_OF_ADAM_ON_HOST = (
    "offload.ratio",
    "offload.cpu_adam_cores_fraction",
    "offload.engine",
    "offload.states",
    "offload.sub_group_size",
    "offload.speculation",
    "offload.speculation_gib",
    "offload.parameters",
)
_OF_OUR_ADAM = (
    "offload.cpu_adam_cores_fraction",
    "offload.engine",
    "offload.states",
    "offload.speculation",
    "offload.speculation_gib",
)


def idle_fields(draft: Draft) -> frozenset[str]:
    """Return the fields that do nothing with what others say: one that leaves something to the
    machine, as ``auto`` does, makes none idle.
    """
    values = {**draft.base_values, **draft.edits}

    def says(path: str, *texts: str) -> bool:
        return values.get(path, "") in texts

    nothing = ("", "0", "0.0")
    evaluates = ("data.held_out", "data.evaluation", "data.evaluation_split")
    rules: tuple[tuple[bool, tuple[str, ...]], ...] = (
        (says("offload.mode", "gpu"), _OF_ADAM_ON_HOST),
        (says("offload.mode", "zerooffload"), _OF_OUR_ADAM),
        (says("train.gradient_clipping", *nothing), ("offload.speculation",)),
        (not says("train.tokens_per_step", *nothing), ("train.gradient_accumulation",)),
        (not says("train.schedule", "wsd"), ("train.decay_ratio",)),
        (says("train.schedule", "constant"), ("train.min_learning_rate_ratio",)),
        (all(says(path, *nothing) for path in evaluates), ("train.evaluate_every_steps",)),
    )
    return frozenset(path for idle, paths in rules if idle for path in paths)


def _partition_note(partitions: Sequence[Partition], chosen: str, *, slurm: bool) -> str:
    """Return what the chosen partition offers, what it may be, or why none can be named here."""
    if not slurm:
        return "no Slurm here"
    named = {partition.name: partition for partition in partitions}
    found = named.get(chosen)
    if found is None:
        names = ", ".join(named)
        return printable_line(f"none of {names}" if chosen and names else names) or "empty: here"
    parts = [
        "" if found.open else "closed now",
        f"{found.idle} of {plural(found.nodes, 'node')} free",
        f"{plural(found.gpus, 'GPU')} each" if found.gpus else "",
        f"at most {found.time_limit}" if found.time_limit else "",
    ]
    return printable_line(", ".join(filter(None, parts)))


# What was changed in Configure: its title, the list of what differs from the preset, and the way
# back.


def _changes_title(draft: Draft) -> Content:
    """Return the model, its preset, how many fields were chosen for which machine, and how many the
    user changed, in one line; = lists them all. A change that does nothing is none.
    """
    changed = len(set(draft.changes) - idle_fields(draft))
    changes = f"{changed} changed by you (•)" if changed else "no changes"
    facts = f"   preset {draft.base.name}, {changes}"
    if count := len(draft.chosen):
        facts += f"   {count} chosen for {draft.machine} (★)"
    return Content.assemble((draft.base.label, "bold"), (facts, "$faint"))


DEBOUNCE_S = 0.12
LEAST_PLAN = 44
"""Columns that are left for the plan, however wide the form is made."""


def _with_plan(
    command: Callable[[ConfigureScreen, Planned], None],
) -> Callable[[ConfigureScreen], None]:
    """Return a command that waits for the plan that it needs."""
    return lambda screen: screen.once_planned(partial(command, screen))


class ConfigureScreen(ResizablePage):
    PAGE = "configure"
    CSS_PATH = ["screen.tcss", "form.tcss"]
    AUTO_FOCUS = "FormPanel"
    # No field has the focus at first, so that single keys are commands.
    HELP_TEXT = (
        "Every change is planned immediately: whether it fits, how fast it will be, which command "
        "would start. • marks fields that you changed, ★ those that have what is recommended for "
        "the machine instead of the preset's value, ✗ those that cannot run. Up and down move "
        "between fields, / finds one; − and + step a number, as shift with up and down does. The "
        "what-if strips show the step time over ratio and Adam cores: a bar a value, ✗ where it "
        "does not fit. Leave a text field with esc to use single keys."
    )
    SIZES = ("form",)
    BINDINGS = keys("configure", "all-reasons", "other-machine")

    form = getters.query_one(FormPanel)
    plan = getters.query_one(PlanPanel)

    _draft: Draft | None = None
    _planned: Planned | None = None
    _serial = 0
    _partitions: tuple[Partition, ...] = ()
    _offers_partition = False
    """Whether the default one is entered once it is known."""
    _when_planned: Callable[[Planned], None] | None = None
    """The command that waits for the plan of the newest edit."""

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
        if self._draft is None and self.app.presets:
            self.edit(list(self.app.presets)[-1])
        else:
            self.replan()

    # What is edited.

    def edit(self, preset: str, wanted: RunSpec | None = None, *, field: str = "") -> None:
        """Show a preset with its unsaved edits; ``wanted`` is a plan of the table, whose number of
        GPUs is taken over.

        The keyboard goes to ``field``, if a path is given.
        """
        if preset not in self.app.presets:
            return
        base, before = self.app.presets[preset].spec, self.app.drafts.get(preset)
        self._draft = draft = replace(before, base=base) if before else Draft(base)
        self.app.drafts[preset] = draft
        if wanted is not None:
            draft.take(wanted, self._machine_named())
        self.call_after_refresh(self._show_form, draft, field)

    def _machine_named(self) -> str:
        machine = self.app.machine if self.app.machine_file else None
        return "this machine" if machine is None else printable_line(machine.label)

    async def _show_form(self, draft: Draft, field: str = "") -> None:
        self._show_title(draft)  # at once: making the fields takes a while
        slurm = preset_actions.has_slurm()
        if await self.form.show_values(draft.shown_value, slurm=slurm) and slurm:
            self._ask_for_partitions()
        if field:
            self.form.go_to(field)
            self._offers_partition = field == "slurm.partition"
            self.call_after_refresh(self._offer_partition)
        self.replan()

    @on(FieldRow.Edited)
    def _edited(self, message: FieldRow.Edited) -> None:
        self._set_field(message.path, message.text)

    def _set_field(self, path: str, text: str) -> None:
        """Enter ``text`` into the draft. If that changes it, the plan that is shown is out of date,
        and another is made in a moment.
        """
        if self._draft is not None and self._draft.enter(path, text):
            self._serial += 1
            self._when_planned = None
            self.set_timer(DEBOUNCE_S, partial(self._plan_settled, self._serial))

    # The plan of it.

    def _plan_settled(self, serial: int) -> None:
        """Plan the values in the form, unless they have changed or been planned meanwhile."""
        if serial == self._serial:
            self.replan()

    def replan(self) -> None:
        """Plan the values in the form. The answer to an older request is dropped."""
        if self._draft is None or self.app.machine is None:
            return
        self._serial += 1
        self._plan(self._serial, self.app.machine, self._draft.base, self._draft.edits)

    @work(thread=True, exclusive=True, group="plan", name="plan this run", exit_on_error=False)
    def _plan(self, serial: int, machine: Machine, base: RunSpec, edits: Texts) -> None:
        """Plan in a thread: the plan, or what is wrong with the values, and then what other values
        would do, if still wanted.
        """
        from so_tui.launch.launch import preview
        from so_tui.launch.places import machine_of

        try:
            spec = with_values(base, edits)
            # A machine that a file describes is planned for as it is; this one as the run finds it.
            machine = machine if self.app.machine_file else machine_of(spec.slurm, machine)
            plan, launch = preview(spec, machine)
        except (InputError, Refused) as error:
            if isinstance(error, Refused):
                error = reject(error.codes[0], "gpus", "", error.reasons[0], "")
            answer(self, self._show_plan, Planned(serial, None, error.problems))
            return
        answer(self, self._show_plan, Planned(serial, plan, (), launch))
        worker = get_current_worker()
        strips = strips_for(plan, machine, lambda: worker.is_cancelled)
        if strips is not None:
            answer(self, self._show_strips, serial, strips)

    @work(thread=True, group="partitions", name="ask Slurm for its partitions", exit_on_error=False)
    def _ask_for_partitions(self) -> None:
        from so_tui.launch.slurm.client import SlurmError, partitions

        try:
            self.call_later(self._show_partitions, partitions())
        except SlurmError:  # the field takes any name, and submitting says what is wrong
            return

    def _show_partitions(self, partitions: tuple[Partition, ...]) -> None:
        self._partitions = partitions
        self._offer_partition()
        self.replan()

    def _offer_partition(self) -> None:
        """Enter the partition that Slurm takes by default, marked so that typing replaces it, if
        the user came to choose one and has not yet.
        """
        default = next((each for each in self._partitions if each.default and each.open), None)
        draft, path = self._draft, "slurm.partition"
        if not self._offers_partition or draft is None or default is None:
            return
        self._offers_partition = False
        row = next(row for row in self.form.all_rows if row.path == path)
        if draft.values[path] or row.is_typed or not row.has_focus_within:
            return
        self._set_field(path, default.name)
        row.show_value(path, default.name)
        row.query_one(Input).select_all()

    def _show_plan(self, planned: Planned) -> None:
        if planned.serial != self._serial or self._draft is None:
            return
        self._planned = planned
        if planned.plan is not None:
            self._draft.resolve(planned.plan.spec, self._machine_named())
            self._show_chosen(self._draft)
        self._mark_fields(planned, self._draft)
        self._show_title(self._draft)
        self.plan.show(planned)
        waiting, self._when_planned = self._when_planned, None
        if waiting is not None and self.is_current:
            waiting(planned)

    def _show_chosen(self, draft: Draft) -> None:
        """Show what was chosen, in every field in which nothing else is being typed."""
        chosen = draft.chosen
        for row in self.form.all_rows:
            typed = row.is_typed and (row.has_focus_within or row.entered()[1] != AUTO)
            if row.path in chosen and not typed:
                row.show_value(row.path, chosen[row.path])

    def _show_strips(self, serial: int, strips: tuple[Strip, ...]) -> None:
        if serial == self._serial:
            self.plan.show_strips(strips)
            self.refresh_bindings()

    @on(WhatIf.Stepped)
    def _stepped(self, message: WhatIf.Stepped) -> None:
        """Enter the value."""
        path, text = message.path, text_of(message.value)
        self._set_field(path, text)
        for row in self.form.all_rows:
            if row.path == path:
                row.show_value(path, text)

    def on_resize(self) -> None:
        self.call_after_refresh(self.sizes_changed)

    def sizes_changed(self) -> None:
        chosen, size = self.app.settings.panels.form, self.size_of(None)
        self.form.styles.width = None
        if chosen is not None and size is not None:
            self.form.styles.width = replace(size, cells=chosen).grown(0)
        self.call_after_refresh(self.plan.lay_out)
        if self._draft is not None:
            self._show_title(self._draft)

    def size_of(self, panel: Widget | None) -> Size | None:
        """Return the columns of the form, unless the plan stands below it. The plan has what the
        form leaves.
        """
        if self.has_class("-narrow"):
            return None
        step = -4 if panel is not None and self.plan in panel.ancestors else 4
        return Size("form", self.form.outer_size.width, 40, self.size.width - LEAST_PLAN, step=step)

    def _mark_fields(self, planned: Planned, draft: Draft) -> None:
        """Mark fields that differ or are wrong, or make the plan impossible on this machine."""
        problems = _problems_by_row(planned)
        values, slurm = draft.values, preset_actions.has_slurm()
        idle = idle_fields(draft)
        for row in self.form.all_rows:
            path = row.path
            note = _field_note(path, planned.plan, self.app.machine, values["offload.mode"])
            if path == "slurm.partition":
                note = _partition_note(self._partitions, values[path], slurm=slurm)
            row.show_status(
                was=draft.was(path),
                chosen=path in draft.chosen,
                problem=problems.get(path, ""),
                note=note,
            )
            row.show_idle(path in idle and path not in problems and not row.has_focus_within)
        self.form.refused = ""
        self.form.show_about()

    def _show_title(self, draft: Draft) -> None:
        self.query_one("#form-title", Static).update(_changes_title(draft))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "fit":
            return bool(self.plan.fit)
        return super().check_action(action, parameters)

    def action_fit(self) -> None:
        """Change what makes the run fit."""
        values = self.plan.fit
        for path, text in values.items():
            self._set_field(path, text)
        for row in self.form.all_rows:
            if row.path in values:
                row.show_value(row.path, values[row.path])

    # Moving about.

    @property
    def resting(self) -> FormPanel:
        return self.form

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
            self.set_focus(self.form)
        else:
            super().action_leave_field()

    # Commands.

    def once_planned(self, command: Callable[[Planned], None]) -> None:
        """Run ``command`` with the plan of the form's present content, once that plan is made."""
        if (row := self.form.selected) is not None and row.is_typed:
            self._set_field(*row.entered())  # its last key press may still be unannounced
        if self._planned is not None and self._planned.serial == self._serial:
            command(self._planned)
        elif self._draft is not None and self.app.machine is not None:
            self._when_planned = command
            self.replan()

    @_with_plan
    def action_launch(self, planned: Planned) -> None:
        plan, launch = planned.plan, planned.launch
        if plan is not None and preset_actions.refused_elsewhere(self.app, plan.spec):
            return
        if plan is None or launch is None:  # it is impossible
            # The first field that is wrong says so, in its own line.
            if not self.form.go_to_wrong("not launched"):
                texts = [*map(problem_text, planned.problems), *(plan.reason_texts if plan else ())]
                self.notify(texts[0], title="Not launched", severity="error", markup=False)
        elif plan.fits:
            preset_actions.ask_to_launch(self.app, launch)
        else:
            offer = preset_actions.launch_anyway(self.app, launch)
            self.app.post_message(
                Failed(f"{plan.spec.label} does not fit here", plan.reason_texts, offer=offer)
            )

    @_with_plan
    def action_all_reasons(self, planned: Planned) -> None:
        if planned.plan is not None:
            label = planned.plan.spec.label
            preset_actions.show_plan(self.app, label, planned.plan, planned.command)

    @_with_plan
    def action_save(self, planned: Planned) -> None:
        """Ask for a name and save the values under it, as what differs from the preset. Ask again
        before another preset is replaced.
        """
        from so_tui.spec import check_user_name, save_preset
        from so_tui.ui.dialogs import AskText, show_dialog

        draft = self._draft
        if planned.plan is None or draft is None:
            self.notify("Correct the marked fields first", severity="error")
            return
        app, presets, base = self.app, self.app.presets, draft.base.name
        spec = draft.spec

        def save(name: str) -> None:
            with reporting(app, "The preset", "saved"):
                path = save_preset(spec, name, base=base)
                app.notify(f"Saved as {name} in {path}", markup=False)
                app.reload_presets()
                for saved in (base, name):  # their edits are in the file now
                    app.drafts.pop(saved, None)
                self.edit(name)

        def named(name: str) -> None:
            taken = presets.get(name)
            if taken is None or name == base:
                save(name)
            else:
                app.ask(
                    f"Replace your preset {name}?",
                    [taken.path],
                    partial(save, name),
                    yes="Replace",
                    no="No, keep it",
                )

        def read(name: str) -> str:
            check_user_name(name, presets)
            return name

        dialog = AskText(
            "Save as preset",
            "A short name: small letters, digits, - . _",
            Input(f"{base}-mine", compact=True),
            yes="Save",
            read=read,
        )
        show_dialog(app, dialog, named)

    def action_preview_data(self) -> None:
        """Preview the data with the values in the form."""
        from so_tui.ui.data_preview import DataPreviewScreen

        try:
            if (draft := self._draft) is not None:
                self.app.push_screen(DataPreviewScreen(draft.spec))
        except InputError as error:
            self.app.post_message(
                Failed(
                    "Correct these fields before previewing the data",
                    tuple(map(problem_text, error.problems)),
                )
            )

    def action_differences(self) -> None:
        """Show every field that differs from the preset."""
        from so_tui.ui.dialogs import Notice

        if (draft := self._draft) is None:
            return
        lines = [
            f"{path}: {draft.was(path) or 'empty'} → {text or 'empty'}"
            for path, text in sorted(draft.edits.items())
        ] or ["No field differs from the preset."]
        self.app.push_screen(
            Notice(f"What differs from preset {draft.base.name}", lines, bad=False)
        )

    def action_reset(self) -> None:
        """Ask to undo the user's changes."""
        draft = self._draft
        if draft is None or not draft.changes:
            return

        def undo() -> None:
            draft.undo()
            self.call_after_refresh(self._show_form, draft)

        line = f"{plural(len(draft.changes), 'change')} will be lost."
        self.app.ask(f"Back to preset {draft.base.name}?", [line], undo, yes="Undo all changes")

    def action_release(self) -> None:
        """Leave the selected field to the machine again, or keep what was chosen for it; undo the
        change of any other.
        """
        row, draft = self.form.selected, self._draft
        if (
            row is not None
            and draft is not None
            and (draft.release(row.path) or draft.fix(row.path))
        ):
            row.show_value(*draft.shown_value(row.path))
            self.replan()

    @_with_plan
    def action_copy(self, planned: Planned) -> None:
        if planned.command:
            self.app.copy_to_clipboard(planned.command)
            self.notify("Copied the command")

    @on(Button.Pressed)
    async def _button(self, event: Button.Pressed) -> None:
        await self.run_action(event.button.id or "")
