"""A chart of the screen as a picture of its own (SVG), for documents. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from so_tui.svg import Curve, curves
from so_tui.ui.series import Line

_MOST_POINTS = 4000


def chart_svg(title: str, lines: Sequence[Line], names: Sequence[str], per: float = 1.0) -> str:
    """Return lines over their steps; values that are not finite leave gaps.

    Args:
        title: What is drawn.
        lines: The lines.
        names: Their names, one each.
        per: What values are divided by.
    """
    return curves(
        title, [Curve(name, _points(line, per)) for line, name in zip(lines, names, strict=True)]
    )


def _points(line: Line, per: float) -> list[tuple[float, float]]:
    """Return step and value of at most as many rows as a picture shows: of each part, its first and its extremes.

    Rows before the first step and after the last one, as samples have, are left out.
    """
    every = max(1, -(-line.length // _MOST_POINTS))
    found = []
    for start in range(0, line.length, every):
        extremes = line.series.extremes(start, min(line.length, start + every))
        step = line.steps[start] if line.steps is not None else float(start)
        if not math.isfinite(step):
            continue
        if extremes is None:
            found.append((step, math.nan))
        else:
            found += [(step, value / per) for value in dict.fromkeys(extremes)]
    return found
