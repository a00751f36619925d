"""Text for the screen: content that is safe to show, and shortening to a width."""

from __future__ import annotations

import locale
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from textual import content
from textual.color import Color
from textual.filter import LineFilter
from textual.style import Style

from so_tui.trust.text import brief_line, printable, printable_line

if TYPE_CHECKING:
    from so_tui.doctor import Finding


_MOST_CHARACTERS_A_CELL = 4
"""Longer texts are cut before they are measured: a megabyte of combining characters has no
width.
"""


_Part = str | content.Content | tuple[str, str | Style]
"""What content is assembled from: a tuple is a text with its style."""


class Content(content.Content):
    """Textual's content, with control, bidirectional and invisible characters spelled out."""

    def __init__(self, text: str = "", *args: Any, **options: Any) -> None:
        super().__init__(printable(text), *args, **options)

    @classmethod
    def styled(cls, text: str, style: Style | str = "", *args: Any, **options: Any) -> Content:
        return _own(super().styled(printable(text), style, *args, **options))

    @classmethod
    def assemble(cls, *parts: _Part, end: str = "", **options: Any) -> Content:
        return _own(super().assemble(*map(_printable_part, (*parts, end)), **options))

    @classmethod
    def from_markup(cls, markup: str | content.Content, **variables: object) -> Content:
        """Read markup, of so-tui's own only."""
        return _own(super().from_markup(markup, **variables))

    def __add__(self, other: content.Content | str) -> Content:
        return _own(super().__add__(_printable_text(other)))

    def join(self, lines: Iterable[str | content.Content]) -> Content:
        return _own(super().join(map(_printable_text, lines)))


def faint(text: str) -> Content:
    """Return text that is less important than what stands around it."""
    return Content.styled(text, "$faint")


def wrong(text: str) -> Content:
    """Return what is wrong, behind its sign."""
    return Content.assemble(("✗ ", "$error"), text)


def in_rows(lines: Iterable[str | content.Content]) -> Content:
    """Return lines as one text."""
    return Content("\n").join(lines)


def wrapped(entries: Iterable[Content], width: int, gap: int = 3) -> list[Content]:
    """Return entries with ``gap`` cells between them in lines of at most ``width`` cells, none cut
    and none left out; one that is wider has its own line.
    """
    lines: list[Content] = []
    for entry in entries:
        if lines and lines[-1].cell_length + gap + entry.cell_length <= width:
            lines[-1] = lines[-1] + " " * gap + entry
        else:
            lines.append(entry)
    return lines


def hanging(first: Content, text: content.Content, width: int) -> list[Content]:
    """Return a text in lines of ``width`` cells beside ``first``, which begins the first line."""
    indent = Content(" " * first.cell_length)
    lines = text.wrap(max(20, width - first.cell_length))
    return [(indent if number else first) + line for number, line in enumerate(lines)]


def _own(made: content.Content) -> Content:
    """Return what a method of Textual's made, as content of this class: for type checkers, and for
    what is added to it later.
    """
    return made if isinstance(made, Content) else Content(made.plain, [*made.spans])


def _printable_text(text: str | content.Content) -> str | content.Content:
    return printable(text) if isinstance(text, str) else text


def _printable_part(part: _Part) -> _Part:
    return (printable(part[0]), part[1]) if isinstance(part, tuple) else _printable_text(part)


def shorten(text: str, width: int) -> str:
    """Return ``text`` as one line in at most ``width`` cells, with an ellipsis in place of its
    end.
    """
    line = brief_line(text, max(1, width * _MOST_CHARACTERS_A_CELL))
    if cell_len(line) <= width:
        return line
    return set_cell_size(line, max(0, width - 1)).rstrip() + "…"


def whole_words(text: str, width: int) -> str:
    """Return as many words of ``text`` as ``width`` cells hold, with an ellipsis for the others: no
    number loses its end.
    """
    if cell_len(text) <= width:
        return text
    words = text.split()
    lines = (f"{' '.join(words[:most])} …" for most in range(len(words) - 1, 0, -1))
    return next((line for line in lines if cell_len(line) <= width), "…")


def shorten_path(path: str, width: int) -> str:
    """Return ``path`` as one line in at most ``width`` cells, with an ellipsis in place of its
    start: paths differ at their end.
    """
    line = printable_line(path[-width * _MOST_CHARACTERS_A_CELL :])
    if cell_len(line) <= width and len(path) <= width * _MOST_CHARACTERS_A_CELL:
        return line
    shown = _end_of(line, width - 1)
    # Whole names are read more easily than the end of one.
    return "…" + shown[max(0, shown.find("/", 0, -1)) :]


def _end_of(line: str, width: int) -> str:
    """Return as much of the end of a line as ``width`` cells hold."""
    return next((line[at:] for at in range(len(line)) if cell_len(line[at:]) <= width), "")


def distinct(names: Sequence[str], width: int) -> list[str]:
    """Return names as lines of at most ``width`` cells in which different names stay different.

    Those that are too long lose their middle. Where that makes some the same, all are numbered.
    """
    shown = [_without_middle(name, width) for name in names]
    if len(set(shown)) < len(set(names)):
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names), start=1)}
        shown = [shorten(f"{numbers[name]} {name}", width) for name in names]
    return shown


def _without_middle(text: str, width: int) -> str:
    """Return ``text`` as one line in at most ``width`` cells, with an ellipsis in place of its
    middle.
    """
    most = width * _MOST_CHARACTERS_A_CELL
    line = printable_line(text if len(text) <= 2 * most else text[:most] + text[-most:])
    if cell_len(line) <= width:
        return line
    head = max(0, width - 1) // 2
    return f"{set_cell_size(line, head)}…{_end_of(line, width - head - 1)}"


def reading_text(unread_share: float) -> str:
    """Return how much of a run is drawn while some of its records are still to be read; empty once
    all are known.
    """
    return f"reading, {math.floor(100 * (1 - unread_share))} % known" if unread_share else ""


# Doctor's findings as text. Pure functions.


SIGNS = {"blocks": "✗", "warning": "~", "note": "·"}
_INDENT = 12
STYLES = {"blocks": "$error", "warning": "$warning", "note": "$faint"}


def finding_content(finding: Finding, width: int) -> Content:
    """Return a finding with its evidence, cost and remedy, wrapped to ``width``."""
    severity = finding.severity
    sign = f"{SIGNS[severity]} {severity:<8}", f"bold {STYLES[severity]}"
    lines = [Content.assemble(sign, (finding.title, "bold"))]
    for name in ("evidence", "cost", "remedy"):
        if text := getattr(finding, name):
            lines += hanging(faint(f"  {name:<{_INDENT - 2}}"), Content(text), width)
    return in_rows(lines)


# The characters that a terminal can show, and ASCII replacements for terminals that show little
# else.


GlyphName = Literal["braille", "block", "ascii"]
_VARIABLE = "SO_TUI_GLYPHS"
_ASCII_LOCALES = ("C", "POSIX")

_PLAIN = str.maketrans(
    {
        **dict.fromkeys("━═▇█■▀▄▌▐▊▎▁▂▃▅▆▉▍▏▕", "="),
        **dict.fromkeys("─╶╴╌┄−╸╺", "-"),
        **dict.fromkeys("│┃╎▎", "|"),
        **dict.fromkeys("┌┐└┘├┤┬┴┼╭╮╰╯", "+"),
        **dict.fromkeys("●◆•", "*"),
        **dict.fromkeys("·…", "."),
        **dict(
            zip(
                "○✓✗★⇡×↻▼▲▸◂▾▴▓▒░▚→↑↓∞²±°“”«»≈\u2800",
                'o+x*^xrv^><v^%:./>^vi2~ ""<>~ ',
                strict=True,
            )
        ),
    }
)


def chosen_glyphs(environ: Mapping[str, str], preferred: str = "auto") -> GlyphName:
    """Return the set that ``SO_TUI_GLYPHS`` names, else the preferred one, else one that locale and
    terminal can show.

    The Linux console has no braille.
    """
    names: dict[str | None, GlyphName] = {name: name for name in get_args(GlyphName)}
    for wanted in (environ.get(_VARIABLE), preferred):
        if wanted in names:
            return names[wanted]
    encoding = locale.getpreferredencoding(False)
    # By POSIX's order of variables.
    names_of_locale = (environ.get(variable) for variable in ("LC_ALL", "LC_CTYPE", "LANG"))
    characters = next(filter(None, names_of_locale), "")
    if characters in _ASCII_LOCALES or encoding.lower().replace("-", "") != "utf8":
        return "ascii"
    return "block" if environ.get("TERM") == "linux" else "braille"


def environment_at_start() -> dict[str, str]:
    """Return the environment with the locale that the user chose.

    Where that is C, Python sets ``LC_CTYPE`` to a UTF-8 locale (PEP 538) and claims UTF-8. The
    terminal does not change by that.
    """
    environ = dict(os.environ)
    try:
        initial = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return environ
    if not any(entry.startswith(b"LC_CTYPE=") for entry in initial):
        environ.pop("LC_CTYPE", None)
    return environ


def glyphs_of(app: object) -> GlyphName:
    """Return the set of characters that an application draws with."""
    glyphs: GlyphName = getattr(app, "glyphs", "braille")
    return glyphs


def shows_ascii(app: object) -> bool:
    """Return whether an application shows ASCII only."""
    return glyphs_of(app) == "ascii"


class PlainCharacters(LineFilter):
    """Replaces everything drawn by ASCII, cell for cell."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [Segment(_plain(text), style, control) for text, style, control in segments]


def _plain(text: str) -> str:
    text = text.translate(_PLAIN)
    if text.isascii():
        return text
    return "".join(
        character if character.isascii() else "?" * cell_len(character) for character in text
    )
