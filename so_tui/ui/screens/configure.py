"""Configure: everything a run needs, and beside it the plan, updated while you type."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, ClassVar

from textual import getters, on, work
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.timer import Timer
from textual.widget import Widget
from textual.widgets import Button, Static
from textual.worker import get_current_worker

from so_tui.spec import InputError, RunSpec, with_values
from so_tui.trust.printable import printable_line
from so_tui.ui import launching, planning, slurm
from so_tui.ui.drafts import Drafts
from so_tui.ui.field_notes import field_note, impossible_field, partition_note, problems_by_row
from so_tui.ui.form import problem_text, text_of
from so_tui.ui.messages import Compared, Failed, Partitions, Planned
from so_tui.ui.page import OTHER_MACHINE
from so_tui.ui.panels.form import FormPanel
from so_tui.ui.panels.plan import PlanPanel
from so_tui.ui.panels.what_if import WhatIf
from so_tui.ui.resizing import ResizablePage, Size
from so_tui.ui.screens import changes
from so_tui.ui.widgets.field import FieldRow
from so_tui.ui.widgets.grip import Divider

if TYPE_CHECKING:
    from so_tui.launch.executors.slurm.partitions import Partition

DEBOUNCE_S = 0.12
LEAST_PLAN = 44
"""Columns that are left for the plan, however wide the form is made."""


class ConfigureScreen(ResizablePage):
    PAGE = "configure"
    CSS_PATH: ClassVar[list[str | PurePath]] = ["configure.tcss", "../panels/form.tcss"]
    AUTO_FOCUS = ""
    # Nothing is focused at first, so that single keys are commands; tab goes to the first field.
    HELP_TEXT = (
        "Every change is planned immediately: whether it fits, how fast it will be, which command would start. • marks fields that you "
        "changed, ★ those that have what is recommended for the machine instead of the preset's value, ✗ those that cannot run. Up and "
        "down move between fields, / finds one; − and + step a number, as shift with up and down does. The what-if strips show the step "
        "time over ratio and Adam cores: a bar a value, ✗ where it does not fit. Leave a text field with esc to use single keys."
    )
    SIZES = ("form",)
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "l,f5",
            "launch",
            "Launch",
            key_display="l/F5",
            id="launch",
            tooltip="Start this run (asks once)",
        ),
        Binding("ctrl+s", "save", "Save", id="save", tooltip="Save these settings as a preset"),
        Binding(
            "equals_sign",
            "differences",
            "Changes",
            key_display="=",
            id="differences",
            tooltip="What differs from the preset",
        ),
        Binding(
            "u",
            "reset",
            "Undo",
            id="reset",
            tooltip="Undo your changes; once more, use the preset as it is",
        ),
        Binding(
            "d",
            "preview_data",
            "Data",
            id="preview-data",
            tooltip="See the data as the model will: rows, lengths, packing, what is dropped",
        ),
        Binding(
            "y", "copy", "Copy", id="copy", tooltip="Copy the exact command that would be started"
        ),
        Binding(
            "slash", "find", "Find", key_display="/", id="find", tooltip="Find a field by its name"
        ),
        Binding(
            "k",
            "what_if",
            "What if",
            show=False,
            id="what-if",
            tooltip="Step ratio and Adam cores with left and right",
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
        """Show a preset with its unsaved edits; ``wanted``, a recommendation, is laid over them and replaces an earlier one.

        The keyboard goes to ``field``, if a path is given.
        """
        catalog = self.app.catalog
        if catalog is None or preset not in catalog.presets:
            return
        self._drafts.open(catalog.presets[preset].spec, wanted, self._machine_named)
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
        if (
            await self.form.show_values(self._drafts.shown_value, slurm=slurm.has_slurm())
            and slurm.has_slurm()
        ):
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
        """Enter ``text`` into the draft, and return whether that changed it; the plan that is shown is then out of date."""
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
        machine = self.app.machine
        assert machine is not None
        worker = get_current_worker()
        for answer in planning.answers(
            serial, base, edits, machine, bool(self.app.machine_file), lambda: worker.is_cancelled
        ):
            self.post_message(answer)

    @work(thread=True, group="partitions", name="ask Slurm for its partitions", exit_on_error=False)
    def _ask_for_partitions(self) -> None:
        from so_tui.launch.executors.slurm.commands import SlurmError
        from so_tui.launch.executors.slurm.partitions import partitions

        try:
            self.post_message(Partitions(partitions()))
        except SlurmError:  # the field takes any name, and submitting says what is wrong
            return

    @on(Partitions)
    def _show_partitions(self, message: Partitions) -> None:
        self._partitions = message.partitions
        self.replan()

    @on(Planned)
    def _show_plan(self, message: Planned) -> None:
        if message.serial != self._serial or self._drafts.base is None:
            return
        self._planned = message
        self._mark_fields(message, *impossible_field(message.plan))
        self._show_title()
        self.plan.show(message)
        waiting, self._when_planned = self._when_planned, None
        if waiting is not None and self.is_current:
            waiting(message)

    @on(Compared)
    def _show_strips(self, message: Compared) -> None:
        if message.serial == self._serial:
            self.plan.what_if.show(message.strips)

    @on(WhatIf.Stepped)
    def _stepped(self, message: WhatIf.Stepped) -> None:
        """Enter the value, and the mode that it belongs to where the preset leaves that to the planner."""
        plan = self._planned.plan if self._planned is not None else None
        values = {message.path: text_of(message.value)}
        if plan is not None and plan.spec.offload.mode != self._drafts.values.get("offload.mode"):
            values = {"offload.mode": plan.mode, "offload.ratio": text_of(plan.ratio), **values}
        changed = [self._set_field(path, text) for path, text in values.items()]
        self.form.set_values(values)
        if any(changed):
            self._timer = self.set_timer(DEBOUNCE_S, self.replan)

    def on_resize(self) -> None:
        self.call_after_refresh(self.sizes_changed)

    def sizes_changed(self) -> None:
        chosen = self.app.settings.panels.form
        self.form.styles.width = (
            None
            if chosen is None or self.has_class("-narrow")
            else replace(self._form_size(), cells=chosen).grown(0)
        )
        self.call_after_refresh(self.plan.lay_out)
        if self._drafts.base is not None:
            self._show_title()

    def size_of(self, panel: Widget | None) -> Size | None:
        """Return the columns of the form, unless the plan stands below it. The plan has what the form leaves."""
        in_plan = panel is not None and self.plan in panel.ancestors
        return (
            None
            if self.has_class("-narrow")
            else replace(self._form_size(), step=-4 if in_plan else 4)
        )

    def _form_size(self) -> Size:
        return Size("form", self.form.size.width, 40, self.size.width - LEAST_PLAN)

    def _mark_fields(self, message: Planned, field: str = "", reason: str = "") -> None:
        """Mark fields that differ or are wrong; ``field`` is the one that makes the plan impossible on this machine."""
        problems = (
            problems_by_row(message.problems)
            if message.problems
            else {field: f"{reason}."}
            if field
            else {}
        )
        given_mode = self._drafts.values.get("offload.mode", "")

        def note_of(path: str) -> str:
            if path == "slurm.partition":
                return partition_note(
                    self._partitions,
                    self._drafts.values.get("slurm.partition", ""),
                    slurm=slurm.has_slurm(),
                )
            return field_note(path, message.plan, self.app.machine, given_mode)

        self.form.mark(self._drafts.was, self._drafts.preset_value, problems, note_of)

    def _show_title(self) -> None:
        title = self.query_one("#form-title", Static)
        title.update(changes.title(self._drafts, title.content_size.width or self.size.width))

    @property
    def _machine_named(self) -> str:
        """The machine that a run is planned for, in words."""
        return (
            printable_line(self.app.machine.label)
            if self.app.machine_file and self.app.machine
            else "this machine"
        )

    # Moving about.

    def action_field(self, distance: int) -> None:
        self.form.move(distance)

    def action_find(self) -> None:
        self.form.open_find()

    def action_what_if(self) -> None:
        if self.plan.what_if.strips:
            self.set_focus(
                self.plan.what_if
            )  # which shows it where only the plan has room otherwise
        else:
            self.notify("What if compares offload ratios and Adam cores: this plan has none")

    def action_leave_field(self) -> None:
        if self.form.close_find():
            self.set_focus(None)
        else:
            super().action_leave_field()

    # Commands.

    def _once_planned(self, command: Callable[[Planned], None]) -> None:
        """Run ``command`` with the plan of what is in the form now, which may not have been made yet."""
        if (
            entered := self.form.entered()
        ) is not None:  # its last key press may not have been announced yet
            self._set_field(*entered)
        if self._planned is not None and self._planned.serial == self._serial:
            command(self._planned)
        elif self._drafts.base is not None and self.app.machine is not None:
            self._when_planned = command
            self.replan()

    def action_launch(self) -> None:
        self._once_planned(self._launch)

    def _launch(self, planned: Planned) -> None:
        if planned.plan is not None and launching.refused_elsewhere(self.app, planned.plan.spec):
            return
        if planned.plan is None or not planned.plan.possible:
            self._go_to_first_problem(planned)
        elif not planned.plan.fits:
            title = f"{planned.plan.spec.label} does not fit here"
            self.app.post_message(
                Failed(
                    title,
                    planned.plan.reason_texts,
                    offer=launching.launch_anyway(self.app, planned.launch),
                )
            )
        elif planned.launch is not None:
            launching.ask_to_launch(self.app, planned.launch)

    def _go_to_first_problem(self, planned: Planned) -> None:
        """Let the first field that is wrong say so, in its own line; without one, notify."""
        if not self.form.go_to_wrong("not launched"):
            texts = [
                *map(problem_text, planned.problems),
                *(planned.plan.reason_texts if planned.plan else ()),
            ]
            self.notify(texts[0], title="Not launched", severity="error", markup=False)

    def action_save(self) -> None:
        self._once_planned(self._save)

    def _save(self, planned: Planned) -> None:
        base = self._drafts.base
        if planned.plan is None or base is None:
            self.notify("Correct the marked fields first", severity="error")
            return
        from so_tui.ui.screens.save_preset import ask_to_save

        ask_to_save(self.app, with_values(base, self._drafts.edits), base.name, self.continue_with)

    def action_preview_data(self) -> None:
        """Preview the data with the values in the form."""
        if self._drafts.base is None:
            return
        from so_tui.ui.dialogs.data_preview import DataPreviewScreen

        try:
            self.app.push_screen(
                DataPreviewScreen(with_values(self._drafts.base, self._drafts.edits))
            )
        except InputError as error:
            self.app.post_message(
                Failed(
                    "Correct these fields before previewing the data",
                    tuple(map(problem_text, error.problems)),
                )
            )

    def action_differences(self) -> None:
        changes.show_differences(self.app, self._drafts)

    def action_reset(self) -> None:
        changes.ask_to_undo(
            self.app, self._drafts, lambda: self.call_after_refresh(self._show_form)
        )

    def action_copy(self) -> None:
        self._once_planned(self._copy)

    def _copy(self, planned: Planned) -> None:
        if planned.command:
            self.app.copy_to_clipboard(planned.command)
            self.notify("Copied the command")

    @on(Button.Pressed)
    async def _button(self, event: Button.Pressed) -> None:
        await self.run_action(event.button.id or "")
