"""Runs side by side: ranked by what came of them, then the settings that differ. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest

from rich.cells import cell_len, chop_cells, set_cell_size

from so_tui.runs import RunDirectory
from so_tui.runs.results import (
    RESULTS,
    RunResults,
    differing,
    ordered,
    result_of_order,
    result_text,
)
from so_tui.ui.charts.chart import Look
from so_tui.ui.form import settings_of
from so_tui.ui.lines import Pieces
from so_tui.ui.run_rows import RunRow
from so_tui.ui.text import Content, distinct, faint, in_rows, shorten, shorten_path
from so_tui.units import plural

NARROWEST = 12
"""Cells of a column of a run's settings."""
MOST_FOLDS = 3
LEAST_NAME = 10
"""Cells of a run's name beside its results."""
HIGHEST_BEST = ("tokens_per_s", "mfu")
NOT_BETTER = ("mean_steps",)
"""Results of which none is the best."""
DATA = ("data.source", "data.subset", "data.split", "data.format", "data.loss")
"""Settings that change what a loss is the mean of."""
OF_MODEL = ("model.config", "title")
"""Settings that say no more than the model where that differs."""
NO_LOOK = Look("faint", "")


def comparison(
    rows: Sequence[RunRow],
    results: Mapping[RunDirectory, RunResults],
    looks: Mapping[RunDirectory, Look],
    sort: str,
) -> tuple[str, Callable[[int], Content]]:
    """Return how runs whose settings are known differ: in one line, and as a table of a width.

    Args:
        rows: The runs.
        results: What came of them, as far as it is known.
        looks: The looks of their lines in the chart, where they have one.
        sort: The order of the list of runs: they are ranked by its result, else by mean loss.
    """
    key = result_of_order(sort) or "loss"
    by = sort if result_of_order(sort) else "loss"
    ranked = ordered(
        rows, by, lambda row, _: row.run.name, lambda _: 0, lambda row: results.get(row.run)
    )
    settings = [settings_of(row.spec) for row in ranked if row.spec is not None]
    unlike = differing(settings)
    if "model.id" in unlike:
        unlike = [path for path in unlike if path not in OF_MODEL]
    count = len(unlike)
    differ = f"{plural(count, 'setting')} differ{'s' if count == 1 else ''}"
    differ = differ if count else "no setting differs"
    found = [results.get(row.run, RunResults()) for row in ranked]
    title = f"{plural(len(rows), 'run')} by {RESULTS[key]}, {differ}"
    marks = [looks.get(row.run, NO_LOOK) for row in ranked]
    names = [row.run.name for row in ranked]
    without = [
        "" if row.state.step else "no steps yet" if row.live else "no step" for row in ranked
    ]
    return title, partial(_laid_out, names, marks, found, without, key, settings, unlike)


def _laid_out(
    names: Sequence[str],
    marks: Sequence[Look],
    found: Sequence[RunResults],
    without: Sequence[str],
    key: str,
    settings: Sequence[Mapping[str, str]],
    unlike: Sequence[str],
    width: int,
) -> Content:
    lines = [*_ranking(names, marks, found, without, key, width)]
    if data := [path for path in DATA if path in unlike]:
        words = f"! {', '.join(data)} differ: losses on different data do not compare"
        if len(data) == 1:
            words = words.replace(" differ:", " differs:")
        wrapped = Content.styled(words, "$warning").wrap(width)
        lines += [Content(""), in_rows(wrapped)]
    heading = "settings that differ"
    label = max(map(len, (heading, *unlike)))
    label = min(label, max(NARROWEST, width - 2 * NARROWEST - 4))
    if unlike:
        lines += [Content(""), *_settings(heading, names, marks, settings, unlike, (label, width))]
    same = len(settings[0].keys() - set(differing(settings)))
    lines += [Content(""), faint(f"{plural(same, 'setting')} the same in all runs")]
    return in_rows(lines)


def _ranking(
    names: Sequence[str],
    marks: Sequence[Look],
    found: Sequence[RunResults],
    without: Sequence[str],
    key: str,
    width: int,
) -> Iterator[Content]:
    """Yield a line for each run with its results, what they are ranked by first, as many as fit.
    The best of each is bold. A run without any says so, and one without the first has no rank.
    """
    keys = [key, *(other for other in RESULTS if other != key)]
    texts = {each: [result_text(one, each) for one in found] for each in keys}
    keys = [each for each in keys if any(texts[each]) or each == key]
    cells = {each: max(map(cell_len, (RESULTS[each], *texts[each]))) for each in keys}
    number = len(str(len(names)))
    longest = max(map(cell_len, names))
    before = number + 4
    while len(keys) > 1 and before + min(longest, 24) + sum(cells[k] + 2 for k in keys) > width:
        keys.pop()
    room = width - before - sum(cells[each] + 2 for each in keys)
    column = max(LEAST_NAME, min(longest, room))
    heads = "".join(f"  {RESULTS[each]:>{cells[each]}}" for each in keys)
    yield faint(" " * (before + column) + heads)
    best = {each: _best(found, each) for each in keys}
    shown = distinct(names, column)
    for at, (name, look) in enumerate(zip(shown, marks, strict=True)):
        rank = "" if getattr(found[at], key) is None else str(at + 1)
        line: Pieces = [
            (f"{rank:>{number}}  ", "$faint"),
            (f"{look.sign or '●'} ", f"${look.role}"),
        ]
        line.append(set_cell_size(name, column))
        if without[at] and found[at] == RunResults():
            line.append((f"  {without[at]}", "$faint"))
            yield Content.assemble(*line)
            continue
        for each in keys:
            style = "bold $success" if at in best[each] else ""
            line.append((f"  {texts[each][at]:>{cells[each]}}", style))
        yield Content.assemble(*line)


def _best(found: Sequence[RunResults], key: str) -> set[int]:
    """Return which runs have the best value; none where only one is measured, or all are equal."""
    values = {at: value for at, one in enumerate(found) if (value := getattr(one, key)) is not None}
    if key in NOT_BETTER or len({result_text(found[at], key) for at in values}) < 2:
        return set()
    best = max(values.values()) if key in HIGHEST_BEST else min(values.values())
    return {at for at, value in values.items() if value == best}


def _settings(
    heading: str,
    names: Sequence[str],
    marks: Sequence[Look],
    settings: Sequence[Mapping[str, str]],
    unlike: Sequence[str],
    size: tuple[int, int],
) -> Iterator[Content]:
    """Yield the settings that are unlike, with a column for each run, as many in a row as fit. What
    differs from the first run's stands out.
    """
    label, width = size
    beside = max(1, min(len(names), (width - label) // (NARROWEST + 2)))
    column = max(NARROWEST, min(28, (width - label) // beside - 2))
    shown = distinct(names, column)
    for start in range(0, len(names), beside):
        chosen = slice(start, start + beside)
        heads = zip(shown[chosen], (f"bold ${look.role}" for look in marks[chosen]), strict=True)
        yield from _rows(heading, list(heads), label, column, 1)
        for path in unlike:
            first, *_ = values = [each.get(path, "") for each in settings]
            styled = [(value, "" if value == first else "bold $warning") for value in values]
            yield from _rows(path, styled[chosen], label, column, MOST_FOLDS)


def _rows(
    name: str,
    texts: Sequence[tuple[str, str]],
    label: int,
    column: int,
    most: int,
) -> Iterator[Content]:
    """Yield the lines of a row: its name, and a column for each text with its style, in at most
    ``most`` lines, on the right of its column if it fits into one.
    """
    folded = [chop_cells(shorten(text, column * most), column) for text, _ in texts]
    for number, cells in enumerate(zip_longest(*folded, fillvalue="")):
        head = shorten_path(name, label) if not number else ""
        line: Pieces = [(set_cell_size(head, label), "$faint")]
        for cell, whole, (_, style) in zip(cells, folded, texts, strict=True):
            gap = " " * (column - cell_len(cell)) if len(whole) == 1 else ""
            line += ["  ", gap, (cell if gap else set_cell_size(cell, column), style)]
        yield Content.assemble(*line)
