"""Themes, and what each colour stands for.

A colour says what a thing is, the same on every screen: purple is work of the GPU, blue is Adam and
its cores, orange the training process and its cores, green memory. The accent is for keys and for
what has the focus, and nothing else has it. The loss and whatever else a run says of itself are as
bright as can be.

Two themes are for eyes that dark and light do not suit: one of high contrast, and one whose colours
all kinds of colour vision tell apart. Tests compute both: contrasts by WCAG 2.2 (at least 7 to 1),
and distances between the colours of parts, simulated for protanopia, deuteranopia and tritanopia.

All colours, which ``themes.toml`` lists, sit on the xterm 256-colour cube, so a terminal or
multiplexer that rounds to 256 colours shows the same picture. Verdicts differ in lightness and in
blue against red, which colour-blind eyes can distinguish, and always come with a sign or a word.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from msgspec import toml
from textual.theme import Theme

_FILE: dict[str, dict[str, dict[str, Any]]] = toml.decode(
    Path(__file__).with_suffix(".toml").read_bytes()
)
_ROLES = _FILE["roles"]


def _theme(kind: str) -> Theme:
    colours = {name: role.get(kind, role["dark"]) for name, role in _ROLES.items()}
    return msgspec.convert({**_FILE["themes"][kind], "variables": colours}, Theme)


FALLBACKS = {name: role["fallback"] for name, role in _ROLES.items() if "fallback" in role}
"""What stands for a colour in a theme of Textual's own."""
DARK, LIGHT, CONTRAST, COLOUR_BLIND, SIXTEEN = map(_theme, _FILE["themes"])
THEMES = (DARK, LIGHT, CONTRAST, COLOUR_BLIND)


def themes_for(color_system: str | None) -> tuple[Theme, ...]:
    """Return the themes for a terminal, by what Rich calls its colours: the dark one has those of
    a terminal of 16.
    """
    return (SIXTEEN if color_system == "standard" else DARK, *THEMES[1:])
