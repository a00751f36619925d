"""Themes, and what each colour stands for.

A colour says what a thing is, the same on every screen: purple is work of the GPU, blue is Adam and
its cores, orange the training process and its cores, green memory. The accent is the loss, what has
the focus, and keys.

Two themes are for eyes that dark and light do not suit: one of high contrast, and one whose colours
all kinds of colour vision tell apart. Tests compute both: contrasts by WCAG 2.2 (at least 7 to 1),
and distances between the colours of parts, simulated for protanopia, deuteranopia and tritanopia.

All colours sit on the xterm 256-colour cube, so a terminal or multiplexer that rounds to 256
colours shows the same picture. Verdicts are told apart by lightness and by blue against red, which
colour-blind eyes keep; a sign or a word always stands beside them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from textual.theme import Theme


class _Role(NamedTuple):
    """The colour of a role in each theme."""

    dark: str
    light: str
    contrast: str
    colour_blind: str = ""
    """Empty where it is that of the dark theme."""
    fallback: str = ""
    """What stands for it in a theme of Textual's own, in terms of what every theme has; empty for a
    variable of Textual's.
    """


ROLES: dict[str, _Role] = {
    "faint": _Role("#8a8a8a", "#626262", "#d0d0d0", "#9e9e9e", fallback="foreground-muted"),
    "rule": _Role("#3a3a3a", "#d0d0d0", "#a8a8a8", "#4e4e4e", fallback="panel-lighten-2"),
    "adam": _Role("#5fafff", "#005faf", "#5fd7ff", fallback="primary"),
    "main-core": _Role("#ffaf5f", "#af5f00", "#ffaf00", "#ff8700", fallback="accent"),
    "other-core": _Role("#8a8a8a", "#808080", "#bcbcbc", fallback="foreground-muted"),
    "gpu": _Role("#d787af", "#af0087", "#d7afff", fallback="secondary"),
    "memory": _Role("#5fd7af", "#00875f", "#5fff87", "#00af87", fallback="success"),
    "forward": _Role("#d787af", "#d75faf", "#d7afff", fallback="secondary"),
    "backward": _Role("#af5f87", "#af0087", "#af87ff", fallback="secondary-darken-2"),
    "exposed": _Role("#5fafff", "#005faf", "#5fd7ff", fallback="primary"),
    "data-part": _Role("#d7d787", "#878700", "#ffff00", "#ffff5f", fallback="warning"),
    "other-part": _Role("#8a8a8a", "#808080", "#bcbcbc", fallback="foreground-muted"),
    "raw-line": _Role("#4e4e4e", "#b2b2b2", "#a8a8a8", "#585858", fallback="foreground-disabled"),
    "run-1": _Role("#ffaf00", "#af5f00", "#ffd700", fallback="warning"),
    "run-2": _Role("#5fd7ff", "#0087af", "#5fd7ff", fallback="secondary"),
    "run-3": _Role("#d787af", "#af5f87", "#ff87d7", fallback="success"),
    "run-4": _Role("#00af87", "#00875f", "#5fff87", fallback="error"),
    "run-5": _Role("#ffff5f", "#878700", "#ffff87", fallback="warning-darken-2"),
    "run-6": _Role("#ff5f00", "#d75f00", "#ff8700", fallback="secondary-darken-2"),
    "run-7": _Role("#af87ff", "#5f5faf", "#afafff", "#5f87ff", fallback="success-darken-2"),
    "run-8": _Role("#bcbcbc", "#626262", "#d0d0d0", fallback="error-darken-2"),
    "block-cursor-foreground": _Role("#121212", "#ffffff", "#000000"),
    "block-cursor-background": _Role("#af87ff", "#5f00af", "#ffff00"),
    "block-cursor-text-style": _Role("none", "none", "bold"),
    "block-cursor-blurred-background": _Role("#303030", "#d0d0d0", "#585858"),
    "footer-background": _Role("#1c1c1c", "#eeeeee", "#000000"),
    "footer-key-foreground": _Role("#af87ff", "#5f00af", "#ffff00"),
    "footer-description-foreground": _Role("#bcbcbc", "#444444", "#ffffff"),
    "input-selection-background": _Role("#875faf 60%", "#d7afff 60%", "#005fff 80%"),
}


def _variables(theme: str) -> dict[str, str]:
    return {name: getattr(role, theme) or role.dark for name, role in ROLES.items()}


DARK = Theme(
    name="so-tui-dark",
    dark=True,
    primary="#af87ff",
    secondary="#5fd7d7",
    accent="#af87ff",
    success="#5fd7af",
    warning="#ffd75f",
    error="#ff8787",
    foreground="#dadada",
    background="#121212",
    surface="#1c1c1c",
    panel="#262626",
    boost="#262626",
    variables=_variables("dark"),
)

LIGHT = Theme(
    name="so-tui-light",
    dark=False,
    primary="#5f00af",
    secondary="#008787",
    accent="#5f00af",
    success="#00875f",
    warning="#875f00",
    error="#af0000",
    foreground="#262626",
    background="#ffffff",
    surface="#eeeeee",
    panel="#e4e4e4",
    boost="#e4e4e4",
    variables=_variables("light"),
)

CONTRAST = Theme(
    name="so-tui-contrast",
    dark=True,
    primary="#5fd7ff",
    secondary="#d7afff",
    accent="#ffff00",
    success="#5fff87",
    warning="#ffff00",
    error="#ffafaf",
    foreground="#ffffff",
    background="#000000",
    surface="#000000",
    panel="#1c1c1c",
    boost="#1c1c1c",
    variables=_variables("contrast"),
)

# After the palette of Okabe and Ito: sky blue, orange, bluish green, yellow, vermilion, reddish
# purple.
COLOUR_BLIND = replace(
    DARK,
    name="so-tui-colour-blind",
    success="#00af87",
    warning="#ffff5f",
    error="#ff5f00",
    variables=_variables("colour_blind"),
)
THEMES = (DARK, LIGHT, CONTRAST, COLOUR_BLIND)
