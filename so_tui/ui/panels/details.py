"""The dashboard's details at the right of a wide terminal: everything that was recorded of one step."""

from __future__ import annotations

import itertools
import time

from textual import getters
from textual.app import ComposeResult

from so_tui.runs.records import StepRecord
from so_tui.ui.chart_metrics import STEP_METRICS
from so_tui.ui.framing import BOTTOM, framed
from so_tui.ui.kept_lines import KeptVertical
from so_tui.ui.snapshot import Snapshot
from so_tui.ui.text import Content, shorten
from so_tui.ui.widgets.rule import Rule
from so_tui.ui.widgets.styled_lines import StyledLines
from so_tui.units import thousands

ENTRY = 32
"""Cells of a name and its value."""
VALUE = 14
"""Cells of them for the value."""


class StepDetails(KeptVertical):
    """The step at the cursor, else the newest one."""

    heading = getters.child_by_id("details-rule", Rule)
    lines = getters.query_one("#details", StyledLines)

    def compose(self) -> ComposeResult:
        yield Rule("step", id="details-rule")
        with KeptVertical(classes="frame"):
            yield StyledLines(id="details")

    def show(self, snapshot: Snapshot, width: int) -> None:
        """Show one step of ``snapshot`` in lines of ``width`` cells."""
        at_cursor = snapshot.inspected is not None
        record = snapshot.inspected.step if snapshot.inspected is not None else snapshot.latest
        self.heading.update(*_heading(record, at_cursor))
        self.lines.update(
            Content("\n").join(detail_lines(record, width)) if record is not None else Content("")
        )

    @property
    def rows(self) -> int:
        """Rows that the panel takes."""
        return 1 + self.lines.rows + (BOTTOM if framed(self) else 0)


def _heading(record: StepRecord | None, at_cursor: bool) -> tuple[str, str]:
    """Return title and figure."""
    if record is None:
        return "step", "nothing was recorded here" if at_cursor else "none yet"
    clock = time.strftime("%H:%M:%S", time.localtime(record.time))
    return (
        f"step {thousands(record.step)}",
        f"{clock}, {'at the cursor' if at_cursor else 'the newest'}",
    )


def detail_lines(record: StepRecord, width: int) -> list[Content]:
    """Return all numbers of a step that a chart can show, as many beside each other as fit into ``width`` cells."""
    entries = []
    for metric in STEP_METRICS:
        value = getattr(record, metric.fields[0]) if len(metric.fields) == 1 else None
        if value is not None:
            per, unit = metric.shown_in
            written = (
                thousands(value)
                if isinstance(value, int) and per == 1
                else metric.format_value(value / per)
            )
            text = f"{written} {unit}"
            name = shorten(metric.title, ENTRY - VALUE - 1)
            entries.append(
                Content.assemble((f"{name:<{ENTRY - VALUE}}", "$faint"), f"{text:<{VALUE}}")
            )
    columns = max(1, width // ENTRY)
    rows = -(-len(entries) // columns)
    ordered = [entries[start : start + rows] for start in range(0, len(entries), rows)]
    return [
        Content("").join(entry for entry in row if entry is not None)
        for row in itertools.zip_longest(*ordered)
    ]
