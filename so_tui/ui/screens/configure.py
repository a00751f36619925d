"""Configure: everything a run needs, and beside it the plan, updated while you type."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from typing import ClassVar

from textual import on, work
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.message import Message
from textual.timer import Timer
from textual.widget import Widget
from textual.widgets import Button, Static

from so_tui.spec import InputError, Problem, Refused, RunSpec, field_index, with_values
from so_tui.ui.field_notes import field_note, impossible_field, partition_note
from so_tui.ui.form import (
    GROUPS,
    LENGTH,
    LENGTH_KEYS,
    SLURM,
    advanced_paths,
    edits_between,
    label,
    length_of,
    typed_over,
    values_of,
    with_edit,
)
from so_tui.ui.messages import Failed, Planned
from so_tui.ui.page import OTHER_MACHINE, Page
from so_tui.ui.text import Content, plural
from so_tui.ui.widgets import plan_view
from so_tui.ui.widgets.field import FieldRow

DEBOUNCE_S = 0.12


class Partitions(Message):
    """Slurm has said which partitions this user sees."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        super().__init__()


def has_slurm() -> bool:
    """Return whether jobs can be submitted from here."""
    return shutil.which("sbatch") is not None


class ConfigureScreen(Page):
    PAGE = "configure"
    CSS_PATH = "configure.tcss"
    AUTO_FOCUS = ""
    # Nothing is focused at first, so that single keys are commands; tab goes to the first field.
    HELP_TEXT = (
        "Every change is planned immediately: whether it fits, how fast it will be, which command would start. • marks fields that differ "
        "from the preset, ✗ fields that cannot run. Leave a text field with esc to use single keys; F5 and ^s work everywhere."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("l,f5", "launch", "Launch", key_display="l/F5", id="launch", tooltip="Start this run (asks once)"),
        Binding("ctrl+s", "save", "Save", id="save", tooltip="Save these settings as a preset"),
        Binding("equals_sign", "differences", "Changes", key_display="=", id="differences", tooltip="What differs from the preset"),
        Binding("u", "reset", "Undo", id="reset", tooltip="Back to what the preset says"),
        Binding(
            "d",
            "preview_data",
            "Data",
            id="preview-data",
            tooltip="See the data as the model will: rows, lengths, packing, what is dropped",
        ),
        Binding("y", "copy", "Copy", id="copy", tooltip="Copy the exact command that would be started"),
        OTHER_MACHINE,
    ]

    def __init__(self) -> None:
        self._base: RunSpec | None = None
        self._base_values: dict[str, str] = {}
        self._drafts: dict[str, dict[str, str]] = {}
        self._recommended_edits: dict[str, dict[str, str]] = {}
        """The part of each draft that a recommendation filled in. It need not be saved: choosing the preset again brings it back."""
        self._planned: Planned | None = None
        self._serial = 0
        self._timer: Timer | None = None
        self._partitions: tuple[str, ...] = ()
        self._when_planned: Callable[[Planned], None] | None = None
        """The command that waits for the plan of the newest edit."""
        super().__init__()

    def body(self) -> Iterable[Widget]:
        yield Static("Choose a preset first: press 1, then enter on a row.", id="form-title")
        with Horizontal(id="columns"):
            yield VerticalScroll(id="form", can_focus=False)
            with Vertical(id="plan"):
                yield Static(id="verdict")
                with VerticalScroll(id="plan-pane", can_focus=False):
                    yield Static(id="plan-text")
                with Horizontal(id="buttons"):
                    yield Button("Launch  F5", id="launch", compact=True, disabled=True)
                    yield Button("Save  ^s", id="save", compact=True)
                    yield Button("Data  d", id="preview_data", compact=True, tooltip="See the data as the model will")
                    yield Button("Copy  y", id="copy", compact=True)

    def on_mount(self) -> None:
        self.watch(self.app, "machine", self._machine_known)

    def _machine_known(self) -> None:
        catalog = self.app.catalog
        if self.app.machine is None or catalog is None:
            return
        if self._base is None and catalog.presets:
            self.edit(list(catalog.presets)[-1])
        else:
            self.replan()

    # What is edited.

    @property
    def _edits(self) -> dict[str, str]:
        return self._drafts.setdefault(self._base.name, {}) if self._base else {}

    def edit(self, preset: str, wanted: RunSpec | None = None) -> None:
        """Show a preset with its unsaved edits; ``wanted``, a recommendation, is laid over them and replaces an earlier one."""
        catalog = self.app.catalog
        if catalog is None or preset not in catalog.presets:
            return
        self._base = catalog.presets[preset].spec
        self._base_values = values_of(self._base)
        if wanted is not None:
            typed = typed_over(self._drafts.get(preset, {}), self._recommended_edits.get(preset, {}))
            self._recommended_edits[preset] = edits_between(self._base, wanted)
            self._drafts[preset] = typed | self._recommended_edits[preset]
        self.call_after_refresh(self._show_form)

    def continue_with(self, preset: str) -> None:
        """Show the preset that the draft was saved as, and forget the draft."""
        for name in {preset, self._base.name if self._base else preset}:
            self._forget(name)
        self.edit(preset)

    def _forget(self, preset: str) -> None:
        self._drafts.pop(preset, None)
        self._recommended_edits.pop(preset, None)

    def unsaved(self) -> dict[str, int]:
        """Return how many fields of each preset have unsaved edits."""
        counts = {preset: len(typed_over(edits, self._recommended_edits.get(preset, {}))) for preset, edits in self._drafts.items()}
        return {preset: count for preset, count in counts.items() if count}

    async def _show_form(self) -> None:
        form = self.query_one("#form", VerticalScroll)
        values = {**self._base_values, **self._edits}
        if form.query(FieldRow):
            for row in form.query(FieldRow):
                row.show_value(*self._shown_value(row.path, values))
        else:
            widgets: list[Widget] = []
            for title, paths in (*GROUPS, ("Advanced", advanced_paths())):
                if title == SLURM and not has_slurm():
                    continue
                widgets.append(Static(title, classes="group"))
                widgets += [FieldRow(path, field_index().get(path), *self._shown_value(path, values)) for path in paths]
            await form.mount_all(widgets)
            form.query_one("#field-slurm-partition").disabled = not has_slurm() and not values.get("slurm.partition")
            if has_slurm():
                self._ask_for_partitions()
        self.replan()

    def _shown_value(self, path: str, values: dict[str, str]) -> tuple[str, str]:
        """Return the key that a row shows and its text."""
        if path == LENGTH:
            return length_of({**dict.fromkeys(LENGTH_KEYS, "0"), **self._length_values(values)})
        return path, values.get(path, "")

    def _length_values(self, values: dict[str, str]) -> dict[str, str]:
        """Return the lengths in force: an edited one hides those of the preset."""
        typed = {path: text for path, text in self._edits.items() if path in LENGTH_KEYS}
        return typed or {path: values.get(path, "0") for path in LENGTH_KEYS}

    @on(FieldRow.Edited)
    def _edited(self, message: FieldRow.Edited) -> None:
        if self._base is None:
            return
        if self._set_field(message.path, message.text):
            self._timer = self.set_timer(DEBOUNCE_S, self.replan)

    def _set_field(self, path: str, text: str) -> bool:
        """Enter ``text`` into the draft, and return whether that changed it; the plan that is shown is then out of date."""
        edits = with_edit(self._edits, self._base_values, path, text)
        if self._base is None or edits == self._edits:
            return False
        self._drafts[self._base.name] = edits
        self._serial += 1
        self._when_planned = None
        if self._timer is not None:
            self._timer.stop()
        return True

    # The plan of it.

    def replan(self) -> None:
        """Plan the values in the form. The answer to an older request is dropped."""
        if self._base is None or self.app.machine is None:
            return
        if self._timer is not None:
            self._timer.stop()
        self._serial += 1
        self._plan(self._serial, self._base, dict(self._edits))

    @work(thread=True, exclusive=True, group="plan", name="plan this run", exit_on_error=False)
    def _plan(self, serial: int, base: RunSpec, edits: dict[str, str]) -> None:
        from so_tui.launch import machine_of, preview

        machine = self.app.machine
        assert machine is not None
        try:
            spec = with_values(base, edits)
            plan, launch = preview(spec, machine if self.app.machine_file else machine_of(spec, machine))
        except InputError as error:
            self.post_message(Planned(serial, None, error.problems))
            return
        except Refused as error:
            problems = (Problem(code=error.codes[0], field="gpus", value="", message=error.reasons[0], remedy=""),)
            self.post_message(Planned(serial, None, problems))
            return
        self.post_message(Planned(serial, plan, (), launch))

    @work(thread=True, group="partitions", name="ask Slurm for its partitions", exit_on_error=False)
    def _ask_for_partitions(self) -> None:
        from so_tui.launch.executors.slurm.commands import SlurmError, partitions

        try:
            self.post_message(Partitions(partitions()))
        except SlurmError:  # the field takes any name, and submitting says what is wrong
            return

    @on(Partitions)
    def _show_partitions(self, message: Partitions) -> None:
        self._partitions = message.names
        self.replan()

    @on(Planned)
    def _show_plan(self, message: Planned) -> None:
        if message.serial != self._serial or self._base is None:
            return
        self._planned = message
        self._mark_fields(message, *impossible_field(message.plan))
        self._show_title()
        plan = message.plan
        self.query_one("#launch", Button).disabled = plan is None or not message.command
        if plan is None:
            count = plural(len(message.problems), "invalid field")
            them = "it" if len(message.problems) == 1 else "them"
            self.query_one("#verdict", Static).update(Content.styled(f"✗ {count}: correct {them} to get a plan", "bold $error"))
            lines = [
                Content.assemble((f"{label(problem.field)}: ", "bold"), f"{problem.message}. {problem.advice}")
                for problem in message.problems
            ]
            self.query_one("#plan-text", Static).update(Content("\n\n").join(lines))
        else:
            self.query_one("#verdict", Static).update(plan_view.headline(plan))
            self._lay_out_plan()
        waiting, self._when_planned = self._when_planned, None
        if waiting is not None and self.is_current:
            waiting(message)

    def _lay_out_plan(self) -> None:
        """Draw the plan for the present width of its pane."""
        planned = self._planned
        if planned is not None and planned.plan is not None:
            width = max(30, self.query_one("#plan-pane").content_size.width - 1)
            self.query_one("#plan-text", Static).update(plan_view.whole(planned.plan, planned.command, width))

    def on_resize(self) -> None:
        self.call_after_refresh(self._lay_out_plan)

    def _mark_fields(self, message: Planned, field: str = "", reason: str = "") -> None:
        """Mark fields that differ or are wrong; ``field`` is the one that makes the plan impossible on this machine."""
        problems = {field: f"{reason}."} if field else {}
        for problem in message.problems:
            path = LENGTH if problem.field in LENGTH_KEYS else problem.field.partition("[")[0]  # a source of a mixture has no row
            problems.setdefault(path, problem.remedy or f"{problem.message}.")
        edits = self._edits
        given_mode = edits.get("offload.mode", self._base_values.get("offload.mode", ""))
        for row in self.query(FieldRow):
            if row.path == LENGTH:
                edited = any(path in edits for path in LENGTH_KEYS)
                was = " ".join(reversed(self._length_was())) if edited else None
            else:
                was = self._base_values.get(row.path, "") if row.path in edits else None
            note = field_note(row.path, message.plan, self.app.machine, given_mode)
            if row.path == "slurm.partition":
                note = partition_note(self._partitions, slurm=has_slurm())
            row.show_status(was=was, problem=problems.get(row.path, ""), note=note)

    def _length_was(self) -> tuple[str, str]:
        key, text = length_of(self._base_values)
        return key.rpartition(".")[2], text

    def _show_title(self) -> None:
        assert self._base is not None
        changes = f"{plural(len(self._edits), 'change')}" if self._edits else "no changes"
        self.query_one("#form-title", Static).update(
            Content.assemble((self._base.label, "bold"), (f"   preset {self._base.name}, {changes}", "$faint"))
        )

    # Commands.

    def _once_planned(self, command: Callable[[Planned], None]) -> None:
        """Run ``command`` with the plan of what is in the form now, which may not have been made yet."""
        for row in self.query(FieldRow):
            if row.has_focus_within:  # its last key press may not have been announced yet
                self._set_field(*row.entered())
        if self._planned is not None and self._planned.serial == self._serial:
            command(self._planned)
        elif self._base is not None and self.app.machine is not None:
            self._when_planned = command
            self.replan()

    def action_launch(self) -> None:
        self._once_planned(self._launch)

    def _launch(self, planned: Planned) -> None:
        if planned.plan is None or not planned.plan.possible:
            self._go_to_first_problem(planned)
        elif not planned.plan.fits:
            title = f"{planned.plan.spec.label} does not fit here"
            self.app.post_message(Failed(title, planned.plan.reason_texts, retry_forced=planned.launch))
        elif planned.launch is not None:
            self.app.ask_launch(planned.launch, plan_view.launch_facts(planned.plan))

    def _go_to_first_problem(self, planned: Planned) -> None:
        if planned.problems:
            text = f"{label(planned.problems[0].field)}: {planned.problems[0].message}"
        else:
            text = planned.plan.reason_texts[0] if planned.plan else ""
        self.notify(text, title="Not launched", severity="error", markup=False)
        rows = self.query(FieldRow).filter(".-wrong")
        if rows:
            rows.first().scroll_visible()
            rows.first().focus_control()

    def action_save(self) -> None:
        self._once_planned(self._save)

    def _save(self, planned: Planned) -> None:
        base = self._base
        if planned.plan is None or base is None:
            self.notify("Correct the marked fields first", severity="error")
            return
        from so_tui.ui.screens.save_preset import ask_to_save

        ask_to_save(self.app, with_values(base, self._edits), base.name)

    def action_preview_data(self) -> None:
        """Preview the data with the values in the form."""
        if self._base is None:
            return
        from so_tui.ui.screens.data_preview import DataPreviewScreen

        try:
            self.app.push_screen(DataPreviewScreen(with_values(self._base, self._edits)))
        except InputError as error:
            self.app.post_message(Failed("Correct these fields before previewing the data", tuple(map(str, error.problems))))

    def action_differences(self) -> None:
        from so_tui.ui.screens.dialogs import Notice

        lines = [f"{path}: {self._base_values.get(path, '') or 'empty'} → {text or 'empty'}" for path, text in sorted(self._edits.items())]
        title = f"What differs from preset {self._base.name}" if self._base else "No preset chosen"
        self.app.push_screen(Notice(title, lines or ["No field differs from the preset."], bad=False))

    def action_reset(self) -> None:
        if self._base is None or not self._edits:
            return
        from so_tui.ui.screens.dialogs import Question

        def answered(yes: bool | None) -> None:
            if yes and self._base is not None:
                self._forget(self._base.name)
                self.call_after_refresh(self._show_form)

        lines = [f"{plural(len(self._edits), 'change')} will be lost."]
        self.app.push_screen(Question(f"Back to preset {self._base.name}?", lines, yes="Undo all changes"), answered)

    def action_copy(self) -> None:
        self._once_planned(self._copy)

    def _copy(self, planned: Planned) -> None:
        if planned.command:
            self.app.copy_to_clipboard(planned.command)
            self.notify("Copied the command")

    @on(Button.Pressed)
    async def _button(self, event: Button.Pressed) -> None:
        await self.run_action(event.button.id or "")
