"""What if: the step time over the values of a field, with memory at the present one. Left and right
step the value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from textual import events, getters, on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.message import Message
from textual.widgets import Button, Static

from so_tui.ui import plan_view
from so_tui.ui.form import (
    RATIO,
    Choice,
    Planned,
    Strip,
    Texts,
    label,
    problem_text,
    text_of,
)
from so_tui.ui.lines import StyledLines
from so_tui.ui.plan_view import SIGNS, STYLES
from so_tui.ui.run_rows import bars
from so_tui.ui.text import Content, faint, in_rows, shows_ascii
from so_tui.ui.widgets import keys
from so_tui.units import duration, memory_of, memory_unit, plural
from so_tui.units import memory_size as memory

if TYPE_CHECKING:
    from so_tui.plan.plan import Plan

UNKNOWN = "·"
"""A value whose step time is not predicted."""
BEFORE_BARS, LINES_OF_STRIP = 13, 2
"""Cells of a strip's mark and name, and its lines."""
WIDEST = 100
"""Cells before the first layout."""


class WhatIf(StyledLines, can_focus=True):
    """One line for each strip and one for what its present value means; the strip that is moved on
    is marked.
    """

    BINDINGS = keys("what-if")

    DEFAULT_CSS = """
    WhatIf.-empty { display: none; }
    """

    ALLOW_SELECT = False  # dragging chooses values
    strips: tuple[Strip, ...] = ()
    _marked = 0

    @dataclass
    class Stepped(Message):
        """Another value was chosen."""

        path: str
        value: float

    def show(self, strips: tuple[Strip, ...]) -> None:
        """Show these strips; none hides the panel."""
        self.strips = strips
        self.draw_again()

    @on(events.Resize)
    def draw_again(self) -> None:
        """Draw the strips for the present width and units."""
        self.set_class(not self.strips, "-empty")
        self._marked = min(self._marked, max(0, len(self.strips) - 1))
        keys = "k, or click a bar; the wheel steps"
        if self.has_focus:
            keys = "left and right step the value"
        heading = Content.styled("seconds per step, by value", "bold")
        if heading.cell_length + len(keys) + 3 <= (self.size.width or WIDEST):
            heading += faint(f"   {keys}")
        rows = [heading]
        for index, strip in enumerate(self.strips):
            marked = self.has_focus and index == self._marked
            rows += _strip_lines(strip, self.size.width or WIDEST, marked=marked)
        self.update(in_rows(rows))

    def watch_has_focus(self, has_focus: bool) -> None:
        super().watch_has_focus(has_focus)
        self.draw_again()

    def action_other(self) -> None:
        self._marked = (self._marked + 1) % max(1, len(self.strips))
        self.draw_again()

    def action_step(self, direction: int) -> None:
        if self.strips:
            strip = self.strips[self._marked]
            self._choose(strip, strip.stepped(direction))

    def _choose(self, strip: Strip, value: float | None) -> None:
        if value is not None and value != strip.present:
            moved = replace(strip, present=value)  # before the plan is made anew
            self.strips = tuple(moved if one is strip else one for one in self.strips)
            self.draw_again()
            self.post_message(self.Stepped(strip.path, value))

    # The mouse: a click chooses the value of a bar, as does moving on with the button held; the
    # wheel steps.

    def _strip_at(self, event: events.MouseEvent) -> int | None:
        """Return the strip under the mouse, with its line of figures."""
        at = event.get_content_offset(self)
        index = -1 if at is None else (at.y - 1) // LINES_OF_STRIP
        return index if 0 <= index < len(self.strips) else None

    def on_mouse_down(self, event: events.MouseDown) -> None:
        if (index := self._strip_at(event)) is not None:
            self._marked = index
            self.capture_mouse()
            self._choose_at(event)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if self.app.mouse_captured is self:
            self._choose_at(event)

    def on_mouse_up(self) -> None:
        self.release_mouse()

    def _choose_at(self, event: events.MouseEvent) -> None:
        """Choose the value of the bar that the mouse is above, below or on."""
        if self.strips:
            strip = self.strips[self._marked]
            found = _bar_at(strip, event.x - self.gutter.left)
            self._choose(strip, None if found is None else strip.choices[found].value)

    @on(events.MouseScrollUp)
    @on(events.MouseScrollDown)
    def _wheel(self, event: events.MouseEvent) -> None:
        index = self._strip_at(event)
        if index is not None:
            event.stop()
            event.prevent_default()
            self._marked = index
            self.action_step(1 if isinstance(event, events.MouseScrollUp) else -1)


def _bar_at(strip: Strip, x: int) -> int | None:
    """Return the choice whose bar is in cell ``x``; the present one has a mark on each side."""
    x -= BEFORE_BARS + len(f"{strip.choices[0].value:.2f} ")
    if x > strip.at:
        x = max(strip.at, x - 2)
    return x if 0 <= x < len(strip.choices) else None


def _strip_lines(strip: Strip, width: int, *, marked: bool) -> list[Content]:
    """Return the strip, a bar a value, and below it the figures of the present value. ✗ does not
    fit; · has no predicted time.
    """
    name = f"{'ratio' if strip.path == RATIO else 'Adam share':<11}"
    times = (choice.plan.step_s for choice in strip.choices)
    heights = bars([math.nan if step_s is None else step_s for step_s in times])
    present = strip.choices[strip.at]
    low, high = strip.choices[0].value, strip.choices[-1].value
    pieces = [
        ("▸ " if marked else "  ", "$accent"),
        (name, "bold" if marked else "$faint"),
        (f"{low:.2f} ", "$faint"),
    ]
    for choice, height in zip(strip.choices, heights, strict=True):
        verdict = choice.plan.verdict
        sign = UNKNOWN if choice.plan.step_s is None else height
        sign, style = SIGNS[verdict] if verdict == "does not fit" else sign, STYLES[verdict]
        pieces.append((f"▸{sign}◂", f"bold {style}") if choice is present else (sign, style))
    return [Content.assemble(*pieces, (f" {high:.2f}", "$faint")), _figures(present, width)]


def _figures(choice: Choice, width: int) -> Content:
    """Return ``0.70 ✓ 1.72 s/step ±12% GPU 86.0 of 95.0 GiB host 106 GiB``, as much of it as fits,
    or ``0.50 ✗ host 211 > 111 GiB``; no figure is cut.
    """
    from so_tui.plan.show import shortfall

    plan = choice.plan
    line = Content.assemble(
        f"    {choice.value:.2f}  ", (SIGNS[plan.verdict], STYLES[plan.verdict])
    )
    if not plan.fits:
        unit = f" {memory_unit()[1]}" if plan.shortage else ""
        return Content.assemble(line, (f" {shortfall(plan)}{unit}", "bold"))
    step = f"{duration(plan.step_s)}/step" if plan.step_s else "step not predicted"
    line = Content.assemble(line, (f" {step}", "bold"), plan.step_error_text)
    gpu, host = plan.gpu_bytes, max(plan.host_bytes_per_node.values(), default=0)
    on_gpu = f"   GPU {memory_of(gpu, plan.gpu_capacity_bytes)}" if gpu else ""
    for piece in (on_gpu, f"   host {memory(host)}" if host else ""):
        if line.cell_length + len(piece) <= width:
            line = line + piece
    return line


def nearest_fit(plan: Plan, strips: Sequence[Strip]) -> Texts:
    """Return what to change, by path, so that a run fits: the ratio to the next one that leaves the
    margin, or at least fits, else what the plan says. Nothing where neither is known.
    """
    from so_tui.plan.notes import FitsHere

    choices = [choice for strip in strips if strip.path == RATIO for choice in strip.choices]
    for verdict in ("fits", "tight"):
        fitting = [choice.value for choice in choices if choice.plan.verdict == verdict]
        if fitting:
            return {RATIO: text_of(min(fitting, key=lambda value: abs(value - plan.ratio)))}
    remedy = next((fact for fact in plan.remedies if isinstance(fact, FitsHere)), None)
    changes = remedy.changes if remedy is not None else ()
    return {change.key: text_of(change.after) for change in changes}


# What Configure shows beside the form: the verdict, the what-if strips, the plan of what is in the
# form, and buttons.


class PlanPanel(Vertical):
    """The plan, or what is wrong with the fields. A button's id is the action of the screen that it
    runs.
    """

    what_if = getters.query_one(WhatIf)
    _verdict = getters.query_one("#verdict", Static)
    _text = getters.query_one("#plan-text", Static)
    _planned: Planned | None = None

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
        """Show a plan, or what is wrong with the values that were to be planned: the plan of before
        stays below it, so that nothing jumps while a number is typed.
        """
        plan = planned.plan
        self.query_one("#launch", Button).disabled = plan is None or not planned.command
        self.set_class(plan is None, "-stale")
        if plan is not None:
            self._planned = planned
            self.lay_out()
            return
        count = plural(len(planned.problems), "invalid field")
        self._verdict.update(Content.styled(f"✗ {count}: no plan", "bold $error"))
        if self._planned is None:
            self._text.update(Content("\n\n").join(map(problem_text, planned.problems)))

    @property
    def fit(self) -> Texts:
        """What to change, by path, where the plan does not fit."""
        plan = self._planned.plan if self._planned is not None else None
        return {} if plan is None or plan.fits else nearest_fit(plan, self.what_if.strips)

    def show_strips(self, strips: tuple[Strip, ...]) -> None:
        """Show what other values would do."""
        self.what_if.show(strips)
        self.lay_out()

    def lay_out(self) -> None:
        """Draw the plan for the present width of its pane."""
        planned = self._planned
        self.what_if.draw_again()
        if planned is None or planned.plan is None or self.has_class("-stale"):
            return
        lines = [plan_view.headline(planned.plan, max(30, self._verdict.content_size.width))]
        if fit := self.fit:
            values = ", ".join(f"{label(path)} {text}" for path, text in fit.items())
            lines.append(Content.assemble(("f  ", "bold $accent"), f"use {values}, which fits"))
        self._verdict.update(in_rows(lines))
        pane = self.query_one("#plan-pane").content_size
        width, plain = max(30, pane.width - 1), shows_ascii(self.app)
        self._text.update(plan_view.as_roomy(planned.plan, width, pane.height, plain=plain))
