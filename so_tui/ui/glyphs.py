"""The characters that a terminal can show, and ASCII replacements for terminals that show little else."""

from __future__ import annotations

import locale
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

from rich.cells import cell_len
from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

GlyphName = Literal["braille", "block", "ascii"]
VARIABLE = "SO_TUI_GLYPHS"
_ASCII_LOCALES = ("C", "POSIX")

_PLAIN = str.maketrans(
    {
        **dict.fromkeys("━═▇█■▀▄▌▐▊▎▁▂▃▅▆▉▍▏▕", "="),
        **dict.fromkeys("─╶╴╌┄−", "-"),
        **dict.fromkeys("│┃╎▎", "|"),
        **dict.fromkeys("╸╺", "-"),
        **dict.fromkeys("┌┐└┘├┤┬┴┼╭╮╰╯", "+"),
        **dict.fromkeys("●◆•", "*"),
        **dict.fromkeys("·…", "."),
        "○": "o",
        "✓": "+",
        "✗": "x",
        "★": "*",
        "×": "x",
        "↻": "r",
        "▼": "v",
        "▲": "^",
        "▸": ">",
        "◂": "<",
        "▾": "v",
        "▴": "^",
        "▓": "%",
        "▒": ":",
        "░": ".",
        "▚": "/",
        "→": ">",
        "↑": "^",
        "↓": "v",
        "∞": "i",
        "²": "2",
        "±": "~",
        "°": " ",
        "“": '"',
        "”": '"',
        "«": "<",
        "»": ">",
        "≈": "~",
        "\u2800": " ",
    }
)


def chosen_glyphs(
    environ: Mapping[str, str], encoding: str | None = None, preferred: str = "auto"
) -> GlyphName:
    """Return the set that ``SO_TUI_GLYPHS`` names, else the preferred one, else one that locale and terminal can show.

    The Linux console has no braille.
    """
    names: tuple[GlyphName, ...] = get_args(GlyphName)
    for wanted in (environ.get(VARIABLE), preferred):
        for name in names:
            if wanted == name:
                return name
    encoding = locale.getpreferredencoding(False) if encoding is None else encoding
    if _locale_name(environ) in _ASCII_LOCALES or encoding.lower().replace("-", "") != "utf8":
        return "ascii"
    return "block" if environ.get("TERM") == "linux" else "braille"


def environment_at_start() -> dict[str, str]:
    """Return the environment with the locale that the user chose.

    Where that is C, Python sets ``LC_CTYPE`` to a UTF-8 locale (PEP 538) and claims UTF-8. The terminal does not change by that.
    """
    environ = dict(os.environ)
    try:
        initial = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return environ
    if not any(entry.startswith(b"LC_CTYPE=") for entry in initial):
        environ.pop("LC_CTYPE", None)
    return environ


def _locale_name(environ: Mapping[str, str]) -> str:
    """Return the locale of characters by POSIX's order of variables; empty if none is set."""
    return next(
        (name for variable in ("LC_ALL", "LC_CTYPE", "LANG") if (name := environ.get(variable))), ""
    )


def shows_ascii(app: object) -> bool:
    """Return whether an application shows ASCII only."""
    return getattr(app, "glyphs", "") == "ascii"


class PlainCharacters(LineFilter):
    """Replaces everything drawn by ASCII, cell for cell."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [Segment(_plain(text), style, control) for text, style, control in segments]


def _plain(text: str) -> str:
    text = text.translate(_PLAIN)
    return (
        text
        if text.isascii()
        else "".join(
            character if character.isascii() else "?" * cell_len(character) for character in text
        )
    )
