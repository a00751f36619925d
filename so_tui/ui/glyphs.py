"""The characters that a terminal can show, and ASCII replacements for terminals that show little else."""

from __future__ import annotations

import locale
from collections.abc import Mapping
from typing import Literal, get_args

from rich.cells import cell_len
from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

GlyphName = Literal["braille", "block", "ascii"]
VARIABLE = "SO_TUI_GLYPHS"

_PLAIN = str.maketrans(
    {
        **dict.fromkeys("━═▇█■▀▄▌▐▊▎▁▂▃▅▆▉▍▏▕", "="),
        **dict.fromkeys("─╶╴╌┄", "-"),
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
        "▾": "v",
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


def chosen_glyphs(environ: Mapping[str, str], encoding: str | None = None) -> GlyphName:
    """Return the set that ``SO_TUI_GLYPHS`` names, or else one that locale and terminal can show: the Linux console has no braille."""
    names: tuple[GlyphName, ...] = get_args(GlyphName)
    for name in names:
        if environ.get(VARIABLE) == name:
            return name
    encoding = locale.getpreferredencoding(False) if encoding is None else encoding
    if encoding.lower().replace("-", "") != "utf8":
        return "ascii"
    return "block" if environ.get("TERM") == "linux" else "braille"


class PlainCharacters(LineFilter):
    """Replaces everything drawn by ASCII, cell for cell."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [Segment(_plain(text), style, control) for text, style, control in segments]


def _plain(text: str) -> str:
    text = text.translate(_PLAIN)
    return text if text.isascii() else "".join(character if character.isascii() else "?" * cell_len(character) for character in text)
