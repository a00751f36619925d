"""What the filter of the list of runs finds: words, tags and settings. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, reduce

import msgspec

from so_tui.spec import field_index
from so_tui.ui.form import text_of
from so_tui.ui.run_rows import RunRow

TAG_SIGNS = ("#", "tag:")


def search(rows: Iterable[RunRow], text: str) -> list[RunRow]:
    """Return the runs that have every word of a text in small letters: ``#good`` and ``tag:good``
    are tags, ``ratio=0.9`` is a setting by its key or the end of it, and other words are looked for
    in name, model, state, tags, note, data and host.
    """
    tests = [_test_of(word) for word in text.split()]
    return [row for row in rows if all(test(row) for test in tests)]


def _test_of(word: str) -> Callable[[RunRow], bool]:
    for sign in TAG_SIGNS:
        if word.startswith(sign):
            return partial(_has_tag, word.removeprefix(sign))
    key, equals, value = word.partition("=")
    if not equals:
        return lambda row: word in _text_of(row)
    paths = [
        path for path in field_index() if path.lower() == key or path.lower().endswith(f".{key}")
    ]
    return lambda row: any(_same(_value_of(row, path), value) for path in paths)


def _has_tag(wanted: str, row: RunRow) -> bool:
    return any(tag.lower().startswith(wanted) for tag in row.notes.tags)


def _text_of(row: RunRow) -> str:
    words = row.run.name, row.model, row.state.state, row.state.host, *row.sources
    return " ".join((*words, *row.notes.tags, row.notes.note)).lower()


def _value_of(row: RunRow, path: str) -> str:
    """Return a setting of a run as text in small letters; empty where it cannot be read."""
    if row.spec is None:
        return ""
    value: object = reduce(getattr, path.split("."), row.spec)
    return text_of(msgspec.to_builtins(value)).lower()


def _same(text: str, wanted: str) -> bool:
    """Return whether a setting is what was typed, which may be the beginning of it, or the same
    number.
    """
    try:
        return float(text.replace(",", "")) == float(wanted.replace(",", ""))
    except ValueError:
        return bool(text) and text.startswith(wanted)
