"""Keys as help and as palette commands, both read from the bindings that are in force."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from textual.app import App, SystemCommand
from textual.binding import Binding
from textual.dom import DOMNode
from textual.screen import Screen, ScreenResultType

SIZES = ("larger", "smaller", "reset-sizes")
"""Keys that many screens have and few users look for: they come after a screen's own."""


def _bindings(screen: Screen[ScreenResultType]) -> Iterator[tuple[DOMNode, Binding, bool]]:
    """Yield the application's own bindings, which have an id, once per action. Moving within tables and fields is Textual's."""
    seen: set[str] = set()
    for active in screen.active_bindings.values():
        binding = active.binding
        if binding.id and binding.action not in seen:
            seen.add(binding.action)
            yield active.node, binding, active.enabled


def key_groups(screen: Screen[ScreenResultType]) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Return the keys of the screen, of the application, and for moving, each as key, name and details."""
    here: list[tuple[str, str, str]] = []
    sizes: list[tuple[str, str, str]] = []
    everywhere: list[tuple[str, str, str]] = []
    for node, binding, _ in _bindings(screen):
        row = (screen.app.get_key_display(binding), binding.description, binding.tooltip)
        (everywhere if node is screen.app else sizes if binding.id in SIZES else here).append(row)
    here += sizes
    everywhere += [
        ("^p", "Commands", "Every command by name"),
        ("^q", "Quit", "Also from a text field"),
    ]
    moving = [
        ("tab", "Next field or panel", ""),
        ("esc", "Leave a text field", "Single keys are commands again"),
        ("arrows", "Move", "In tables, lists and logs; the mouse does the same"),
    ]
    if screen.app.check_action("vim", ()):
        moving.append(
            ("j k g G ^d ^u", "Move as in vim", "Where the screen has no command on that key")
        )
    return [("This screen", here), ("Everywhere", everywhere), ("Moving about", moving)]


def commands(app: App[None], screen: Screen[ScreenResultType]) -> Iterator[SystemCommand]:
    """Yield a palette command for every enabled binding of the screen and the application."""
    for node, binding, enabled in _bindings(screen):
        if enabled:
            key = app.get_key_display(binding)
            title = (
                f"Go to {binding.description}"
                if binding.action.startswith("show(")
                else binding.description
            )
            more = f"{binding.tooltip}; " if binding.tooltip not in ("", title) else ""
            yield SystemCommand(
                title, f"{more}key {key}", partial(app.run_action, binding.action, node)
            )
