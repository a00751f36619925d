"""Open the sources of the data section: hub ids, files and folders, memory-mapped.

Imports ``datasets`` only when a source is opened.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from so_tui.spec import DataSource, DataSpec, InputError, resolve_source
from so_tui.units import thousands
from so_tui_trainer.data.file_checks import check_file
from so_tui_trainer.data.readers import looks_like_path, read_file, read_folder, read_verbatim
from so_tui_trainer.data.rows import Conversation, Layout, layout_of, layout_of_row, read_row
from so_tui_trainer.data.source_errors import (
    NOT_UTF8_REMEDY,
    empty_source,
    raise_for_bad_json,
    source_problem,
    unreadable_source,
    unwritable_cache,
)

if TYPE_CHECKING:
    from datasets import Dataset

_BATCH_ROWS = 1000


class Opened(NamedTuple):
    """A source that is ready to be read."""

    source: DataSource
    rows: Dataset
    """Memory-mapped."""
    layout: Layout
    """The layout of most rows."""
    warnings: tuple[str, ...] = ()

    def conversations(self, first: int = 0, last: int | None = None) -> Iterator[Conversation]:
        """Yield rows ``first`` to ``last`` (exclusive) in order.

        Raises:
            InputError: Names the first row that cannot be read.
        """
        rows, layout, source = self.rows, self.layout, self.source
        last = len(rows) if last is None else min(last, len(rows))
        for start in range(first, last, _BATCH_ROWS):
            stop = min(start + _BATCH_ROWS, last)
            try:
                batch = rows[start:stop]
            except (
                UnicodeDecodeError
            ) as error:  # Arrow decodes text only when it becomes a Python string.
                message = (
                    f"row {thousands(_undecodable_row(rows, start))} has text that is not UTF-8"
                )
                raise InputError(
                    [source_problem(source, "data-not-utf8", message, NOT_UTF8_REMEDY)]
                ) from error
            for index in range(len(next(iter(batch.values())))):
                row = {name: values[index] for name, values in batch.items()}
                row_layout = layout_of_row(row, layout) if source.format == "auto" else layout
                yield read_row(row, row_layout, source.source, start + index + 1)


def open_sources(spec: DataSpec) -> tuple[Opened, ...]:
    """Open every source of the data section.

    Raises:
        InputError: A source cannot be read, is empty, or has columns that fit no layout.
    """
    return tuple(_open(source) for source in spec.sources)


def _open(source: DataSource) -> Opened:
    rows, warnings = _load(source)
    if len(rows) == 0:
        raise InputError([empty_source(source)])
    return Opened(source, rows, layout_of(rows.column_names, source), warnings)


def _load(source: DataSource) -> tuple[Dataset, tuple[str, ...]]:
    """Return the rows of a source and warnings about them."""
    import datasets
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined] # httpx's own, whichever httpx it is

    name = resolve_source(source.source)
    path = Path(name).expanduser()
    try:
        if path.exists() and not path.is_dir():
            check_file(path, source)
            if path.stat().st_size == 0:
                raise InputError([empty_source(source)])
            return read_file(path, source), ()
        if path.is_dir():
            return read_folder(path, source)
        if looks_like_path(name):
            raise FileNotFoundError(2, "no such file or folder")
        return read_verbatim(source, name, source.subset or None), ()
    except (
        OSError,
        ValueError,
        EOFError,
        ImportError,
        RecursionError,
        HTTPError,
        datasets.exceptions.DatasetsError,
    ) as error:
        if problem := unwritable_cache(error):
            raise InputError([problem]) from error
        if not isinstance(error, OSError):
            raise_for_bad_json(path, source)
        raise InputError([unreadable_source(source, error)]) from error


def _undecodable_row(rows: Dataset, start: int) -> int:
    """Return the number (from 1) of the first row from index ``start`` on that cannot be decoded."""
    for index in range(start, len(rows)):
        try:
            rows[index]
        except UnicodeDecodeError:
            return index + 1
    return len(rows)
