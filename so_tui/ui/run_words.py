"""A run in words, and the settings of two runs beside each other. Pure functions."""

from __future__ import annotations

from typing import NamedTuple

from textual.content import Content

from so_tui.spec.units import thousands
from so_tui.ui.form import values_of
from so_tui.ui.runlist import RunRow
from so_tui.ui.text import plural, shorten, shorten_path
from so_tui.ui.widgets.stats import state_content


def facts(row: RunRow, width: int) -> Content:
    """State and why, what it trains, what it left on disk; for a screen of ``width`` columns."""
    state = row.state
    lines = [state_content(state.state)]
    if state.reason:
        lines.append(Content.styled(state.reason, "$error" if state.state in ("failed", "lost") else "$warning"))
    if state.suggestion:
        lines.append(Content.assemble(("next: ", "$faint"), state.suggestion))
    if state.detail and row.live:
        lines.append(Content(state.detail))
    if row.spec is not None:
        lines.append(Content.assemble(("trains ", "$faint"), f"{row.spec.model.id} with {row.spec.offload.mode}"))
    saved = f"checkpoint of step {thousands(state.saved_step)}" if state.saved_step is not None else "no checkpoint"
    lines.append(Content.assemble(("saved ", "$faint"), f"{saved}, {plural(state.attempt, 'attempt')}"))
    lines.append(Content.assemble(("folder ", "$faint"), shorten_path(str(row.run.path), max(20, width * 2 // 5 - 12))))
    return Content("\n").join(lines)


class Comparison(NamedTuple):
    title: str
    table: str


def comparison(left: RunRow, right: RunRow, width: int) -> Comparison | None:
    """Settings of two runs side by side, those that differ on top; None where one's cannot be read."""
    if left.spec is None or right.spec is None:
        return None
    one, two = values_of(left.spec), values_of(right.spec)
    paths = sorted(one.keys() | two.keys(), key=lambda path: (one.get(path) == two.get(path), path))
    differing = sum(one.get(path) != two.get(path) for path in paths)
    label = max(map(len, paths))
    column = max(12, min(40, (width - label - 16) // 2))
    rows = [f"{'':{label}}  {shorten(left.run.name, column):<{column}}  {shorten(right.run.name, column)}"]
    for index, path in enumerate(paths):
        if index == differing:
            rows.append("the same in both:")
        rows.append(f"{path:{label}}  {shorten(one.get(path, ''), column):<{column}}  {shorten(two.get(path, ''), column)}")
    return Comparison(f"{plural(differing, 'setting')} that differ{'s' if differing == 1 else ''}", "\n".join(rows))
