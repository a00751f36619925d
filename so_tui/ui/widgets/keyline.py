"""The bottom line: the keys in force. It is one widget; Textual's Footer, one per key, would cost more than the rest of the first paint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from textual import events
from textual.binding import Binding
from textual.keys import REPLACED_KEYS, key_to_character
from textual.screen import Screen
from textual.widgets import Input

from so_tui.ui.kept_lines import KeepsLines
from so_tui.ui.text import Content

GAP = 2


class KeyLine(KeepsLines):
    """Keys in force, as many as fit; each can be clicked. The palette, which has them all, is always there."""

    DEFAULT_CSS = """
    KeyLine { dock: bottom; height: 1; padding: 0 1; background: $footer-background; }
    """

    def __init__(self) -> None:
        self._spans: list[tuple[int, int, str]] = []
        super().__init__()

    def on_mount(self) -> None:
        self.screen.bindings_updated_signal.subscribe(self, self._changed)

    def _changed(self, screen: Screen[object]) -> None:
        self.refresh()

    def render(self) -> Content:
        right = _item("^p", "commands")
        bindings = list(self._bindings_to_show())
        items = [_item(self._shown(binding), binding.description) for binding in bindings]
        room = self.size.width - right.cell_length - GAP
        spans: list[tuple[int, int, str]] = []
        line = Content("")
        for index in fitting(
            [item.cell_length for item in items], [binding.action for binding in bindings], room
        ):
            spans.append(
                (line.cell_length, line.cell_length + items[index].cell_length, bindings[index].key)
            )
            line = line + items[index] + " " * GAP
        gap = max(0, self.size.width - line.cell_length - right.cell_length)
        start = line.cell_length + gap
        self._spans = [*spans, (start, start + right.cell_length, "ctrl+p")]
        return line + " " * gap + right

    @property
    def _typing(self) -> bool:
        return isinstance(self.screen.focused, Input)

    def _bindings_to_show(self) -> Iterator[Binding]:
        """Yield each action once; in a text field only keys that type nothing, and the way out of it."""
        seen: set[str] = set()
        for active in self.screen.active_bindings.values():
            binding = active.binding
            of_use = (
                (binding.show and not prints(binding.key)) or binding.key == "escape"
                if self._typing
                else binding.show
            )
            if of_use and active.enabled and binding.description and binding.action not in seen:
                seen.add(binding.action)
                yield binding

    def _shown(self, binding: Binding) -> str:
        if binding.key == "enter":
            return "enter"
        if self._typing:  # a display for several keys would name some that type text
            return self.app.get_key_display(replace(binding, key_display=None))
        return self.app.get_key_display(binding)

    def on_click(self, event: events.Click) -> None:
        at = event.get_content_offset(self)
        for start, end, key in self._spans:
            if at is not None and start <= at.x < end:
                self.app.simulate_key(key)


def prints(key: str) -> bool:
    """Return whether a key types a character."""
    character = key_to_character(REPLACED_KEYS.get(key, key))
    return character is not None and character.isprintable()


def fitting(widths: Sequence[int], actions: Sequence[str], room: int) -> list[int]:
    """Return the items that fit into ``room`` cells, in order of their keys, but with ``quit`` before any other."""
    fitted = []
    for index in sorted(range(len(widths)), key=lambda index: actions[index] != "quit"):
        if widths[index] <= room:
            fitted.append(index)
            room -= widths[index] + GAP
    return sorted(fitted)


def _item(key: str, description: str) -> Content:
    return Content.assemble(
        (key, "bold $footer-key-foreground"), (f" {description}", "$footer-description-foreground")
    )
