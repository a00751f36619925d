"""The question before a launch, which may name the run; before a job is submitted, with its batch script for editing."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from msgspec.structs import replace
from textual import on
from textual.app import ComposeResult, SuspendNotSupported
from textual.binding import Binding, BindingType
from textual.widgets import Button, Input, Static

from so_tui.ui.dialogs.basic import Question
from so_tui.ui.form import problem_text
from so_tui.ui.text import Content
from so_tui.ui.widgets.entry import Entry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from so_tui.launch import Launch
    from so_tui.launch.executors.slurm.editing import Draft

_CHANGED = "You have changed the batch script. It is submitted as you saved it."


class LaunchQuestion(Question):
    """Asks whether to launch, and what the run is called. While that cannot be a name, the answer is not yes."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("r", "rename", "Rename")]

    def __init__(self, title: str, lines: Sequence[str | Content], launch: Launch) -> None:
        self.launch = launch
        super().__init__(title, lines, yes="Launch", default_yes=True)

    def fields(self) -> ComposeResult:
        yield Entry(
            self.launch.called,
            placeholder=f"name of the run: {self.launch.spec.name}",
            compact=True,
            id="called",
        )
        said = Static(id="said", classes="dialog-answer")
        said.display = False
        yield said

    def buttons(self) -> ComposeResult:
        yield from super().buttons()
        yield Button("Rename  r", id="rename", compact=True)

    @on(Button.Pressed, "#rename")
    def action_rename(self) -> None:
        """Give the keyboard to the name."""
        self.set_focus(self.query_one("#called"))

    def on_descendant_focus(self) -> None:
        """Say with which key the answer is yes: y would be typed into the name."""
        yes = self.query_one("#yes", Button)
        yes.label = "Launch  enter" if isinstance(self.focused, Input) else "Launch  y"
        yes.refresh(layout=True)

    @on(Input.Changed, "#called")
    def _typed(self) -> None:
        self.query_one("#said").display = False

    @on(Input.Submitted, "#called")
    def _named(self) -> None:
        self.action_answer(True)

    def action_answer(self, answer: bool) -> None:
        """Leave with the answer; with yes, the launch has the name that was typed."""
        if not answer or self._take_name():
            self.dismiss(answer)

    def _take_name(self) -> bool:
        """Call the launch what was typed. Return whether it can be called so; else say why not."""
        from so_tui.runs import checked_name
        from so_tui.spec import InputError

        entry = self.query_one("#called", Input)
        text = entry.value.strip()
        try:
            self.launch = replace(self.launch, called=checked_name(text) if text else "")
        except InputError as error:
            said = self.query_one("#said", Static)
            said.display = True
            said.update(Content.assemble(("✗ ", "$error"), *map(problem_text, error.problems)))
            self.set_focus(entry)
            return False
        return True


class JobQuestion(LaunchQuestion):
    """Asks whether to submit a launch. ``draft`` is the user's batch script; None while it is the one that so-tui writes."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("e", "edit", "Edit the script")]

    def __init__(
        self, title: str, lines: Sequence[str | Content], launch: Launch, draft: Draft | None
    ) -> None:
        self.draft = draft
        super().__init__(title, [*lines, _CHANGED], launch)

    def buttons(self) -> ComposeResult:
        yield from super().buttons()
        yield Button("Edit the script  e", id="edit", compact=True)

    def on_mount(self) -> None:
        super().on_mount()
        self._show_draft()

    def _show_draft(self) -> None:
        self.query(".dialog-body Static").last(Static).display = self.draft is not None

    @on(Button.Pressed, "#edit")
    def action_edit(self) -> None:
        """Open the script in the user's editor, which has the terminal until it ends."""
        from so_tui.spec import SoTuiError

        failure = ""
        try:
            with self.app.suspend():
                try:  # an exception that left this block would leave the terminal with the editor
                    self.draft = self._edited()
                except (SoTuiError, OSError) as error:
                    failure = str(error)
        except SuspendNotSupported:
            failure = "This terminal cannot be lent to an editor. Leave the screen and use `so-tui run --edit`."
        if failure:
            self.notify(failure, title="The script is as it was", severity="error", markup=False)
        self._show_draft()

    def _edited(self) -> Draft | None:
        """Return the script that the user saves; None if it is the generated one."""
        from so_tui.launch.executors import executor_of
        from so_tui.launch.executors.slurm.editing import edited, kept

        generated = executor_of(self.launch.spec).preview(self.launch)
        saved = edited(self.draft.script if self.draft else generated)
        if saved != generated:
            return kept(saved, self.launch.spec.name, self.draft)
        if self.draft:
            self.draft.discard()
        return None
