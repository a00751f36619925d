"""Where rows come from: a hub id, a file or a folder, opened without copying them into memory; and why one cannot be opened.

Imports ``datasets`` only when a source is opened.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from so_tui.spec import DataSource, DataSpec, InputError, Problem, resolve_source
from so_tui_trainer.data.rows import Conversation, Layout, bad_row, layout_of, read_row

if TYPE_CHECKING:
    from datasets import Dataset

_READERS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet", ".csv": "csv"}
_COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
_BATCH_ROWS = 1000


class Opened(NamedTuple):
    """A source's rows, memory-mapped, and how each becomes a conversation."""

    source: DataSource
    rows: Dataset
    layout: Layout

    def conversations(self, first: int = 0, last: int | None = None) -> Iterator[Conversation]:
        """Rows ``first`` to ``last`` in order. Raises InputError naming the first row that cannot be read."""
        rows, layout, source = self.rows, self.layout, self.source
        last = len(rows) if last is None else min(last, len(rows))
        for start in range(first, last, _BATCH_ROWS):
            part = rows[start : min(start + _BATCH_ROWS, last)]
            for index in range(len(next(iter(part.values())))):
                row = {name: values[index] for name, values in part.items()}
                yield read_row(row, layout, source.source, start + index + 1)


def open_sources(spec: DataSpec) -> tuple[Opened, ...]:
    """Every source of the data section. Raises InputError: one cannot be read, is empty, or has columns that fit no layout."""
    return tuple(_opened(source) for source in spec.sources)


def _opened(source: DataSource) -> Opened:
    rows = _load(source)
    if len(rows) == 0:
        raise InputError([_problem(source, "has no rows", f"Choose another split than {source.split}.")])
    return Opened(source, rows, layout_of(rows.column_names, source))


def _load(source: DataSource) -> Dataset:
    import datasets
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined] # httpx's own, whichever httpx it is

    name = resolve_source(source.source)
    path = Path(name).expanduser()
    try:
        if path.is_file():
            if path.stat().st_size == 0:
                raise ValueError("the file is empty")
            return datasets.load_dataset(_reader(path, source), data_files=str(path), split=source.split)
        if path.is_dir():
            return _load_folder(path, source)
        if _looks_like_path(name):
            raise FileNotFoundError(2, "no such file or folder")
        return datasets.load_dataset(name, source.subset or None, split=source.split)
    except (OSError, ValueError, HTTPError, datasets.exceptions.DatasetsError) as error:
        if path.is_file() and not isinstance(error, OSError):
            _raise_for_bad_json(path, source)
        raise InputError([_unreadable(source, error)]) from error


def _load_folder(path: Path, source: DataSource) -> Dataset:
    """A folder of files, of subsets, or one that ``save_to_disk`` wrote."""
    import datasets

    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        saved = datasets.load_from_disk(str(path))
        if isinstance(saved, datasets.Dataset):
            return saved
        if source.split not in saved:
            raise ValueError(f"it has no split {source.split}, but {', '.join(saved)}")
        return saved[source.split]
    return datasets.load_dataset(str(path), source.subset or None, split=source.split)


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or Path(name).suffix in (*_READERS, *_COMPRESSED) or name.count("/") > 1


def _reader(path: Path, source: DataSource) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in _COMPRESSED] or [""]
    reader = _READERS.get(suffixes[-1])
    if reader is None:
        raise InputError(
            [_problem(source, f"files ending in {path.suffix or 'nothing'} are not known", f"Use one of {', '.join(_READERS)}.")]
        )
    return reader


def _unreadable(source: DataSource, error: Exception) -> Problem:
    reason = _reason(error)
    said = reason.lower()
    if "config name is missing" in said or "builderconfig" in said:
        return Problem(field="data.subset", value=source.subset, message=f"{source.source}: {reason}", remedy="Name one of its subsets.")
    if "split" in said:
        return Problem(field="data.split", value=source.split, message=reason.rstrip("."), remedy=f"Name a split that {source.source} has.")
    if "gated" in said or "401" in said or "403" in said:
        remedy = "Accept its terms on the hub, then log in with `hf auth login` (or set HF_TOKEN)."
    elif _looks_like_path(source.source) or Path(source.source).expanduser().exists():
        remedy = "Give the path of a JSON, JSONL, Parquet or CSV file, or of a folder of them; every row needs the same columns."
    else:
        remedy = "Check the name on the hub and the network, or fetch it first with `so-tui fetch`."
    return _problem(source, f"cannot be read ({reason})", remedy)


def _reason(error: BaseException) -> str:
    """What really went wrong, in one line: ``datasets`` wraps it in an error that says only that there was one."""
    while type(error).__name__ == "DatasetGenerationError" and (error.__cause__ or error.__context__) is not None:
        error = error.__cause__ or error.__context__ or error
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return " ".join(lines)[:300] if lines else type(error).__name__


def _raise_for_bad_json(path: Path, source: DataSource) -> None:
    """Raises InputError naming the first row that is no JSON object; returns where that is not what is wrong."""
    if path.suffix.lower() not in (".jsonl", ".ndjson", ".json"):
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        if file.read(1) == "[":
            return  # one list: the reader's own message has the place
        file.seek(0)
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line) if line.strip() else {}
            except json.JSONDecodeError as error:
                raise bad_row(source.source, number, f"is no JSON ({error.msg} at character {error.colno})") from error
            if not isinstance(row, dict):
                raise bad_row(source.source, number, "is no object with columns")


def _problem(source: DataSource, message: str, remedy: str) -> Problem:
    return Problem(field="data.source", value=source.source, message=message, remedy=remedy)
