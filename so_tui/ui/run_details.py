"""Details of a run, and runs side by side. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from rich.cells import cell_len, chop_cells, set_cell_size

from so_tui.runs import RunDirectory
from so_tui.runs.comparison import RESULTS, differing, result_text
from so_tui.runs.results import RunResults
from so_tui.ui.form import values_of
from so_tui.ui.runlist import RunRow
from so_tui.ui.text import Content, brief_message, distinct, plural, shorten, shorten_path
from so_tui.ui.widgets.run_lines import state_content
from so_tui.units import thousands

NARROWEST = 12
"""Cells of a column of a run's settings."""
MOST_FOLDS = 3


def facts(
    row: RunRow, width: int, results: RunResults | None = None, exported: Path | None = None
) -> Content:
    """Return state and reason, model, checkpoints and the last export of a run, and results where they are given, for ``width`` cells."""
    state = row.state
    lines = [state_content(row.shown_state)]
    if state.reason:
        lines.append(
            Content.styled(
                brief_message(state.reason),
                "$error" if state.state in ("failed", "lost") else "$warning",
            )
        )
    if state.suggestion:
        lines.append(Content.assemble(("next: ", "$faint"), brief_message(state.suggestion)))
    if state.detail and row.live:
        lines.append(Content(brief_message(state.detail)))
    if row.spec is not None:
        lines.append(
            Content.assemble(
                ("trains ", "$faint"), f"{row.spec.model.id} with {row.spec.offload.mode}"
            )
        )
    saved = (
        f"checkpoint of step {thousands(state.saved_step)}"
        if state.saved_step is not None
        else "no checkpoint"
    )
    lines.append(
        Content.assemble(("saved ", "$faint"), f"{saved}, {plural(state.attempt, 'attempt')}")
    )
    if row.notes.note or row.notes.tags:
        tags = " ".join(f"#{tag}" for tag in row.notes.tags)
        lines.append(
            Content.assemble(
                ("note ", "$faint"), brief_message(row.notes.note), " ", (tags, "$accent")
            )
        )
    lines.append(_place("folder", row.run.path, width))
    if exported is not None:
        lines.append(_place("exported", exported, width))
    measured = (
        {}
        if results is None
        else {name: text for key, name in RESULTS.items() if (text := result_text(results, key))}
    )
    if measured:
        lines.append(Content(""))
        lines += [
            Content.assemble((f"{name:<16}", "$faint"), text) for name, text in measured.items()
        ]
    return Content("\n").join(lines)


def _place(name: str, path: Path, width: int) -> Content:
    """Return a path behind its name, or below it where the path's own name has no room beside it."""
    below = len(name) + 1 + len("…/") + cell_len(path.name) > width
    room = width - (2 if below else len(name) + 1)
    return Content.assemble(
        (f"{name}\n  " if below else f"{name} ", "$faint"), shorten_path(str(path), max(18, room))
    )


@dataclass(frozen=True)
class Comparison:
    """Runs side by side: their settings by path, as they are typed, and what came of them."""

    names: tuple[str, ...]
    settings: tuple[dict[str, str], ...]
    results: tuple[RunResults, ...] = ()

    @property
    def differing(self) -> list[str]:
        return differing(self.settings)

    @property
    def title(self) -> str:
        count = len(self.differing)
        settings = (
            f"{plural(count, 'setting')} that differ{'s' if count == 1 else ''}"
            if count
            else "no setting differs"
        )
        return f"{plural(len(self.names), 'run')}: {settings}"

    def table(self, width: int) -> str:
        """Return results and settings side by side in ``width`` cells, those that differ first, with long values wrapped.

        Runs for which there is no room are below, in tables of their own.
        """
        unlike, same = (
            self.differing,
            sorted(path for path in self.settings[0] if path not in self.differing),
        )
        shown = RESULTS if self.results else {}
        label = min(
            max(map(len, (*unlike, *same, *shown.values()))),
            max(NARROWEST, width - 2 * NARROWEST - 4),
        )
        beside = max(1, min(len(self.names), (width - label) // (NARROWEST + 2)))
        column = max(NARROWEST, (width - label) // beside - 2)
        lines: list[str] = []
        names = distinct(self.names, column)
        for start in range(0, len(self.names), beside):
            part = range(start, min(len(self.names), start + beside))
            lines += [*_rows("", [names[at] for at in part], label, column, 1)]
            for key, name in shown.items():
                texts = [result_text(self.results[at], key) for at in part]
                lines += _rows(name, texts, label, column, 1) if any(texts) else []
            for path in unlike:
                lines += _rows(
                    path,
                    [self.settings[at].get(path, "") for at in part],
                    label,
                    column,
                    MOST_FOLDS,
                )
            lines.append("")
        lines.append("the same in all:")
        for path in same:
            lines += _rows(
                path, [self.settings[0][path]], label, max(NARROWEST, width - label - 2), 1
            )
        return "\n".join(lines)


def _rows(name: str, texts: Sequence[str], label: int, column: int, most: int) -> Iterator[str]:
    """Yield the lines of a row: its name, and a column for each text."""
    for cells in zip_longest(
        [shorten_path(name, label)], *(folded(text, column, most) for text in texts), fillvalue=""
    ):
        yield "  ".join(
            (set_cell_size(cells[0], label), *(set_cell_size(cell, column) for cell in cells[1:]))
        ).rstrip()


def folded(text: str, width: int, most: int) -> list[str]:
    """Return ``text`` in at most ``most`` lines of ``width`` cells."""
    return chop_cells(shorten(text, width * most), width)


def comparison(
    rows: Sequence[RunRow], results: Mapping[RunDirectory, RunResults]
) -> Comparison | None:
    """Return runs side by side; None where the settings of one cannot be read."""
    settings = [values_of(row.spec) for row in rows if row.spec is not None]
    if len(settings) < len(rows):
        return None
    return Comparison(
        tuple(row.run.name for row in rows),
        tuple(settings),
        tuple(results.get(row.run, RunResults()) for row in rows),
    )
