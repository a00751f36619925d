"""The themes dark and light, what each colour stands for, and the list of all themes of so-tui.

All colours sit on the xterm 256-colour cube, so a terminal or multiplexer that rounds to 256 colours shows the same picture.
Verdicts are told apart by lightness and by blue against red, which colour-blind eyes keep; a sign or a word always stands beside them.
"""

from __future__ import annotations

from textual.theme import Theme

from so_tui.ui.accessible_themes import COLOUR_BLIND, CONTRAST

DARK = Theme(
    name="so-tui-dark",
    dark=True,
    primary="#5fafff",
    secondary="#af87ff",
    accent="#5fafff",
    success="#5fd7af",
    warning="#ffd75f",
    error="#ff8787",
    foreground="#dadada",
    background="#121212",
    surface="#1c1c1c",
    panel="#262626",
    boost="#262626",
    variables={
        "faint": "#8a8a8a",
        "rule": "#3a3a3a",
        "adam": "#5fafff",
        "main-core": "#ffaf5f",
        "other-core": "#8a8a8a",
        "forward": "#5fafff",
        "backward": "#5f87d7",
        "exposed": "#ffaf5f",
        "data-part": "#af87ff",
        "other-part": "#8a8a8a",
        "raw-line": "#4e4e4e",
        "run-1": "#ffaf00",
        "run-2": "#5fd7ff",
        "run-3": "#d787af",
        "run-4": "#00af87",
        "run-5": "#ffff5f",
        "run-6": "#ff5f00",
        "run-7": "#af87ff",
        "run-8": "#bcbcbc",
        "block-cursor-foreground": "#121212",
        "block-cursor-background": "#5fafff",
        "block-cursor-text-style": "none",
        "block-cursor-blurred-background": "#303030",
        "footer-background": "#1c1c1c",
        "footer-key-foreground": "#5fafff",
        "footer-description-foreground": "#bcbcbc",
        "input-selection-background": "#5f87af 60%",
    },
)

LIGHT = Theme(
    name="so-tui-light",
    dark=False,
    primary="#005faf",
    secondary="#5f5faf",
    accent="#005faf",
    success="#00875f",
    warning="#875f00",
    error="#af0000",
    foreground="#262626",
    background="#ffffff",
    surface="#eeeeee",
    panel="#e4e4e4",
    boost="#e4e4e4",
    variables={
        "faint": "#626262",
        "rule": "#d0d0d0",
        "adam": "#005faf",
        "main-core": "#af5f00",
        "other-core": "#808080",
        "forward": "#0087d7",
        "backward": "#005faf",
        "exposed": "#af5f00",
        "data-part": "#5f5faf",
        "other-part": "#808080",
        "raw-line": "#b2b2b2",
        "run-1": "#af5f00",
        "run-2": "#0087af",
        "run-3": "#af5f87",
        "run-4": "#00875f",
        "run-5": "#878700",
        "run-6": "#d75f00",
        "run-7": "#5f5faf",
        "run-8": "#626262",
        "block-cursor-foreground": "#ffffff",
        "block-cursor-background": "#005faf",
        "block-cursor-text-style": "none",
        "block-cursor-blurred-background": "#d0d0d0",
        "footer-background": "#eeeeee",
        "footer-key-foreground": "#005faf",
        "footer-description-foreground": "#444444",
        "input-selection-background": "#87afd7 60%",
    },
)

THEMES = (DARK, LIGHT, CONTRAST, COLOUR_BLIND)

# What a theme of Textual's own lacks, in terms of what every theme has.
_FALLBACKS = {
    "faint": "foreground-muted",
    "rule": "panel-lighten-2",
    "adam": "primary",
    "main-core": "accent",
    "other-core": "foreground-muted",
    "forward": "primary",
    "backward": "primary-darken-2",
    "exposed": "accent",
    "data-part": "secondary",
    "other-part": "foreground-muted",
    "raw-line": "foreground-disabled",
    "run-1": "warning",
    "run-2": "secondary",
    "run-3": "success",
    "run-4": "error",
    "run-5": "warning-darken-2",
    "run-6": "secondary-darken-2",
    "run-7": "success-darken-2",
    "run-8": "error-darken-2",
}


def fallback_variables(variables: dict[str, str]) -> dict[str, str]:
    """Return the program's own colour names for a theme that does not define them."""
    return {name: variables.get(base, variables["foreground"]) for name, base in _FALLBACKS.items()}
