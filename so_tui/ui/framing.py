"""Frames around panels: rounded lines with the panel's title on the left of the upper one, and its key figure on the right.

Small terminals have none (``-narrow``, ``-short``): there a panel has its title line only.
"""

from __future__ import annotations

from textual.widget import Widget

SIDE = 1
"""Cells of a frame at the left and at the right."""
BOTTOM = 1
"""Rows of a frame below what it surrounds. The upper line is the panel's title line, which stands there without a frame too."""


def framed(widget: Widget) -> bool:
    """Return whether the panels of a widget's screen have frames."""
    screen = widget.screen
    return not (screen.has_class("-narrow") or screen.has_class("-short"))
