"""Keys as help and as palette commands, both read from the bindings that are in force."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from textual.app import App, SystemCommand
from textual.binding import Binding
from textual.screen import Screen

# Keys that Textual's own widgets bring and that need no word: moving about in tables, fields and scrolled panes.
_EDITING = (
    "up",
    "down",
    "left",
    "right",
    "home",
    "end",
    "pageup",
    "pagedown",
    "tab",
    "shift+",
    "ctrl+",
    "backspace",
    "delete",
    "alt+",
    "super+",
)


def _bindings(screen: Screen[Any]) -> Iterator[tuple[object, Binding, bool]]:
    """Bindings with a description, once per action."""
    seen: set[str] = set()
    for active in screen.active_bindings.values():
        binding = active.binding
        if not binding.description or binding.action in seen or binding.system:
            continue
        seen.add(binding.action)
        yield active.node, binding, active.enabled


def key_groups(screen: Screen[Any]) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Keys of the screen, of the program, and for moving about: (key, what it does, more about it)."""
    here: list[tuple[str, str, str]] = []
    everywhere: list[tuple[str, str, str]] = []
    for node, binding, _ in _bindings(screen):
        if node is not screen and node is not screen.app:
            continue
        row = (screen.app.get_key_display(binding), binding.description, binding.tooltip)
        (here if node is screen else everywhere).append(row)
    everywhere += [("^p", "Commands", "Every command by name"), ("^q", "Quit", "Also from a text field")]
    moving = [
        ("tab", "Next field or panel", ""),
        ("esc", "Leave a text field", "Single keys are commands again"),
        ("arrows", "Move", "In tables, lists and logs; the mouse does the same"),
    ]
    return [("This screen", here), ("Everywhere", everywhere), ("Moving about", moving)]


def commands(app: App[Any], screen: Screen[Any]) -> Iterator[SystemCommand]:
    """A palette command for every binding of the screen and the program."""
    for node, binding, enabled in _bindings(screen):
        if enabled and (node is screen or node is app) and binding.action != "command_palette":
            key = app.get_key_display(binding)
            title = f"Go to {binding.description}" if binding.action.startswith("show(") else binding.description
            yield SystemCommand(
                title,
                f"{binding.tooltip or binding.description}  [{key}]",
                partial(screen.run_action, binding.action) if node is screen else partial(app.run_action, binding.action),
            )
