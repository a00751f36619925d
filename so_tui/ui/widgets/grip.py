"""Lines between panels that are pulled with the mouse."""

from __future__ import annotations

from rich.segment import Segment
from textual import events
from textual.message import Message
from textual.strip import Strip

from so_tui.ui.kept_lines import KeepsLines


class Grip(KeepsLines):
    """A line that says how far it is pulled; the screen, which owns the sizes of panels, answers."""

    ALLOW_SELECT = False
    _from: int | None = None
    """Where it was grasped; None while it is not."""

    class Pulled(Message):
        """The line was pulled by ``cells``, down or to the right, since it was grasped; ``done`` once it is let go."""

        def __init__(self, grip: Grip, cells: int, *, done: bool) -> None:
            self.grip, self.cells, self.done = grip, cells, done
            super().__init__()

    def _at(self, event: events.MouseEvent) -> int:
        return int(event.screen_y)

    def on_mouse_down(self, event: events.MouseDown) -> None:
        self._from = self._at(event)
        self.capture_mouse()

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if self._from is not None:
            self.post_message(self.Pulled(self, self._at(event) - self._from, done=False))

    def on_mouse_up(self, event: events.MouseUp) -> None:
        if self._from is not None:
            self.release_mouse()
            self.post_message(self.Pulled(self, self._at(event) - self._from, done=True))
            self._from = None


class Divider(Grip):
    """A line from top to bottom."""

    DEFAULT_CSS = """
    Divider { width: 1; height: 100%; color: $background; &:hover { color: $accent; } }
    """

    def _at(self, event: events.MouseEvent) -> int:
        return int(event.screen_x)

    def render_line(self, y: int) -> Strip:
        return Strip([Segment("│", self.rich_style)], 1)
