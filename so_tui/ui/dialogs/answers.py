"""What the model answered to the prompts of the spec, step by step."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, Static

from so_tui.runs import RunDirectory
from so_tui.runs.answers import Answers, Asked, read_answers
from so_tui.ui.dialogs.basic import CloseButton
from so_tui.ui.text import Content, duration
from so_tui.units import thousands

READ_S = 2.0
"""Between two readings of a live run's answers."""
EMPTY = (
    "No answers yet. Name questions in the preset, and the model answers them before the first step, every so many steps, and at the "
    "end:\n\nso-tui run PRESET --set prompts.texts='[\"...\"]' --set prompts.every_steps=100"
)


class AnswersScreen(ModalScreen[None]):
    """Shows the newest answers, and those of earlier steps with left and right."""

    CSS_PATH = "dialogs.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,p", "dismiss(None)", "Close"),
        Binding("left", "go(-1)", "Step before"),
        Binding("right", "go(1)", "Next step"),
        Binding("home", "go(-1000)", "First"),
        Binding("end", "go(1000)", "Newest"),
    ]

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._answers = Answers()
        self._step: int | None = None
        """The step that is shown; None for the newest."""
        super().__init__()

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog -wide"):
            yield Static(id="answers-title", classes="dialog-title")
            with VerticalScroll(classes="dialog-body"):
                yield Static(id="answers")
            with Horizontal(classes="dialog-buttons"):
                yield CloseButton()
                yield Button("Step before  ←", compact=True, action="screen.go(-1)")
                yield Button("Next step  →", compact=True, action="screen.go(1)")
                yield Button("First  home", compact=True, action="screen.go(-1000)")

    def on_mount(self) -> None:
        self._read()

    @work(group="answers", name="read the answers", exclusive=True, exit_on_error=False)
    async def _read(self) -> None:
        """Read in a thread until the screen is left."""
        while True:
            self._answers = await asyncio.to_thread(read_answers, self._run)
            self._show()
            await asyncio.sleep(READ_S)

    @property
    def _at(self) -> int:
        """Index of what is shown; -1 without answers."""
        asked = self._answers.asked
        return next(
            (at for at, each in enumerate(asked) if each.step == self._step), len(asked) - 1
        )

    def _show(self) -> None:
        asked = self._answers.asked
        title, text = self.query_one("#answers-title", Static), self.query_one("#answers", Static)
        for button in self.query(Button).exclude("#close"):
            button.display = bool(asked)
        if not asked:
            title.update("Prompts")
            text.update(Content(EMPTY))
            return
        shown = asked[self._at]
        when = "before training" if shown.step == 0 else f"after step {thousands(shown.step)}"
        number = f"   {self._at + 1} of {len(asked)}, in {duration(shown.seconds)}"
        title.update(Content.assemble(f"Prompts {when}", (number, "$faint not bold")))
        text.update(conversation(shown))

    def action_go(self, by: int) -> None:
        asked = self._answers.asked
        if asked:
            at = min(max(self._at + by, 0), len(asked) - 1)
            self._step = asked[at].step if at < len(asked) - 1 else None
            self._show()


def conversation(asked: Asked) -> Content:
    """Return prompts and answers as text."""
    parts = []
    for answer in asked.answers:
        cut = "" if answer.stopped else " …"
        parts.append(
            Content.assemble(
                ("> ", "bold $accent"), (answer.prompt, "bold"), "\n", answer.text, (cut, "$faint")
            )
        )
    return Content("\n\n").join(parts)
