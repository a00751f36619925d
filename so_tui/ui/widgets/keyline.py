"""The bottom line: the next keys. One widget, where Textual's Footer is one per key, which costs more than the rest of the first paint."""

from __future__ import annotations

from textual import events
from textual.binding import Binding
from textual.content import Content
from textual.screen import Screen
from textual.widget import Widget


class KeyLine(Widget):
    """Keys in force, as many as fit; each can be clicked. The palette, which has them all, is always there."""

    DEFAULT_CSS = """
    KeyLine { dock: bottom; height: 1; padding: 0 1; background: $footer-background; }
    """

    def __init__(self) -> None:
        self._places: list[tuple[int, int, str]] = []
        super().__init__()

    def on_mount(self) -> None:
        self.screen.bindings_updated_signal.subscribe(self, self._changed)

    def _changed(self, screen: Screen[object]) -> None:
        self.refresh()

    def render(self) -> Content:
        seen: set[str] = set()
        places: list[tuple[int, int, str]] = []
        right = _item("^p", "commands")
        line = Content("")
        for active in self.screen.active_bindings.values():
            binding = active.binding
            if not binding.show or not active.enabled or binding.action in seen or not binding.description:
                continue
            seen.add(binding.action)
            item = _item(self._shown(binding), binding.description)
            if line.cell_length + item.cell_length + right.cell_length + 4 > self.size.width:
                break
            places.append((line.cell_length, line.cell_length + item.cell_length, binding.key))
            line = line + item + "  "
        gap = max(1, self.size.width - line.cell_length - right.cell_length)
        start = line.cell_length + gap
        self._places = [*places, (start, start + right.cell_length, "ctrl+p")]
        return line + " " * gap + right

    def _shown(self, binding: Binding) -> str:
        return "enter" if binding.key == "enter" else self.app.get_key_display(binding)

    def on_click(self, event: events.Click) -> None:
        at = event.get_content_offset(self)
        for start, end, key in self._places:
            if at is not None and start <= at.x < end:
                self.app.simulate_key(key)


def _item(key: str, description: str) -> Content:
    return Content.assemble((key, "bold $footer-key-foreground"), (f" {description}", "$footer-description-foreground"))
