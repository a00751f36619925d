"""Which characters this terminal can show, and plain ones for those that can show little."""

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
    """``SO_TUI_GLYPHS`` if it names a set; otherwise what the locale and the terminal can show: the Linux console has no braille."""
    names: tuple[GlyphName, ...] = get_args(GlyphName)
    for name in names:
        if environ.get(VARIABLE) == name:
            return name
    encoding = locale.getpreferredencoding(False) if encoding is None else encoding
    if encoding.lower().replace("-", "") != "utf8":
        return "ascii"
    return "block" if environ.get("TERM") == "linux" else "braille"


class PlainCharacters(LineFilter):
    """Everything that is drawn, in ASCII, cell for cell."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [Segment(_plain(text), style, control) for text, style, control in segments]


def _plain(text: str) -> str:
    text = text.translate(_PLAIN)
    return text if text.isascii() else "".join(character if character.isascii() else "?" * cell_len(character) for character in text)
