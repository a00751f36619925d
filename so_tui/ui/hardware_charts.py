"""Charts of what was sampled: a line for each GPU, node or host, its limit, and marks of throttling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from so_tui.ui.chart_metrics import Metric
from so_tui.ui.glyphs import GlyphName
from so_tui.ui.line_looks import Look, look_of
from so_tui.ui.loads import Sampled
from so_tui.ui.series import Line
from so_tui.ui.widgets.chart import Chart


def chart_of(metric: Metric, glyphs: GlyphName) -> Chart:
    """Return an empty chart of a metric."""
    per, unit = metric.shown_in
    return Chart(
        metric.title,
        unit=unit,
        format_value=metric.format_value,
        per=per,
        zero=metric.zero,
        ceiling=metric.ceiling,
        mark_gaps=metric.key == "loss",
        glyphs=glyphs,
        id=metric.key,
    )


def sampled_lines(
    metric: Metric,
    sampled: Mapping[str, tuple[Sampled, ...]],
    *,
    alone: bool = True,
    whole: bool = False,
    coloured: bool = True,
) -> list[tuple[Line, str]]:
    """Return the lines of a metric with their names in the heading; limits first, so that values are drawn over them.

    Several GPUs, nodes or hosts have a colour each, unless other runs are laid over them, whose colours these are; a sign where colours
    would be used again, or nothing is ``coloured``. In a heading, those after the first are numbers alone; with ``whole`` every name says
    everything.
    """
    pairs = [
        (limit.line("limit"), "limit" if whole or not at else "")
        for at, limit in enumerate(sampled.get(metric.limit, ()))
    ]
    several = len({line.host for name in metric.samples for line in sampled.get(name, ())}) > 1
    drawn = 0
    for number, name in enumerate(metric.samples):
        lines = sampled.get(name, ())
        called = metric.names[number] if metric.names else ""
        role = "second" if number else metric.role
        if len(lines) == 1:
            pairs.append((lines[0].line(role), called or "."))
            continue
        kind = name.partition(".")[0].replace("gpu", "GPU")
        for at, line in enumerate(lines):
            place = f"{line.host} {line.index}" if several else str(line.index)
            word = (
                place
                if at and not whole
                else f"{called}{':' if called else ''} {kind} {place}".strip()
            )
            look = look_of(drawn, coloured=coloured) if alone else Look(role, "")
            pairs.append((replace(line.line(look.role), sign=look.sign), word))
            drawn += 1
    return pairs


def marked_lines(metric: Metric, sampled: Mapping[str, tuple[Sampled, ...]]) -> list[Line]:
    """Return the lines whose values are marked on the axis."""
    return [line.line("bad") for line in sampled.get(metric.marked, ())]
