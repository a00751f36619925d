"""What Configure shows beside the form: the verdict, the what-if strips, the plan of what is in the form, and buttons."""

from __future__ import annotations

from textual import getters
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import Button, Static

from so_tui.ui.form import problem_text
from so_tui.ui.glyphs import shows_ascii
from so_tui.ui.messages import Planned
from so_tui.ui.panels.what_if import WhatIf
from so_tui.ui.text import Content, plural
from so_tui.ui.widgets import plan_view


class PlanPanel(Vertical):
    """The plan, or what is wrong with the fields. A button's id is the action of the screen that it runs."""

    what_if = getters.query_one(WhatIf)
    _verdict = getters.query_one("#verdict", Static)
    _text = getters.query_one("#plan-text", Static)

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        self._planned: Planned | None = None
        super().__init__(id=id, classes=classes)

    def compose(self) -> ComposeResult:
        yield Static(id="verdict")
        yield WhatIf(id="what-if")
        with VerticalScroll(id="plan-pane", can_focus=False):
            yield Static(id="plan-text")
        with Horizontal(id="buttons"):
            yield Button("Launch  F5", id="launch", compact=True, disabled=True)
            yield Button("Save  ^s", id="save", compact=True)
            yield Button(
                "Data  d", id="preview_data", compact=True, tooltip="See the data as the model will"
            )
            yield Button("Copy  y", id="copy", compact=True)

    def show(self, planned: Planned) -> None:
        """Show a plan, or the problems of the values that were to be planned."""
        self._planned = planned
        plan = planned.plan
        self.query_one("#launch", Button).disabled = plan is None or not planned.command
        if plan is not None:
            self.lay_out()
            return
        count = plural(len(planned.problems), "invalid field")
        them = "it" if len(planned.problems) == 1 else "them"
        self._verdict.update(
            Content.styled(f"✗ {count}: correct {them} to get a plan", "bold $error")
        )
        self.what_if.show(())
        self._text.update(Content("\n\n").join(map(problem_text, planned.problems)))

    def lay_out(self) -> None:
        """Draw the plan for the present width of its pane."""
        planned = self._planned
        self.what_if.draw_again()
        if planned is not None and planned.plan is not None:
            self._verdict.update(
                plan_view.headline(planned.plan, max(30, self._verdict.content_size.width))
            )
            width = max(30, self.query_one("#plan-pane").content_size.width - 1)
            self._text.update(
                plan_view.whole(planned.plan, planned.command, width, plain=shows_ascii(self.app))
            )
