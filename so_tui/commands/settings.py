"""``settings``: show and change the user's own settings."""

from __future__ import annotations

import sys
from argparse import Namespace
from operator import attrgetter
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from so_tui.commands.common import plain_table, print_json, print_rich
from so_tui.folders import settings_file
from so_tui.settings import Settings
from so_tui.settings_file import change_settings, load_settings, setting_index
from so_tui.spec import parse_value
from so_tui.spec.errors import InputError, Problem, nearest, reject, shown
from so_tui.trust.text import printable_line


class ShownSettings(Struct, frozen=True):
    """What ``settings --json`` prints."""

    file: str
    settings: Settings
    """In force."""
    problems: tuple[Problem, ...]
    """What is wrong in the file, for which the defaults hold."""


def settings(arguments: Namespace) -> int:
    """Print the settings, or change one. Return 2 if the file has something that is wrong.

    Raises:
        InputError: There is no such setting, or it cannot be changed so.
    """
    key, equals, text = (arguments.setting or "").partition("=")
    known = setting_index()
    if key and key not in known:
        raise reject(
            "unknown-setting",
            "settings",
            shown(key),
            "there is no such setting",
            f"{nearest(key, tuple(known))}`so-tui settings` lists them all.",
        )
    if equals:
        info = known[key]
        if key == "alerts.command":  # commas belong to its arguments
            info = replace(info, takes_list=False)
        change_settings({key: parse_value(text, info) if text else None})
    loaded = load_settings()
    for problem in loaded.problems:
        print(f"so-tui: {problem}", file=sys.stderr)
    if arguments.json:
        print_json(ShownSettings(str(settings_file()), loaded.settings, loaded.problems))
    elif key:
        print(_text(attrgetter(key)(loaded.settings)))
    else:
        _print_all(loaded.settings)
    return InputError.exit_code if loaded.problems else 0


def _print_all(found: Settings) -> None:
    from rich.text import Text

    table = plain_table("setting", "value", "what it is")
    table.columns[0].no_wrap = True
    for key, info in setting_index().items():
        value = attrgetter(key)(found)
        words = f" ({', '.join(info.choices)})" if info.choices else ""
        table.add_row(
            key,
            Text(_text(value), style="" if value == info.default else "bold"),
            Text(info.description + words),
        )
    print_rich(table, f"\n{printable_line(str(settings_file()))}")


def _text(value: Any) -> str:
    """Return a value as it is typed; ``-`` for none."""
    if value in (None, ()):
        return "-"
    typed = value if isinstance(value, str) and value else msgspec.json.encode(value).decode()
    return printable_line(typed)
