"""The screen as an SVG with a line for each row of the terminal, so that diffs show rows.

Textual's own takes five times as many bytes, and one new colour changes every line.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import groupby
from operator import itemgetter
from typing import Any

from rich.cells import cell_len
from rich.color import Color
from rich.segment import Segment
from rich.style import Style
from textual._context import visible_screen_stack
from textual.app import App
from textual.strip import Strip

CELL_WIDTH, CELL_HEIGHT, FONT_SIZE = 9, 18, 15
_BASELINE = 14
_HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" xml:space="preserve" viewBox="0 0 {width} {height}" '
    'fill="{colour}"'
    ' font-family="monospace" font-size="{size}px">\n'
    '<rect width="{width}" height="{height}" fill="{background}"/>'
)


def picture_of(app: App[Any]) -> str:
    visible_screen_stack.set(app._background_screens)  # what a dialog is drawn over
    strips = app.screen._compositor.render_strips(app.size)
    colour, background = (
        app.theme_variables[name].lower() for name in ("foreground", "background")
    )
    size = {"width": app.size.width * CELL_WIDTH, "height": app.size.height * CELL_HEIGHT}
    head = _HEAD.format(**size, size=FONT_SIZE, colour=colour, background=background)
    rows = ("".join(_row(strip, y, colour, background)) for y, strip in enumerate(strips))
    return "\n".join((head, *rows, "</svg>", ""))


def _row(strip: Strip, y: int, colour: str, background: str) -> Iterator[str]:
    """Yield the backgrounds of a row that differ from the screen's, then its text."""
    top = y * CELL_HEIGHT
    spans, papers = [], []
    x = 0
    for text, style, _ in Segment.simplify(strip):
        style = style or Style.null()
        ink, paper = _hex(style.color, colour), _hex(style.bgcolor, background)
        if style.reverse:
            ink, paper = paper, ink
        cells = cell_len(text)
        papers += [paper] * cells
        drawn = text.rstrip(" ") if not style.underline else text
        if drawn:
            at = x + len(drawn) - len(drawn := drawn.lstrip(" "))
            how = f"{_width(drawn)}{_looks(style, ink, colour)}"
            text = escape(drawn, quote=False)
            spans.append(f'<tspan x="{at * CELL_WIDTH}"{how}>{text}</tspan>')
        x += cells
    for paper, run in groupby(enumerate(papers), key=itemgetter(1)):
        if paper != background:
            cells_of_run = [at for at, _ in run]
            box = (
                f'x="{cells_of_run[0] * CELL_WIDTH}" y="{top}" '
                f'width="{len(cells_of_run) * CELL_WIDTH}" height="{CELL_HEIGHT}"'
            )
            yield f'<rect {box} fill="{paper}"/>'
    if spans:
        yield f'<text y="{top + _BASELINE}">{"".join(spans)}</text>'


def _width(text: str) -> str:
    """Return the attribute that keeps text in its cells where another font may be used."""
    if text.isascii():
        return ""
    return f' textLength="{cell_len(text) * CELL_WIDTH}" lengthAdjust="spacingAndGlyphs"'


def _looks(style: Style, ink: str, colour: str) -> str:
    lines = {"underline": style.underline, "line-through": style.strike}
    decorations = [name for name, has in lines.items() if has]
    attributes = {
        "fill": "" if ink == colour else ink,
        "font-weight": "bold" if style.bold else "",
        "font-style": "italic" if style.italic else "",
        "opacity": "0.6" if style.dim else "",
        "text-decoration": " ".join(decorations),
    }
    return "".join(f' {name}="{value}"' for name, value in attributes.items() if value)


def _hex(colour: Color | None, default: str) -> str:
    return default if colour is None or colour.is_default else colour.get_truecolor().hex
