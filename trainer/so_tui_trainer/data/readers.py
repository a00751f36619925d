"""Read local files with ``datasets``, without copying them into memory and with every text as it is in the file.

Imports ``datasets`` only when something is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from so_tui.spec import DataSource, InputError, Problem
from so_tui_trainer.data.file_checks import COMPRESSED, check_file, ending
from so_tui_trainer.data.rows import TEXT_COLUMNS

if TYPE_CHECKING:
    from datasets import Dataset

_READERS = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
}
_METADATA_FILES = ("dataset_info.json", "dataset_infos.json")
_MAX_NAMED_FILES = 3


def read_file(path: Path, source: DataSource) -> Dataset:
    """Open one file.

    Raises:
        InputError: The file has an unknown ending, or a subset was asked for.
    """
    reader = _reader(path, source)
    if source.subset:
        raise InputError(
            [
                Problem(
                    code="data-subset-of-file",
                    field="data.subset",
                    value=source.subset,
                    message=f"{source.source} is a file, which has no subsets",
                    remedy="Leave it empty. In a list of sources, set it for the source that has subsets.",
                )
            ]
        )
    options: dict[str, Any] = {"data_files": str(path), "cache_dir": _cache_dir((path,))}
    if reader == "csv":
        import pandas

        options["sep"] = _separator(path)
        options |= _text_columns(pandas.read_csv(path, nrows=0, sep=options["sep"]).columns)
        return read_verbatim(source, reader, **options)
    return _read_mixed_columns(source, reader, **options)


def read_folder(path: Path, source: DataSource) -> tuple[Dataset, tuple[str, ...]]:
    """Open a folder of files, of subsets, or one that ``save_to_disk`` wrote.

    Returns:
        The rows, and warnings about files that are not read.
    """
    import datasets

    if is_saved_dataset(path):
        saved = datasets.load_from_disk(str(path))
        if isinstance(saved, datasets.Dataset):
            return saved, ()
        if source.split not in saved:
            raise ValueError(f"it has no split {source.split}, but {', '.join(saved)}")
        return saved[source.split], ()
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    for file in files:
        check_file(file, source, str(Path(source.source) / file.relative_to(path)))
    rows = _read_mixed_columns(
        source, str(path), source.subset or None, cache_dir=_cache_dir(files)
    )
    return rows, () if source.subset else _ignored_files(path)


def read_verbatim(source: DataSource, *what: str | None, **options: Any) -> Dataset:
    """Load rows with every text as it is in the file.

    ``datasets`` guesses types: it would turn "007" into a number, "None" into a null, text into a date, and 5 into 5.0 if another row has
    2.5. Where it did, the rows are loaded again with explicit types.
    """
    import datasets

    rows = datasets.load_dataset(*what, split=source.split, **options)
    if "features" in options:
        return rows
    if rows.info.builder_name == "csv":
        return datasets.load_dataset(
            *what, split=source.split, **options, **_text_columns(rows.column_names)
        )
    features = (
        _verbatim_features(rows.features) if rows.info.builder_name == "json" else rows.features
    )
    return (
        rows
        if features == rows.features
        else datasets.load_dataset(*what, split=source.split, **options, features=features)
    )


def is_saved_dataset(folder: Path) -> bool:
    """Return whether ``save_to_disk`` wrote the folder, with one split or several."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def looks_like_path(name: str) -> bool:
    """Return whether a source can only be a path, not a hub id."""
    return (
        name.startswith(("/", ".", "~"))
        or Path(name).suffix in (*_READERS, *COMPRESSED)
        or name.count("/") > 1
    )


def files_read(folder: Path, subset: str = "") -> set[Path]:
    """Return the files of a folder that ``datasets`` reads.

    Raises:
        Whatever ``datasets`` raises if it finds nothing to read.
    """
    import datasets

    builder = datasets.load_dataset_builder(str(folder), subset or None)
    return {
        Path(file).resolve()
        for files in (builder.config.data_files or {}).values()
        for file in files
    }


def _separator(path: Path) -> str:
    """Return the separator of a CSV file: spreadsheets write semicolons where commas are decimal signs."""
    import fsspec

    if ending(path) == ".tsv":
        return "\t"
    with fsspec.open(str(path), "rt", encoding="utf-8-sig", compression="infer") as text:
        header = text.readline()
    return ";" if ";" in header and "," not in header else ","


def _cache_dir(files: Iterable[Path]) -> str:
    """Return the folder in which ``datasets`` stores the rows of local files.

    ``datasets`` itself recognises changed files only by their modification time, which copying may preserve.
    """
    import datasets

    states = [
        (str(file), state.st_size, state.st_mtime_ns, state.st_ctime_ns)
        for file in files
        for state in (file.stat(),)
    ]
    return str(
        Path(datasets.config.HF_DATASETS_CACHE)
        / "so-tui"
        / hashlib.sha256(repr(states).encode()).hexdigest()[:16]
    )


def _ignored_files(folder: Path) -> tuple[str, ...]:
    """Return a warning about data files that ``datasets`` does not read.

    It reads files of one kind only, and if file names mention splits, only those files.
    """
    used = files_read(folder)
    present = (
        path.relative_to(folder)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.resolve() not in used
    )
    hidden = re.compile(r"(^|/)\.")
    ignored = [
        str(path)
        for path in present
        if ending(path) in _READERS
        and path.name not in _METADATA_FILES
        and not hidden.search(str(path))
    ]
    if not ignored:
        return ()
    more = f" and {len(ignored) - _MAX_NAMED_FILES} more" if len(ignored) > _MAX_NAMED_FILES else ""
    named = ", ".join(ignored[:_MAX_NAMED_FILES])
    return (
        f"{folder}: not read: {named}{more} (only files of one kind are read, and only those of a split if names mention splits)",
    )


def _read_mixed_columns(source: DataSource, *what: str | None, **options: Any) -> Dataset:
    """Load local rows, even if later rows of JSON files have other columns or other types than the first ones.

    ``datasets`` takes columns and types from the first 10 MB. If loading fails, all rows are scanned for columns, and every column is
    loaded as JSON. The columns that were found are stored beside the cached rows.
    """
    import datasets

    columns_file = Path(options["cache_dir"]) / "columns.json"
    if not columns_file.is_file():
        try:
            return read_verbatim(source, *what, **options)
        except datasets.exceptions.DatasetGenerationError:
            config = datasets.load_dataset_builder(*what, **options).config
            if type(config).__name__ != "JsonConfig":
                raise
            columns = _json_columns(file for files in config.data_files.values() for file in files)
            partial = columns_file.with_suffix(
                f".{os.getpid()}"
            )  # another run may be writing the same file
            partial.write_text(json.dumps(columns))
            partial.replace(columns_file)
    features = datasets.Features(
        {name: datasets.Json() for name in json.loads(columns_file.read_text())}
    )
    return read_verbatim(source, *what, **options, features=features)


def _json_columns(files: Iterable[str]) -> list[str]:
    """Return the keys of all rows of JSON files.

    Raises:
        ValueError: A file or a row is not JSON.
    """
    import fsspec

    found: dict[str, None] = {}
    for file in files:
        with fsspec.open(file, "rt", encoding="utf-8-sig", compression="infer") as text:
            is_list = text.read(1) == "["
            text.seek(0)
            for row in (
                json.load(text) if is_list else (json.loads(line) for line in text if line.strip())
            ):
                if not isinstance(row, dict):
                    raise ValueError(f"{file}: a row is not a JSON object")
                found |= dict.fromkeys(row)
    return list(found)


def _text_columns(columns: Iterable[str]) -> dict[str, Any]:
    """Return the options that load every column of a CSV file as text."""
    import datasets

    return {
        "features": datasets.Features({name: datasets.Value("string") for name in columns}),
        "keep_default_na": False,
    }


def _verbatim_features(features: Any, name: str = "") -> Any:
    """Replace guessed timestamps, and fractions in text columns, by JSON, which preserves what is written."""
    import datasets

    if isinstance(features, dict):
        return type(features)(
            {name: _verbatim_features(inner, name) for name, inner in features.items()}
        )
    if isinstance(features, datasets.List):
        return datasets.List(_verbatim_features(features.feature))
    kind = features.dtype if isinstance(features, datasets.Value) else ""
    return (
        datasets.Json()
        if kind.startswith("timestamp") or (kind.startswith("float") and name in TEXT_COLUMNS)
        else features
    )


def _reader(path: Path, source: DataSource) -> str:
    reader = _READERS.get(ending(path))
    if reader is None:
        raise InputError(
            [
                Problem(
                    code="data-file-type-unknown",
                    field="data.source",
                    value=source.source,
                    message=f"files ending in {path.suffix or 'nothing'} cannot be read",
                    remedy=f"Use one of {', '.join(_READERS)}.",
                )
            ]
        )
    return reader
