"""Make text from elsewhere safe to show: no control sequence reaches the terminal, and no invisible character reorders a line."""

from __future__ import annotations

import re
import shlex

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


def printable(text: str) -> str:
    """Return a text with every control, bidirectional and invisible character spelled out (``\\x1b``). Tabs and newlines stay."""
    return _UNSAFE.sub(_spelled, text)


def printable_line(text: str) -> str:
    """Return a text as one line that is safe to show: like ``printable``, with tabs and newlines spelled out too."""
    return _BREAKS.sub(_spelled, printable(text))


def quoted(*arguments: str) -> str:
    """Return arguments as a command that can be copied into a shell, whatever they contain, and is safe to show."""
    return " ".join(map(_quoted, arguments))


def _quoted(argument: str) -> str:
    plain = printable_line(argument)
    if plain == argument:
        return shlex.quote(argument)
    # bash's $'...' spells what cannot be shown, byte by byte.
    data = argument.encode("utf-8", errors="surrogateescape")
    return "$'" + "".join(chr(byte) if 32 <= byte < 127 and byte not in b"'\\" else f"\\x{byte:02x}" for byte in data) + "'"


def _spelled(match: re.Match[str]) -> str:
    code = ord(match[0])
    if match[0] in "\t\n\r":
        return {"\t": "\\t", "\n": "\\n", "\r": "\\r"}[match[0]]
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
