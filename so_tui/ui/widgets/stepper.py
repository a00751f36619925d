"""``−`` and ``+`` beside the number of the selected field, for the mouse."""

from __future__ import annotations

from textual import events
from textual.message import Message
from textual.widgets import Static

from so_tui.ui.stepping import Direction


class Stepper(Static):
    """Asks for the next value in its direction when it is clicked; the wheel over it asks for values in both.

    The wheel elsewhere scrolls the form: over the number itself it would change what somebody only scrolls past.
    """

    DEFAULT_CSS = """
    Stepper { width: 3; height: 1; text-align: center; background: $panel; color: $accent; }
    Stepper:hover { background: $accent; color: $background; }
    """

    class Stepped(Message):
        """Another value is wanted."""

        def __init__(self, direction: Direction) -> None:
            self.direction = direction
            super().__init__()

    def __init__(self, direction: Direction) -> None:
        self._direction = direction
        super().__init__("+" if direction > 0 else "−")

    def on_click(self, event: events.Click) -> None:
        event.stop()
        self.post_message(self.Stepped(self._direction))

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self._wheel(event, 1)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self._wheel(event, -1)

    def _wheel(self, event: events.MouseEvent, direction: Direction) -> None:
        event.stop()
        event.prevent_default()
        self.post_message(self.Stepped(direction))
