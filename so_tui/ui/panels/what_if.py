"""What if: the step time over the values of a field, with memory at the present one. Left and right step the value."""

from __future__ import annotations

import math
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message

from so_tui.ui.loss_curve import bars
from so_tui.ui.text import Content, duration, memory, memory_of
from so_tui.ui.what_if import RATIO, Choice, Strip
from so_tui.ui.widgets.plan_view import SIGNS, STYLES, step_error_text
from so_tui.ui.widgets.styled_lines import StyledLines

NAMES = {RATIO: "ratio"}
OTHER_NAME = "Adam cores"
UNKNOWN = "·"
"""A value whose step time is not predicted."""
BEFORE_BARS, LINES_OF_STRIP = 13, 2
"""Cells of a strip's mark and name, and its lines."""
WIDEST = 100
"""Cells before the first layout."""


class WhatIf(StyledLines, can_focus=True):
    """One line for each strip and one for what its present value means; the strip that is moved on is marked."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "step(-1)", "Less", show=False),
        Binding("right", "step(1)", "More", show=False),
        Binding("up,down", "other", "Other strip", show=False),
    ]

    DEFAULT_CSS = """
    WhatIf.-empty { display: none; }
    """

    ALLOW_SELECT = False  # dragging chooses values
    _dragged: int | None = None
    """The strip on which the mouse button is held."""

    class Stepped(Message):
        """Another value was chosen."""

        def __init__(self, path: str, value: float) -> None:
            self.path, self.value = path, value
            super().__init__()

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.strips: tuple[Strip, ...] = ()
        self._marked = 0

    def show(self, strips: tuple[Strip, ...]) -> None:
        """Show these strips; none hides the panel."""
        self.strips = strips
        self.set_class(not strips, "-empty")
        self.draw_again()

    def stepped(self, path: str, value: float) -> None:
        """Move a mark at once; the plan follows."""
        self.strips = tuple(
            Strip(strip.path, strip.choices, value) if strip.path == path else strip
            for strip in self.strips
        )
        self.draw_again()

    def draw_again(self) -> None:
        """Draw the strips for the present width and units."""
        self._marked = min(self._marked, max(0, len(self.strips) - 1))
        rows = [
            Content.styled(
                "what if   left and right step the value"
                if self.has_focus
                else "what if   k, or click a bar; the wheel steps",
                "bold $faint",
            )
        ]
        for index, strip in enumerate(self.strips):
            rows += strip_lines(
                strip, self.size.width or WIDEST, marked=self.has_focus and index == self._marked
            )
        self.update(Content("\n").join(rows))

    def on_resize(self) -> None:
        self.draw_again()

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
            self.stepped(strip.path, value)
            self.post_message(self.Stepped(strip.path, value))

    # The mouse: a click chooses the value of a bar, as does moving on with the button held; the wheel steps.

    def _strip_at(self, event: events.MouseEvent) -> int | None:
        """Return the strip under the mouse, with its line of figures."""
        at = event.get_content_offset(self)
        index = -1 if at is None else (at.y - 1) // LINES_OF_STRIP
        return index if 0 <= index < len(self.strips) else None

    def on_mouse_down(self, event: events.MouseDown) -> None:
        self._dragged = self._strip_at(event)
        if self._dragged is not None:
            self._marked = self._dragged
            self.capture_mouse()
            self._choose_at(event)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if self._dragged is not None:
            self._choose_at(event)

    def on_mouse_up(self) -> None:
        if self._dragged is not None:
            self._dragged = None
            self.release_mouse()

    def _choose_at(self, event: events.MouseEvent) -> None:
        """Choose the value of the bar that the mouse is above, below or on."""
        if self._dragged is not None and self._dragged < len(self.strips):
            strip = self.strips[self._dragged]
            found = bar_at(strip, event.x - self.gutter.left)
            self._choose(strip, None if found is None else strip.choices[found].value)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self._turn(event, 1)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self._turn(event, -1)

    def _turn(self, event: events.MouseEvent, direction: int) -> None:
        index = self._strip_at(event)
        if index is not None:
            event.stop()
            event.prevent_default()
            self._marked = index
            self.action_step(direction)


def bar_at(strip: Strip, x: int) -> int | None:
    """Return the choice whose bar is in cell ``x``; the present one has a mark on each side."""
    x -= BEFORE_BARS + len(f"{strip.choices[0].value:.2f} ")
    if x > strip.at:
        x = max(strip.at, x - 2)
    return x if 0 <= x < len(strip.choices) else None


def strip_lines(strip: Strip, width: int, *, marked: bool) -> list[Content]:
    """Return the strip, a bar a value, and below it the figures of the present value. ✗ does not fit; · has no predicted time."""
    name = f"{NAMES.get(strip.path, OTHER_NAME):<11}"
    heights = bars(
        [math.nan if choice.step_s is None else choice.step_s for choice in strip.choices]
    )
    pieces: list[tuple[str, str]] = []
    for index, (choice, height) in enumerate(zip(strip.choices, heights, strict=True)):
        style = STYLES[choice.verdict]
        shown = (
            SIGNS[choice.verdict]
            if choice.verdict == "does not fit"
            else UNKNOWN
            if choice.step_s is None
            else height
        )
        pieces.append(
            (
                f"▸{shown}◂" if index == strip.at else shown,
                f"bold {style}" if index == strip.at else style,
            )
        )
    low, high = strip.choices[0].value, strip.choices[-1].value
    line = Content.assemble(
        ("▸ " if marked else "  ", "$accent"),
        (name, "bold" if marked else "$faint"),
        (f"{low:.2f} ", "$faint"),
    )
    return [
        line + Content.assemble(*pieces) + Content.styled(f" {high:.2f}", "$faint"),
        figures(strip.choices[strip.at], width),
    ]


def figures(choice: Choice, width: int) -> Content:
    """Return ``0.70  ✓ step 1.72 s ±12%   GPU 86.0 of 95.0 GiB   host 106 GiB``, as much of it as fits; no figure is cut."""
    if choice.verdict == "does not fit":
        step = f" {choice.verdict}"
    else:
        step = (
            f" step {duration(choice.step_s)}{step_error_text(choice.step_error)}"
            if choice.step_s
            else " step not predicted"
        )
    line = Content(f"    {choice.value:.2f}  ") + Content.assemble(
        (SIGNS[choice.verdict], STYLES[choice.verdict]), step
    )
    pieces = []
    if choice.gpu_bytes:
        pieces.append(f"   GPU {memory_of(choice.gpu_bytes, choice.gpu_capacity_bytes)}")
    if choice.host_bytes:
        pieces.append(f"   host {memory(choice.host_bytes)}")
    for piece in pieces:
        if line.cell_length + len(piece) <= width:
            line = line + piece
    return line
