"""``settings``: show and change the user's own settings."""

from __future__ import annotations

import argparse
import sys
import tomllib
from typing import Any

import msgspec
from msgspec import Struct

from so_tui.commands.common import print_json, print_rich
from so_tui.folders import settings_file
from so_tui.settings import Settings
from so_tui.settings_file import (
    KEYS,
    all_settings,
    change_settings,
    choices,
    load_settings,
    value_of,
)
from so_tui.spec.errors import InputError, Problem, nearest, reject, shown
from so_tui.trust.text import printable_line


class ShownSettings(Struct, frozen=True):
    """What ``settings --json`` prints."""

    file: str
    settings: Settings
    """In force."""
    problems: tuple[Problem, ...]
    """What is wrong in the file, for which the defaults hold."""


def settings(arguments: argparse.Namespace) -> int:
    """Print the settings, or change one. Return 2 if the file has something that is wrong.

    Raises:
        InputError: There is no such setting, or it cannot be changed so.
    """
    key, equals, text = (arguments.setting or "").partition("=")
    if key and key not in KEYS:
        raise reject(
            "unknown-setting",
            "settings",
            shown(key),
            "there is no such setting",
            f"{nearest(key, KEYS)}`so-tui settings` lists them all.",
        )
    if equals:
        change_settings({key: _value(key, text) if text else None})
    loaded = load_settings()
    for problem in loaded.problems:
        print(f"so-tui: {problem}", file=sys.stderr)
    if arguments.json:
        print_json(ShownSettings(str(settings_file()), loaded.settings, loaded.problems))
    elif key:
        print(_text(key, value_of(loaded.settings, key)))
    else:
        _print_all(loaded.settings)
    return InputError.exit_code if loaded.problems else 0


def _print_all(found: Settings) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("setting", "value", "what it is"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "setting")
    for setting in all_settings():
        value, words = value_of(found, setting.key), choices(setting.kind)
        table.add_row(
            setting.key,
            Text(_text(setting.key, value), style="" if value == setting.default else "bold"),
            Text(setting.description + (f" ({', '.join(words)})" if words else "")),
        )
    print_rich(table, f"\n{printable_line(str(settings_file()))}")


def _text(key: str, value: Any) -> str:
    """Return a value as it is typed; ``-`` for none."""
    if value is None or value == ():
        return "-"
    if isinstance(value, tuple):
        value = list(value)
    return printable_line(
        value if isinstance(value, str) and value else msgspec.json.encode(value).decode()
    )


def _value(key: str, text: str) -> Any:
    """Return a typed value: as TOML where it is some, and otherwise as text."""
    kind = next(setting.kind for setting in all_settings() if setting.key == key)
    if choices(kind) or key == "screen.theme":
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, ValueError, RecursionError):
        return text
