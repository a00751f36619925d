"""All themes of so-tui, and the program's own colours in a theme that does not define them."""

from __future__ import annotations

from so_tui.ui.accessible_themes import COLOUR_BLIND, CONTRAST
from so_tui.ui.standard_themes import DARK, LIGHT

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
