"""All themes of so-tui, and the program's own colours in a theme that does not define them."""

from __future__ import annotations

from dataclasses import replace

from textual.theme import Theme

# The themes dark and light, and what each colour stands for.
#
# A colour says what a thing is, the same on every screen: purple is work of the GPU, blue is Adam
# and its cores, orange the training process and its cores, green memory. The accent is the loss,
# what has the focus, and keys.
#
# All colours sit on the xterm 256-colour cube, so a terminal or multiplexer that rounds to 256
# colours shows the same picture. Verdicts are told apart by lightness and by blue against red,
# which colour-blind eyes keep; a sign or a word always stands beside them.


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
    variables={
        "faint": "#8a8a8a",
        "rule": "#3a3a3a",
        "adam": "#5fafff",
        "main-core": "#ffaf5f",
        "other-core": "#8a8a8a",
        "gpu": "#d787af",
        "memory": "#5fd7af",
        "forward": "#d787af",
        "backward": "#af5f87",
        "exposed": "#5fafff",
        "data-part": "#d7d787",
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
        "block-cursor-background": "#af87ff",
        "block-cursor-text-style": "none",
        "block-cursor-blurred-background": "#303030",
        "footer-background": "#1c1c1c",
        "footer-key-foreground": "#af87ff",
        "footer-description-foreground": "#bcbcbc",
        "input-selection-background": "#875faf 60%",
    },
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
    variables={
        "faint": "#626262",
        "rule": "#d0d0d0",
        "adam": "#005faf",
        "main-core": "#af5f00",
        "other-core": "#808080",
        "gpu": "#af0087",
        "memory": "#00875f",
        "forward": "#d75faf",
        "backward": "#af0087",
        "exposed": "#005faf",
        "data-part": "#878700",
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
        "block-cursor-background": "#5f00af",
        "block-cursor-text-style": "none",
        "block-cursor-blurred-background": "#d0d0d0",
        "footer-background": "#eeeeee",
        "footer-key-foreground": "#5f00af",
        "footer-description-foreground": "#444444",
        "input-selection-background": "#d7afff 60%",
    },
)


# Two themes for eyes that the others do not suit: one of high contrast, and one whose colours all
# kinds of colour vision tell apart.
#
# Tests compute both: contrasts by WCAG 2.2 (at least 7 to 1), and distances between the colours of
# parts, simulated for protanopia, deuteranopia and tritanopia. All colours sit on the xterm
# 256-colour cube.


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
    variables={
        "faint": "#d0d0d0",
        "rule": "#a8a8a8",
        "adam": "#5fd7ff",
        "main-core": "#ffaf00",
        "other-core": "#bcbcbc",
        "gpu": "#d7afff",
        "memory": "#5fff87",
        "forward": "#d7afff",
        "backward": "#af87ff",
        "exposed": "#5fd7ff",
        "data-part": "#ffff00",
        "other-part": "#bcbcbc",
        "raw-line": "#a8a8a8",
        "run-1": "#ffd700",
        "run-2": "#5fd7ff",
        "run-3": "#ff87d7",
        "run-4": "#5fff87",
        "run-5": "#ffff87",
        "run-6": "#ff8700",
        "run-7": "#afafff",
        "run-8": "#d0d0d0",
        "block-cursor-foreground": "#000000",
        "block-cursor-background": "#ffff00",
        "block-cursor-text-style": "bold",
        "block-cursor-blurred-background": "#585858",
        "footer-background": "#000000",
        "footer-key-foreground": "#ffff00",
        "footer-description-foreground": "#ffffff",
        "input-selection-background": "#005fff 80%",
    },
)

# After the palette of Okabe and Ito: sky blue, orange, bluish green, yellow, vermilion, reddish purple.
COLOUR_BLIND = replace(
    DARK,
    name="so-tui-colour-blind",
    success="#00af87",
    warning="#ffff5f",
    error="#ff5f00",
    variables={
        **DARK.variables,
        "faint": "#9e9e9e",
        "rule": "#4e4e4e",
        "main-core": "#ff8700",
        "memory": "#00af87",
        "data-part": "#ffff5f",
        "raw-line": "#585858",
        "run-7": "#5f87ff",
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
    "gpu": "secondary",
    "memory": "success",
    "forward": "secondary",
    "backward": "secondary-darken-2",
    "exposed": "primary",
    "data-part": "warning",
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
