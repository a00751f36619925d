"""The mouse on a chart: a click points at a position, a drag chooses a range or pushes the axis, the wheel zooms or pushes it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from textual import events
from textual.message import Message
from textual.widget import Widget

from so_tui.ui.series import Axis
from so_tui.ui.widgets.drawing import GUTTER

WHEEL_PAN = 0.1
"""Share of the axis that one turn of the wheel pushes it by."""
DRAGGED_CELLS = 2
"""Cells that the mouse moves with its button held before that is a drag and no click."""


@dataclass(frozen=True, slots=True)
class Drag:
    """The mouse with a button held: where that began and where it is, in cells."""

    start: int
    at: int
    pans: bool
    """Whether the axis is pushed; otherwise a range is chosen."""
    moved: bool = False

    @property
    def far(self) -> bool:
        return self.moved or abs(self.at - self.start) >= DRAGGED_CELLS


class AxisMouse(Widget):
    """A widget with an x axis right of its gutter. What the mouse asks for is posted; the screen, which owns the axis, answers."""

    ALLOW_SELECT = False  # dragging zooms

    axis: Axis | None = None
    inset = 0
    """Cells of a frame at the left and at the right."""
    _drag: Drag | None = None
    _dragged = False
    """Whether the click that follows was a drag."""

    class CursorMoved(Message):
        """A position on the axis was clicked."""

        def __init__(self, x: float) -> None:
            self.x = x
            super().__init__()

    class Zoomed(Message):
        """The wheel was turned: zoom by ``factor``, below 1 to zoom in, around ``x``."""

        def __init__(self, factor: float, x: float) -> None:
            self.factor, self.x = factor, x
            super().__init__()

    class Ranged(Message):
        """A range of the axis was dragged over."""

        def __init__(self, low: float, high: float) -> None:
            self.low, self.high = low, high
            super().__init__()

    class Panned(Message):
        """The axis was pushed by a share of its width."""

        def __init__(self, share: float) -> None:
            self.share = share
            super().__init__()

    def draw_again(self) -> None:
        """Draw anew after a change of the chosen range."""
        raise NotImplementedError

    @property
    def chosen(self) -> tuple[int, int] | None:
        """First cell and end of the range that is being dragged over."""
        drag = self._drag
        if drag is None or drag.pans or not drag.far:
            return None
        first, last = sorted((drag.start, drag.at))
        return (first, last) if first < last else None

    def _x_at(self, offset: int) -> float | None:
        cell, width = offset - self.inset - GUTTER, self.columns
        if self.axis is None or width < 1 or not 0 <= cell < width:
            return None
        return self.axis.low + (cell + 0.5) / width * (self.axis.high - self.axis.low)

    @property
    def columns(self) -> int:
        """Cells of the axis."""
        return self.size.width - 2 * self.inset - GUTTER

    def on_click(self, event: events.Click) -> None:
        x = self._x_at(event.x)
        if x is not None and not self._dragged:
            self.post_message(self.CursorMoved(x))

    def on_mouse_down(self, event: events.MouseDown) -> None:
        self._dragged = False
        if self._x_at(event.x) is not None:
            self._drag = Drag(event.x, event.x, pans=event.button != 1 or event.shift or event.ctrl)
            self.capture_mouse()

    def on_mouse_move(self, event: events.MouseMove) -> None:
        drag, first = self._drag, self.inset + GUTTER
        if drag is None or event.x == drag.at:
            return
        moved = replace(drag, at=min(first + self.columns, max(first, event.x)))
        if not moved.pans:
            self._drag = moved
            self.draw_again()
        elif moved.far:
            self._dragged = True
            self.post_message(self.Panned((drag.start - moved.at) / max(1, self.columns)))
            self._drag = replace(moved, start=moved.at, moved=True)

    def on_mouse_up(self, event: events.MouseUp) -> None:
        drag, self._drag = self._drag, None
        if drag is None:
            return
        self.release_mouse()
        if drag.far and not drag.pans:
            self._dragged = True
            low, high = (
                self._x_at(min(cell, self.inset + GUTTER + self.columns - 1))
                for cell in sorted((drag.start, drag.at))
            )
            if low is not None and high is not None:
                self.post_message(self.Ranged(low, high))
            self.draw_again()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self._wheel(event, 0.7)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self._wheel(event, 1 / 0.7)

    def on_mouse_scroll_left(self, event: events.MouseScrollLeft) -> None:
        self._push(event, -WHEEL_PAN)

    def on_mouse_scroll_right(self, event: events.MouseScrollRight) -> None:
        self._push(event, WHEEL_PAN)

    def _wheel(self, event: events.MouseEvent, factor: float) -> None:
        if event.shift or event.ctrl:
            self._push(event, -WHEEL_PAN if factor < 1 else WHEEL_PAN)
            return
        x = self._x_at(event.x)
        if x is not None:
            event.stop()
            event.prevent_default()
            self.post_message(self.Zoomed(factor, x))

    def _push(self, event: events.MouseEvent, share: float) -> None:
        event.stop()
        event.prevent_default()
        self.post_message(self.Panned(share))
