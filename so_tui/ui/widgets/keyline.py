"""The bottom line: the next keys. One widget, where Textual's Footer is one per key, which costs more than the rest of the first paint."""

from __future__ import annotations

from textual.binding import Binding
from textual.content import Content
from textual.screen import Screen
from textual.widget import Widget


class KeyLine(Widget):
    """Keys in force, as many as fit; each can be clicked. The palette, which has them all, is always there."""

    DEFAULT_CSS = """
    KeyLine {
        dock: bottom; height: 1; padding: 0 1; background: $footer-background;
        link-style: none; link-color: $footer-description-foreground;
        link-style-hover: none; link-color-hover: $accent; link-background-hover: $footer-background;
    }
    """

    def on_mount(self) -> None:
        self.screen.bindings_updated_signal.subscribe(self, self._changed)

    def _changed(self, screen: Screen[object]) -> None:
        self.refresh()

    def render(self) -> Content:
        seen: set[str] = set()
        right = self._item("ctrl+p", "^p", "commands")
        line = Content("")
        for active in self.screen.active_bindings.values():
            binding = active.binding
            if not binding.show or not active.enabled or binding.action in seen or not binding.description:
                continue
            seen.add(binding.action)
            item = self._item(binding.key, self._key(binding), binding.description)
            if line.cell_length + item.cell_length + right.cell_length + 4 > self.size.width:
                break
            line = line + item + "  "
        return line + " " * max(1, self.size.width - line.cell_length - right.cell_length) + right

    def _key(self, binding: Binding) -> str:
        return "enter" if binding.key == "enter" else self.app.get_key_display(binding)

    @staticmethod
    def _item(key: str, shown: str, description: str) -> Content:
        text = Content.assemble((shown, "bold $footer-key-foreground"), (f" {description}", "$footer-description-foreground"))
        return text.stylize(f"@click=app.simulate_key('{key}')")
