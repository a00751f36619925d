"""Where rows come from: a hub id, a file or a folder, opened without copying them into memory; and why one cannot be opened.

Imports ``datasets`` only when a source is opened.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from so_tui.spec import DataSource, DataSpec, InputError, Problem, resolve_source
from so_tui_trainer.data.rows import TEXT_COLUMNS, Conversation, Layout, bad_row, layout_of, layout_of_row, read_row

if TYPE_CHECKING:
    from datasets import Dataset

_READERS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}
_COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
_BATCH_ROWS = 1000
_ABOUT_DATA = ("dataset_info.json", "dataset_infos.json")
_ENCODE = "Save the file as UTF-8."
_SPLIT_TROUBLE = re.compile(r"unknown split|bad split|no split|unrecognized instruction|slice boundar|corresponds to no data")


class Opened(NamedTuple):
    """A source's rows, memory-mapped, and how most become a conversation."""

    source: DataSource
    rows: Dataset
    layout: Layout
    warnings: tuple[str, ...] = ()

    def conversations(self, first: int = 0, last: int | None = None) -> Iterator[Conversation]:
        """Rows ``first`` to ``last`` in order. Raises InputError naming the first row that cannot be read."""
        rows, layout, source = self.rows, self.layout, self.source
        last = len(rows) if last is None else min(last, len(rows))
        for start in range(first, last, _BATCH_ROWS):
            stop = min(start + _BATCH_ROWS, last)
            try:
                part = rows[start:stop]
            except UnicodeDecodeError as error:  # Arrow takes the bytes as they come, and looks at them when they become text
                raise InputError([_problem(source, f"row {_undecodable(rows, start)} has text that is not UTF-8", _ENCODE)]) from error
            for index in range(len(next(iter(part.values())))):
                row = {name: values[index] for name, values in part.items()}
                its_own = layout_of_row(row, layout) if source.format == "auto" else layout
                yield read_row(row, its_own, source.source, start + index + 1)


def _undecodable(rows: Dataset, start: int) -> int:
    """The number (from 1) of the first row from ``start`` on with text that cannot be decoded."""
    for index in range(start, len(rows)):
        try:
            rows[index]
        except UnicodeDecodeError:
            return index + 1
    return len(rows)


def open_sources(spec: DataSpec) -> tuple[Opened, ...]:
    """Every source of the data section. Raises InputError: one cannot be read, is empty, or has columns that fit no layout."""
    return tuple(_opened(source) for source in spec.sources)


def _opened(source: DataSource) -> Opened:
    rows, warnings = _load(source)
    if len(rows) == 0:
        raise InputError([_empty(source)])
    return Opened(source, rows, layout_of(rows.column_names, source), warnings)


def _load(source: DataSource) -> tuple[Dataset, tuple[str, ...]]:
    """The rows, and what to mind about them."""
    import datasets
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined] # httpx's own, whichever httpx it is

    name = resolve_source(source.source)
    path = Path(name).expanduser()
    try:
        if path.is_file():
            if path.stat().st_size == 0:
                raise ValueError("the file is empty")
            return _load_file(path, source), ()
        if path.is_dir():
            return _load_folder(path, source)
        if _looks_like_path(name):
            raise FileNotFoundError(2, "no such file or folder")
        return _as_written(source, name, source.subset or None), ()
    except (OSError, ValueError, EOFError, ImportError, HTTPError, datasets.exceptions.DatasetsError) as error:
        if problem := _cache_problem(error):
            raise InputError([problem]) from error
        if not isinstance(error, OSError):
            _raise_for_bad_json(path, source)
        raise InputError([_unreadable(source, error)]) from error


def _load_file(path: Path, source: DataSource) -> Dataset:
    reader = _reader(path, source)
    if source.subset:
        remedy = "Leave it empty, or in a mixture give it to the source that has it."
        raise InputError(
            [Problem(field="data.subset", value=source.subset, message=f"{source.source} is a file, which has none", remedy=remedy)]
        )
    options: dict[str, Any] = {"data_files": str(path), "cache_dir": _cache_of((path,))}
    if reader == "csv":
        import pandas

        options["sep"] = _separator(path)
        options |= _texts(pandas.read_csv(path, nrows=0, sep=options["sep"]).columns)
        return _as_written(source, reader, **options)
    return _whatever_changes(source, reader, **options)


def _separator(path: Path) -> str:
    """What stands between the columns: semicolons where spreadsheets write commas into numbers."""
    import fsspec

    if _kind(path) == ".tsv":
        return "\t"
    with fsspec.open(str(path), "rt", encoding="utf-8-sig", compression="infer") as text:
        header = text.readline()
    return ";" if ";" in header and "," not in header else ","


def _load_folder(path: Path, source: DataSource) -> tuple[Dataset, tuple[str, ...]]:
    """A folder of files, of subsets, or one that ``save_to_disk`` wrote."""
    import datasets

    if _saved(path):
        saved = datasets.load_from_disk(str(path))
        if isinstance(saved, datasets.Dataset):
            return saved, ()
        if source.split not in saved:
            raise ValueError(f"it has no split {source.split}, but {', '.join(saved)}")
        return saved[source.split], ()
    files = (file for file in sorted(path.rglob("*")) if file.is_file())
    rows = _whatever_changes(source, str(path), source.subset or None, cache_dir=_cache_of(files))
    return rows, () if source.subset else _left_out(path)


def _saved(folder: Path) -> bool:
    """Whether ``save_to_disk`` wrote it: one split, or several."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _cache_of(files: Iterable[Path]) -> str:
    """Where ``datasets`` keeps the rows of local files. By itself it tells changed ones by their time alone, which copies may keep."""
    import datasets

    states = [(str(file), state.st_size, state.st_mtime_ns, state.st_ctime_ns) for file in files for state in (file.stat(),)]
    return str(Path(datasets.config.HF_DATASETS_CACHE) / "so-tui" / hashlib.sha256(repr(states).encode()).hexdigest()[:16])


def _left_out(folder: Path) -> tuple[str, ...]:
    """``datasets`` reads the files of one kind, and where names speak of splits those only: what that leaves aside is told."""
    used = _files_read(folder)
    there = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file() and path.resolve() not in used)
    hidden = re.compile(r"(^|/)\.")
    missing = [str(path) for path in there if _kind(path) in _READERS and path.name not in _ABOUT_DATA and not hidden.search(str(path))]
    if not missing:
        return ()
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return (f"{folder}: {', '.join(missing[:3])}{more} are no part of it (one kind of file is read, and those of named splits alone)",)


def _files_read(folder: Path, subset: str = "") -> set[Path]:
    """What ``datasets`` reads of a folder. Raises as it does where it finds nothing to read."""
    import datasets

    builder = datasets.load_dataset_builder(str(folder), subset or None)
    return {Path(file).resolve() for files in (builder.config.data_files or {}).values() for file in files}


def _whatever_changes(source: DataSource, *what: str | None, **options: Any) -> Dataset:
    """Local rows, also where later ones of JSON files have other columns, or other kinds of values, than the first ones.

    ``datasets`` takes columns and types from the first 10 MB. Where that fails, all columns are looked for, and hold JSON. Which they are
    is kept beside the rows.
    """
    import datasets

    known = Path(options["cache_dir"]) / "columns.json"
    if not known.is_file():
        try:
            return _as_written(source, *what, **options)
        except datasets.exceptions.DatasetGenerationError:
            config = datasets.load_dataset_builder(*what, **options).config
            if type(config).__name__ != "JsonConfig":
                raise
            columns = _json_columns(file for files in config.data_files.values() for file in files)
            written = known.with_suffix(f".{os.getpid()}")  # another run may be at the same
            written.write_text(json.dumps(columns))
            written.replace(known)
    features = datasets.Features({name: datasets.Json() for name in json.loads(known.read_text())})
    return _as_written(source, *what, **options, features=features)


def _json_columns(files: Iterable[str]) -> list[str]:
    """The keys of all rows of JSON files. Raises ValueError for what is no JSON."""
    import fsspec

    found: dict[str, None] = {}
    for file in files:
        with fsspec.open(file, "rt", encoding="utf-8-sig", compression="infer") as text:
            whole = text.read(1) == "["
            text.seek(0)
            for row in json.load(text) if whole else (json.loads(line) for line in text if line.strip()):
                if not isinstance(row, dict):
                    raise ValueError(f"{file}: a row is no object with columns")
                found |= dict.fromkeys(row)
    return list(found)


def _as_written(source: DataSource, *what: str | None, **options: Any) -> Dataset:
    """The rows with every text as it stands in the file: no "007" that became a number, no "None" that became nothing, no date,
    no 5 that became 5.0 for a 2.5 in another row."""
    import datasets

    rows = datasets.load_dataset(*what, split=source.split, **options)
    if "features" in options:
        return rows
    if rows.info.builder_name == "csv":
        return datasets.load_dataset(*what, split=source.split, **options, **_texts(rows.column_names))
    features = _unread(rows.features) if rows.info.builder_name == "json" else rows.features
    return rows if features == rows.features else datasets.load_dataset(*what, split=source.split, **options, features=features)


def _texts(columns: Iterable[str]) -> dict[str, Any]:
    """Options under which a CSV file has text in every column."""
    import datasets

    return {"features": datasets.Features({name: datasets.Value("string") for name in columns}), "keep_default_na": False}


def _unread(features: Any, name: str = "") -> Any:
    """The features with JSON, which keeps what stands there, for what a reader took for times, and for fractions where text belongs."""
    import datasets

    if isinstance(features, dict):
        return type(features)({name: _unread(inner, name) for name, inner in features.items()})
    if isinstance(features, datasets.List):
        return datasets.List(_unread(features.feature))
    kind = features.dtype if isinstance(features, datasets.Value) else ""
    return datasets.Json() if kind.startswith("timestamp") or (kind.startswith("float") and name in TEXT_COLUMNS) else features


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or Path(name).suffix in (*_READERS, *_COMPRESSED) or name.count("/") > 1


def _reader(path: Path, source: DataSource) -> str:
    reader = _READERS.get(_kind(path))
    if reader is None:
        raise InputError(
            [_problem(source, f"files ending in {path.suffix or 'nothing'} are not known", f"Use one of {', '.join(_READERS)}.")]
        )
    return reader


def _kind(path: Path) -> str:
    """A file's ending, without that of a compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in _COMPRESSED]
    return suffixes[-1] if suffixes else ""


def _cache_problem(error: BaseException) -> Problem | None:
    """What is wrong with the folders that ``datasets`` and the hub's client keep rows in, where that is what the error comes of."""
    import datasets
    from huggingface_hub import constants

    error = _cause(error)
    if not isinstance(error, OSError):
        return None
    rules = {
        Path(datasets.config.HF_DATASETS_CACHE): ("HF_DATASETS_CACHE", "HF_HOME"),
        Path(constants.HF_HUB_CACHE): ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME"),
    }
    if error.filename:
        of_it = [folder for folder in rules if _on_the_way(Path(os.fsdecode(error.filename)), folder)]
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        of_it = sorted(rules, key=_free_bytes)  # nothing else is written; which of the two, the error does not say
    else:
        of_it = []
    if not of_it:
        return None
    variable = next((name for name in rules[of_it[0]] if name in os.environ), "XDG_CACHE_HOME")
    remedy = f"Free space there, or set {variable} to a folder you may write to."
    return Problem(field=variable, value=str(of_it[0]), message=f"cannot be written ({error.strerror})", remedy=remedy)


def _on_the_way(path: Path, folder: Path) -> bool:
    """Whether a path lies in the folder, or is one that the folder lies in."""
    return path == folder or folder in path.parents or path in folder.parents


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(next(parent for parent in (folder, *folder.parents) if parent.is_dir())).free


def _unreadable(source: DataSource, error: Exception) -> Problem:
    reason = _reason(error)
    said = reason.lower()
    if "config name is missing" in said or "builderconfig" in said:
        return Problem(field="data.subset", value=source.subset, message=f"{source.source}: {reason}", remedy="Name one of its subsets.")
    if "corresponds to no data" in said and "[" not in source.split:
        return _empty(source)
    if _SPLIT_TROUBLE.search(said):
        reason = "chooses no rows" if "corresponds to no data" in said else reason.rstrip(".")
        return Problem(field="data.split", value=source.split, message=reason, remedy=f"Name a split that {source.source} has.")
    if "codec can't decode" in said:
        remedy = _ENCODE
    elif "zstd" in said or "zstandard" in said:
        remedy = "Install the package zstandard, or unpack the file."
    elif _looks_like_path(source.source) or Path(source.source).expanduser().exists():
        remedy = "Give the path of a JSON, JSONL, Parquet, CSV or TSV file, or of a folder of files of one layout."
    elif "gated" in said or "401" in said or "403" in said:
        remedy = "Accept its terms on the hub, then log in with `hf auth login` (or set HF_TOKEN)."
    else:
        remedy = "Check the name on the hub and the network, or fetch it first with `so-tui fetch`."
    return _problem(source, f"cannot be read ({reason})", remedy)


def _reason(error: BaseException) -> str:
    """What really went wrong, in one line."""
    error = _cause(error)
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return " ".join(lines)[:300] if lines else type(error).__name__


def _cause(error: BaseException) -> BaseException:
    """What really went wrong: ``datasets`` wraps it in an error that says only that there was one."""
    while type(error).__name__ == "DatasetGenerationError" and (error.__cause__ or error.__context__) is not None:
        error = error.__cause__ or error.__context__ or error
    return error


def _raise_for_bad_json(path: Path, source: DataSource) -> None:
    """Raises InputError naming the first row, of a file or of a folder's files, that is no JSON object; returns where that is not the
    trouble.
    """
    import datasets

    if path.is_file():
        _raise_for_bad_rows(path, source.source)
    elif path.is_dir() and not _saved(path):
        try:
            files = sorted(_files_read(path, source.subset))
        except (OSError, ValueError, datasets.exceptions.DatasetsError):
            return  # that its files cannot even be listed is the trouble
        for file in files:
            _raise_for_bad_rows(file, str(Path(source.source) / file.relative_to(path.resolve())))


def _raise_for_bad_rows(path: Path, name: str) -> None:
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
                raise bad_row(name, number, f"is no JSON ({error.msg.removesuffix(' at')} at character {error.colno})") from error
            if not isinstance(row, dict):
                raise bad_row(name, number, "is no object with columns")


def _empty(source: DataSource) -> Problem:
    return _problem(source, "has no rows", f"Fill it, or choose another split than {source.split}.")


def _problem(source: DataSource, message: str, remedy: str) -> Problem:
    return Problem(field="data.source", value=source.source, message=message, remedy=remedy)
