"""The order of the list of runs, and its groups. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, get_args, get_type_hints

from so_tui.runs import comparison
from so_tui.settings.types import RunListSettings
from so_tui.ui.run_columns import model_of
from so_tui.ui.runlist import RunRow

if TYPE_CHECKING:
    from so_tui.runs import RunDirectory
    from so_tui.runs.results import RunResults
    from so_tui.ui.loss_curve import LossCurve

_TYPES = get_type_hints(RunListSettings)
SORTS: tuple[str, ...] = get_args(_TYPES["sort"])
GROUPS: tuple[str, ...] = get_args(_TYPES["group"])


def ordered(
    rows: Iterable[RunRow], curves: Mapping[RunDirectory, LossCurve], settings: RunListSettings
) -> list[RunRow]:
    """Return rows, which come newest first, sorted, and the rows of a group together. Groups come in the order of their first row."""

    def results(row: RunRow) -> RunResults | None:
        return curves[row.run].results if row.run in curves else None

    found = comparison.ordered(rows, settings.sort, text_of, lambda row: row.state.step, results)
    if settings.group != "none":
        first: dict[str, int] = {}
        for index, row in enumerate(found):
            first.setdefault(text_of(row, settings.group), index)
        found.sort(key=lambda row: first[text_of(row, settings.group)])
    return found


def text_of(row: RunRow, key: str) -> str:
    """Return what runs are sorted or grouped by; empty for no group. A run with several tags is in the group of all of them."""
    match key:
        case "name":
            return row.run.name
        case "model":
            return model_of(row)
        case "state":
            return row.shown_state
        case "host":
            return row.state.host
        case "tag":
            return " ".join(row.notes.tags)
    return ""


def following(values: tuple[str, ...], value: str) -> str:
    """Return the value after one, and the first after the last."""
    return values[(values.index(value) + 1) % len(values)]


def searched_text(row: RunRow) -> str:
    """Return the text in which the list's filter searches."""
    return f"{row.run.name} {model_of(row)} {row.state.state} {' '.join(row.notes.tags)} {row.notes.note}".lower()
