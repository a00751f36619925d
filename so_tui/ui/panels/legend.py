"""The legend of runs that are laid over each other: every one of them, with its value in the chart with the focus."""

from __future__ import annotations

from so_tui.ui.chart_metrics import Metric
from so_tui.ui.overlay import Overlaid, colour_of
from so_tui.ui.series import Axis
from so_tui.ui.snapshot import Snapshot
from so_tui.ui.text import Content, shorten
from so_tui.ui.widgets.drawing import value_at
from so_tui.ui.widgets.styled_lines import StyledLines

LONGEST_NAME = 34


class RunLegend(StyledLines):
    """As many rows as it takes: no run is left out."""

    def show(self, snapshot: Snapshot, overlays: tuple[Overlaid, ...], metric: Metric, axis: Axis | None, cursor: float | None) -> None:
        """Name the followed run and those over it, with their newest values, or those at the cursor, in lines of the widget's width."""
        self.display = bool(overlays)
        if not overlays:
            return
        entries = [Content.assemble(("● ", "$accent"), (shorten(snapshot.run.name, LONGEST_NAME), "bold"))]
        for index, overlaid in enumerate(overlays):
            sign, role = colour_of(index)
            entry = Content.assemble((f"{sign} ", f"${role}"), shorten(overlaid.run.name, LONGEST_NAME))
            line = overlaid.line(metric.fields[0], role) if metric.fields else None
            if overlaid.more:
                entry += Content.styled(" reading …", "$faint")
            elif line is not None and line.length and axis is not None:
                ended = cursor is not None and cursor > overlaid.end[0 if axis.unit == "step" else 1]
                value = None if ended else value_at(line, axis, axis.high if cursor is None else cursor)
                entry += Content.styled(f" {'-' if value is None else metric.format_value(value / metric.per)}", "$faint")
            entries.append(entry)
        self.update(Content("\n").join(wrapped(entries, max(20, self.size.width))))


def wrapped(entries: list[Content], width: int, gap: str = "   ") -> list[Content]:
    """Return entries in lines of at most ``width`` cells, none cut and none left out; one that is wider has its own line."""
    lines: list[Content] = []
    for entry in entries:
        if lines and lines[-1].cell_length + len(gap) + entry.cell_length <= width:
            lines[-1] = lines[-1] + gap + entry
        else:
            lines.append(entry)
    return lines
