"""Details of a run, and the settings of two runs side by side. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from rich.cells import chop_cells, set_cell_size

from so_tui.ui.form import values_of
from so_tui.ui.runlist import RunRow
from so_tui.ui.text import Content, brief_message, plural, shorten, shorten_path
from so_tui.ui.widgets.run_lines import state_content
from so_tui.units import thousands

NARROWEST = 12
"""Cells of a column of two runs' settings."""
MOST_FOLDS = 3


def facts(row: RunRow, width: int) -> Content:
    """Return state and reason, model and checkpoints of a run, for a screen of ``width`` columns."""
    state = row.state
    lines = [state_content(row.shown_state)]
    if state.reason:
        lines.append(Content.styled(brief_message(state.reason), "$error" if state.state in ("failed", "lost") else "$warning"))
    if state.suggestion:
        lines.append(Content.assemble(("next: ", "$faint"), brief_message(state.suggestion)))
    if state.detail and row.live:
        lines.append(Content(brief_message(state.detail)))
    if row.spec is not None:
        lines.append(Content.assemble(("trains ", "$faint"), f"{row.spec.model.id} with {row.spec.offload.mode}"))
    saved = f"checkpoint of step {thousands(state.saved_step)}" if state.saved_step is not None else "no checkpoint"
    lines.append(Content.assemble(("saved ", "$faint"), f"{saved}, {plural(state.attempt, 'attempt')}"))
    lines.append(Content.assemble(("folder ", "$faint"), shorten_path(str(row.run.path), max(20, width * 2 // 5 - 12))))
    return Content("\n").join(lines)


@dataclass(frozen=True)
class Comparison:
    """The settings of two runs, by path, as they are typed."""

    names: tuple[str, str]
    left: dict[str, str]
    right: dict[str, str]

    @property
    def differing(self) -> list[str]:
        return sorted(path for path in self.left.keys() | self.right.keys() if self.left.get(path) != self.right.get(path))

    @property
    def title(self) -> str:
        count = len(self.differing)
        return f"{plural(count, 'setting')} that differ{'s' if count == 1 else ''}"

    def table(self, width: int) -> str:
        """Return the settings side by side in ``width`` cells, those that differ first, with long values wrapped."""
        differing, same = self.differing, sorted(path for path, text in self.left.items() if self.right.get(path) == text)
        label = min(max(map(len, (*differing, *same))), max(NARROWEST, width - 2 * NARROWEST - 4))
        column = max(NARROWEST, (width - label - 4) // 2)

        def rows(path: str, one: str, two: str, most: int) -> list[str]:
            cells = zip_longest([shorten_path(path, label)], folded(one, column, most), folded(two, column, most), fillvalue="")
            return [f"{set_cell_size(name, label)}  {set_cell_size(left, column)}  {right}".rstrip() for name, left, right in cells]

        lines = rows("", *self.names, 1)
        for path in differing:
            lines += rows(path, self.left.get(path, ""), self.right.get(path, ""), MOST_FOLDS)
        lines += ["", "the same in both:"]
        for path in same:
            lines += rows(path, self.left[path], self.right[path], 1)
        return "\n".join(lines)


def folded(text: str, width: int, most: int) -> list[str]:
    """Return ``text`` in at most ``most`` lines of ``width`` cells."""
    return chop_cells(shorten(text, width * most), width)


def comparison(left: RunRow, right: RunRow) -> Comparison | None:
    """Return the settings of two runs; None where one's cannot be read."""
    if left.spec is None or right.spec is None:
        return None
    return Comparison((left.run.name, right.run.name), values_of(left.spec), values_of(right.spec))
