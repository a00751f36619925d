"""Write the manual page, ``docs/so-tui.1``, made of the parser's own help.

python docs/make_man.py
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from so_tui.commands.parser import EXIT_CODES, INTERNAL, build_parser

PAGE = Path(__file__).with_name("so-tui.1")
_ENVIRONMENT = {
    "SO_TUI_RUNS_DIR": "folder of the runs, in place of the default",
    "NO_COLOR": "if set and not empty, output has no colours",
    ("XDG_CONFIG_HOME, XDG_STATE_HOME, XDG_CACHE_HOME"): (
        "in place of ~/.config, ~/.local/state and ~/.cache"
    ),
}
_FILES = {
    "~/.config/so-tui/settings.toml": "your settings",
    "~/.config/so-tui/presets/": "your own presets",
    "~/.config/so-tui/sites/": "your own site profiles",
    "~/.local/state/so-tui/runs/": "the runs",
    "~/.local/state/so-tui/calibration/": "what `calibrate` and `plan --probe` measured",
}
_SHARED = ("--help", "--quiet", "--verbose")
"""Options of every command, which are described once."""


def page() -> str:
    """Return the page in the man macros of roff."""
    parser = build_parser()
    (commands,) = (
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    lines = [
        '.TH SO\\-TUI 1 "" so\\-tui',
        ".SH NAME",
        "so\\-tui \\- plan, launch and watch fine\\-tuning with DeepSpeed SuperOffload",
    ]
    lines += [
        ".SH SYNOPSIS",
        *_synopsis(parser),
        ".SH DESCRIPTION",
        _text(parser.description or ""),
    ]
    lines += [
        ".SH OPTIONS",
        *_described(action for action in parser._actions if action.option_strings),
        ".SH COMMANDS",
    ]
    for name, command in commands.choices.items():
        if name in INTERNAL:
            continue
        actions = [
            action for action in command._actions if not set(_SHARED) & set(action.option_strings)
        ]
        lines += [
            f".SS {_escaped(name)}",
            *_synopsis(command),
            ".PP",
            _text(command.description or ""),
            *_described(actions),
        ]
        if command.epilog:
            lines += [".PP", ".nf", *map(_escaped, command.epilog.splitlines()), ".fi"]
    for heading, terms in (
        ("EXIT STATUS", {str(code): meaning for code, meaning in EXIT_CODES.items()}),
        ("ENVIRONMENT", _ENVIRONMENT),
        ("FILES", _FILES),
    ):
        lines += [
            f".SH {heading}",
            *(
                line
                for term, meaning in terms.items()
                for line in _term(f"\\fB{_escaped(term)}\\fR", meaning)
            ),
        ]
    return "\n".join(lines) + "\n"


def _synopsis(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield f".B {_escaped(parser.prog)}"
    arguments = " ".join(_value(action) for action in parser._actions if not action.option_strings)
    yield f"[\\fIoptions\\fR] {arguments}".rstrip()


def _described(actions: Iterable[argparse.Action]) -> Iterator[str]:
    """Yield the entries of options and arguments; an argument whose name says all has none."""
    for action in actions:
        if action.help:
            names = ", ".join(f"\\fB{_escaped(option)}\\fR" for option in action.option_strings)
            yield from _term(f"{names} {_value(action)}".strip(), action.help % vars(action))


def _value(action: argparse.Action) -> str:
    """Return how the value of an option or argument is written; empty for one without."""
    if action.nargs == 0:
        return ""
    name = f"\\fI{_escaped(str(action.metavar or action.dest))}\\fR"
    return f"[{name}]" if action.nargs == "?" else name


def _term(term: str, meaning: str) -> Iterator[str]:
    yield from (".TP", term, _text(meaning))


def _text(text: str) -> str:
    """Return a paragraph, with `code` in bold."""
    return re.sub("`([^`]*)`", r"\\fB\1\\fR", _escaped(text))


def _escaped(text: str) -> str:
    """Return text that roff prints as it is: no escapes, hyphens that can be copied, and no line
    that is a request.
    """
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped[:1] in (".", "'") else escaped


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
