"""Two themes for eyes that the others do not suit: one of high contrast, and one whose colours all kinds of colour vision tell apart.

Tests compute both: contrasts by WCAG 2.2 (at least 7 to 1), and distances between the colours of parts, simulated for protanopia,
deuteranopia and tritanopia. All colours sit on the xterm 256-colour cube.
"""

from __future__ import annotations

from dataclasses import replace

from textual.theme import Theme

from so_tui.ui.standard_themes import DARK

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
