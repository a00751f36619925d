"""The legend of runs that are laid over each other: every one of them, with its value in the chart with the focus."""

from __future__ import annotations

from so_tui.ui.chart_metrics import Metric
from so_tui.ui.line_looks import look_of
from so_tui.ui.overlay import Overlaid
from so_tui.ui.series import Axis
from so_tui.ui.snapshot import Snapshot
from so_tui.ui.text import Content, distinct
from so_tui.ui.widgets.drawing import value_at
from so_tui.ui.widgets.styled_lines import StyledLines

LONGEST_NAME = 34


class RunLegend(StyledLines):
    """As many rows as it takes: no run is left out."""

    room = 20
    """Cells that it has, which is known before it is shown. Its own width is not."""

    def show(
        self,
        snapshot: Snapshot,
        overlays: tuple[Overlaid, ...],
        metric: Metric,
        axis: Axis | None,
        cursor: float | None,
    ) -> None:
        """Name the followed run and those over it, with their newest values, or those at the cursor, in lines that fit."""
        self.display = bool(overlays)
        if not overlays:
            return
        followed, *others = distinct(
            [snapshot.run.name, *(overlaid.run.name for overlaid in overlays)], LONGEST_NAME
        )
        entries = [Content.assemble(("● ", "$accent"), (followed, "bold"))]
        for index, (overlaid, name) in enumerate(zip(overlays, others, strict=True)):
            role, sign = look_of(index, coloured=not self.app.no_color)
            entry = Content.assemble((f"{sign or '●'} ", f"${role}"), name)
            entries.append(
                entry + Content.styled(f" {_value_text(overlaid, metric, axis, cursor)}", "$faint")
            )
        self.update(Content("\n").join(wrapped(entries, self.room)))


def _value_text(overlaid: Overlaid, metric: Metric, axis: Axis | None, cursor: float | None) -> str:
    """Return the value of a run at the cursor, or its newest one; of several lines, the least and the greatest."""
    if overlaid.more:
        return "reading …"
    lines = overlaid.lines(metric, "main")
    if not lines or axis is None:
        return "not measured"
    if cursor is not None and cursor > overlaid.end[0 if axis.unit == "step" else 1]:
        return "-"
    measured = lines[:1] if metric.fields else lines  # of the parts of a step, the first one
    values = [
        value
        for line in measured
        if (value := value_at(line, axis, axis.high if cursor is None else cursor)) is not None
    ]
    per, _ = metric.shown_in
    texts = (
        [metric.format_value(value / per) for value in (min(values), max(values))]
        if values
        else ["-"]
    )
    return " to ".join(dict.fromkeys(texts))


def wrapped(entries: list[Content], width: int, gap: str = "   ") -> list[Content]:
    """Return entries in lines of at most ``width`` cells, none cut and none left out; one that is wider has its own line."""
    lines: list[Content] = []
    for entry in entries:
        if lines and lines[-1].cell_length + len(gap) + entry.cell_length <= width:
            lines[-1] = lines[-1] + gap + entry
        else:
            lines.append(entry)
    return lines
