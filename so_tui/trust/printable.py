"""Make text from elsewhere safe to show: no control sequence reaches the terminal, and no invisible character reorders a line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

_UNSAFE = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f"  # C0 but tab and newline; a carriage return overwrites its line
    "\x80-\x9f"  # C1: one character of these begins a control sequence
    "\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"  # bidirectional controls, invisible characters, separators of lines
    "\ufff9-\ufffb\U000e0000-\U000e007f"  # annotations, tags
    "\ud800-\udfff"  # surrogates, which stand for bytes that are not UTF-8
    "]"
)
_BREAKS = re.compile("[\t\n]")
_UNSAFE_IN_LINE = re.compile(f"{_UNSAFE.pattern[:-1]}\t\n]")
_LONGEST_MESSAGE = 4000
"""Characters of a message that are read; half as many are shown. Reasons and warnings of so-tui have a few hundred."""
REPLACED = "\ufffd"
"""Stands for a character that is not shown."""


def printable(text: str) -> str:
    """Return a text with every control, bidirectional and invisible character spelled out (``\\x1b``). Tabs and newlines stay."""
    return (
        text if text.isprintable() else _UNSAFE.sub(_spelled, text)
    )  # nothing unsafe counts as printable, and this is ten times faster


def printable_line(text: str) -> str:
    """Return a text as one line that is safe to show: like ``printable``, with tabs and newlines spelled out too."""
    return _BREAKS.sub(_spelled, printable(text))


def brief_line(text: str, most: int = 80) -> str:
    """Return a text as one line of at most about ``most`` characters that is safe to show; what is cut off ends in an ellipsis."""
    line = printable_line(text[: most + 1])
    return line if len(line) <= most else line[: most - 1] + "…"


def brief_message(text: str) -> str:
    """Return a message of any length and shape as one line that is safe to show, with single spaces for line ends and runs of spaces."""
    return brief_line(" ".join(text[:_LONGEST_MESSAGE].split()), _LONGEST_MESSAGE // 2)


def printable_source(text: str) -> str:
    """Return JSON or TOML with unsafe characters escaped in that format, so that programs read the same values."""
    return text if text.isprintable() else _UNSAFE.sub(_escaped, text)


def same_cells(text: str, width: Callable[[str], int]) -> str:
    """Return a line that is already laid out, with each unsafe character replaced by as many cells as it takes.

    Args:
        width: Returns the cells of a character.
    """
    return (
        text
        if text.isprintable()
        else _UNSAFE_IN_LINE.sub(lambda match: REPLACED * width(match[0]), text)
    )


def quoted(*arguments: str) -> str:
    """Return arguments as a command that can be copied into a shell, whatever they contain, and is safe to show."""
    return " ".join(map(_quoted, arguments))


def so_tui_command(verb: str, argument: str, *options: str) -> str:
    """Return a command of so-tui for copying. An argument that begins with a dash is not read as an option."""
    return (
        quoted("so-tui", verb, *options, "--", argument)
        if argument.startswith("-")
        else quoted("so-tui", verb, argument, *options)
    )


def _quoted(argument: str) -> str:
    plain = printable_line(argument)
    if plain == argument:
        return shlex.quote(argument)
    # bash's $'...' spells what cannot be shown, byte by byte.
    data = argument.encode("utf-8", errors="surrogateescape")
    return (
        "$'"
        + "".join(
            chr(byte) if 32 <= byte < 127 and byte not in b"'\\" else f"\\x{byte:02x}"
            for byte in data
        )
        + "'"
    )


def _spelled(match: re.Match[str]) -> str:
    code = ord(match[0])
    if match[0] in "\t\n\r":
        return {"\t": "\\t", "\n": "\\n", "\r": "\\r"}[match[0]]
    return (
        f"\\x{code:02x}"
        if code < 0x100
        else f"\\u{code:04x}"
        if code < 0x10000
        else f"\\U{code:08x}"
    )


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
