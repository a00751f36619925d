"""Open the sources of the data section: hub ids, files and folders, memory-mapped.

Imports ``datasets`` only when a source is opened.
"""

from __future__ import annotations

import errno
import hashlib
import json
import lzma
import os
import re
import shutil
import stat
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import fsspec
import numpy as np

from so_tui.spec import DataSource, DataSpec, InputError, resolve_source
from so_tui.spec.check import exists, write_atomic
from so_tui.spec.errors import reject
from so_tui.trust.decoding import LARGEST_FILE_BYTES
from so_tui.trust.files import NotOwnError, open_descriptor, read_bounded
from so_tui.trust.folders import private_folder
from so_tui.units import thousands
from so_tui_trainer.data.rows import (
    TEXT_COLUMNS,
    Conversation,
    Layout,
    bad_row,
    layout_of,
    read_row,
)
from so_tui_trainer.foreign import check_cached, datasets_cache, seen_in
from so_tui_trainer.hub import causes
from so_tui_trainer.step_limits import limited

if TYPE_CHECKING:
    from datasets import Dataset


# What is checked of a local data file before ``datasets`` reads it, which takes minutes and much
# memory for a file that is no data.
#
# Other errors are left to the readers of ``datasets``.


LONGEST_ROW_BYTES = 32 << 20
"""Of a line of JSON. A million tokens of text are about 5 MB."""
MOST_NESTED = 100
"""Levels of lists and objects in a row. Tool calls have about ten."""
MOST_COLUMNS = 2_000
"""Of a table, or keys in rows, nested ones too. Wide tables with text have some hundred."""
MOST_TIMES = 100
"""How often larger than its file the content of a compressed one may be. Text is some ten times as
large. Content up to ``_CHECKED_BYTES`` is not judged.
"""
_SCHEMA_BYTES = 10 << 20
"""What ``datasets`` takes the columns of JSON from."""
_CHECKED_ROWS = 2_000_000
"""Lines that are looked at one by one."""
_LONGEST_LIST_BYTES = 256 << 20
"""Of a file that is one JSON list: its reader holds all of it in memory, several times."""
_CHECKED_BYTES = 1 << 30
"""Beyond this, the reader's own errors must do: reading all of a large file twice would double the
time to open it.
"""
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
"""Without its end, too, in a line that was cut off: otherwise it would be read again from each
quote in it.
"""
_STEPS = np.zeros(256, dtype=np.int8)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1
_CHUNK_BYTES = 1 << 20
COMPRESSED = (".gz", ".zst", ".xz", ".bz2")


def _check_file(path: Path, source: DataSource, name: str = "") -> None:
    """Refuse a file without rows, or with a line that no reader can handle.

    Args:
        path: The file.
        source: The source that it belongs to.
        name: What errors call it; by default the name of the source.

    Raises:
        InputError: It is no regular file (``data-source-not-a-file``), or has a row that is too
            long (``data-row-too-long``) or nested too deeply (``data-row-too-deep``), too many
            columns (``data-too-many-columns``), or far more content than its size
            (``data-expands-too-much``).
        OSError: It cannot be read.
    """
    name = name or source.source
    if not stat.S_ISREG(path.stat().st_mode):
        raise reject(
            "data-source-not-a-file",
            "data.source",
            name,
            f"{path} is a pipe or a device",
            "Name a JSON, JSONL, Parquet, CSV or TSV file, or a folder of such files.",
        )
    kind = _READERS.get(_ending(path))
    try:
        if kind == "parquet":
            _check_parquet(path, name)
        elif kind is not None:
            content = fsspec.compression.compr[fsspec.utils.infer_compression(str(path))]
            with (
                os.fdopen(open_descriptor(path), "rb") as stored,
                content(stored, mode="rb") as file,
            ):
                _check_rows(file, name, is_table=kind == "csv")
                if file is not stored:
                    while file.tell() < _CHECKED_BYTES and file.read(_CHUNK_BYTES):
                        pass
                    _refuse_expansion(file.tell(), stored.tell(), name)
    except (
        EOFError,
        ValueError,
        zlib.error,
        lzma.LZMAError,
    ):  # cut short, damaged, or its package is missing: the reader says which
        return


def _refuse_expansion(content_bytes: int, stored_bytes: int, name: str) -> None:
    if content_bytes >= _CHECKED_BYTES and content_bytes > MOST_TIMES * stored_bytes:
        raise reject(
            "data-expands-too-much",
            "data.source",
            name,
            f"has content of more than {MOST_TIMES} times its size, and more than "
            f"{_CHECKED_BYTES >> 30} GiB",
            "Decompress it, look at its content, and name the decompressed file.",
        )


def _check_parquet(path: Path, name: str) -> None:
    from pyarrow import parquet

    found = parquet.read_metadata(path)
    _refuse_columns(found.num_columns, name)
    content = sum(found.row_group(index).total_byte_size for index in range(found.num_row_groups))
    _refuse_expansion(content, path.stat().st_size, name)


def _refuse_columns(count: int, name: str) -> None:
    if count > MOST_COLUMNS:
        raise reject(
            "data-too-many-columns",
            "data.source",
            name,
            f"has {thousands(count)} columns or keys in its rows; the limit is "
            f"{thousands(MOST_COLUMNS)}",
            "Write a file with the columns that are trained on.",
        )


def _add_keys(value: Any, path: tuple[str, ...], found: set[tuple[str, ...]]) -> None:
    """Add the path of each key in a row."""
    if isinstance(value, dict):
        for name, inner in value.items():
            found.add(here := (*path, name))
            _add_keys(inner, here, found)
    elif isinstance(value, list):
        for inner in value:
            _add_keys(inner, path, found)


def _ending(path: Path) -> str:
    """Return a file's ending without that of a compression, in lower case."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in COMPRESSED]
    return suffixes[-1] if suffixes else ""


def _check_rows(file: BinaryIO, name: str, *, is_table: bool) -> None:
    """Check the lines of a file of rows, or a file that is one JSON list as a whole.

    Args:
        file: Its content.
        name: What errors call it.
        is_table: Whether it is CSV or TSV, where only the first line has the columns.
    """
    checked_bytes = row = 0
    keys: set[tuple[str, ...]] = set()
    while (
        checked_bytes < _CHECKED_BYTES
        and row < _CHECKED_ROWS
        and (line := file.readline(LONGEST_ROW_BYTES + 1))
    ):
        checked_bytes, row = checked_bytes + len(line), row + 1
        if line.isspace():
            continue
        if (
            not is_table
            and row == 1
            and line.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
        ):
            content = line + file.read(_LONGEST_LIST_BYTES)
            if len(content) > _LONGEST_LIST_BYTES:
                raise reject(
                    "data-list-too-long",
                    "data.source",
                    name,
                    f"is a JSON list of more than {_LONGEST_LIST_BYTES >> 20} MiB",
                    "Write one row a line (JSONL), which is read in parts, or use Parquet.",
                )
            if _is_deep(content):
                raise reject(
                    "data-row-too-deep",
                    "data.source",
                    name,
                    f"is nested more than {MOST_NESTED} levels deep",
                    "Remove the rows that are.",
                )
            return
        if len(line) > LONGEST_ROW_BYTES:
            raise bad_row(
                "data-row-too-long",
                name,
                row,
                f"is longer than {LONGEST_ROW_BYTES >> 20} MiB; a file of rows has one row a line",
            )
        if is_table:
            if row == 1:
                _refuse_columns(1 + max(map(line.count, (b",", b";", b"\t"))), name)
            continue
        if _is_deep(line):
            raise bad_row(
                "data-row-too-deep", name, row, f"is nested more than {MOST_NESTED} levels deep"
            )
        if checked_bytes <= _SCHEMA_BYTES:
            with suppress(ValueError):  # the reader says what is wrong
                _add_keys(json.loads(line), (), keys)
            _refuse_columns(len(keys), name)


def _is_deep(text: bytes) -> bool:
    """Return whether brackets outside of strings are nested too deeply: Arrow's reader would end
    the process.
    """
    if text.count(b"[") + text.count(b"{") <= MOST_NESTED:
        return False
    # Taking the strings out costs most, and brackets in them are rarely as many.
    return _deepest(text) > MOST_NESTED and _deepest(_STRING.sub(b"", text)) > MOST_NESTED


def _deepest(text: bytes) -> int:
    """Return how deeply brackets are nested, in chunks: one sum over all of them would take many
    times the memory of the text.
    """
    level = deepest = 0
    for start in range(0, len(text), _CHUNK_BYTES):
        chunk = np.frombuffer(
            text, dtype=np.uint8, count=min(_CHUNK_BYTES, len(text) - start), offset=start
        )
        levels = np.cumsum(_STEPS[chunk], dtype=np.int32)
        deepest = max(deepest, level + int(levels.max()))
        level = level + int(levels[-1])
    return deepest


# Read local files with ``datasets``, without copying them into memory and with every text as it is
# in the file.
#
# Imports ``datasets`` only when something is read.


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


def _read_file(path: Path, source: DataSource) -> Dataset:
    """Open one file.

    Raises:
        InputError: The file has an unknown ending, is empty or cannot be read, or a subset was
            asked for.
    """
    reader = _READERS.get(_ending(path))
    if reader is None:
        raise reject(
            "data-file-type-unknown",
            "data.source",
            source.source,
            f"files ending in {path.suffix or 'nothing'} cannot be read",
            f"Use one of {', '.join(_READERS)}.",
        )
    if source.subset:
        raise reject(
            "data-subset-of-file",
            "data.subset",
            source.subset,
            f"{source.source} is a file, which has no subsets",
            "Leave it empty. In a list of sources, set it for the source that has subsets.",
        )
    _check_file(path, source)
    if (size := path.stat().st_size) == 0:
        raise _empty_source(source)
    options: dict[str, Any] = {"data_files": str(path), "cache_dir": _cache_dir((path,))}
    with limited(f"the file {source.source}", size):
        if reader == "csv":
            import pandas

            options["sep"] = _separator(path)
            options |= _text_columns(pandas.read_csv(path, nrows=0, sep=options["sep"]).columns)
            return _read_verbatim(source, reader, **options)
        return _read_mixed_columns(source, reader, **options)


def _read_folder(path: Path, source: DataSource) -> tuple[Dataset, tuple[str, ...]]:
    """Open a folder of files, of subsets, or one that ``save_to_disk`` wrote.

    Returns:
        The rows, and warnings about files that are not read.
    """
    import datasets

    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        saved = datasets.load_from_disk(str(path), keep_in_memory=False)
        if not isinstance(saved, datasets.Dataset):
            if source.split not in saved:
                raise ValueError(f"it has no split {source.split}, but {', '.join(saved)}")
            saved = saved[source.split]
        _refuse_elsewhere((file["filename"] for file in saved.cache_files), f"{path}/", source)
        return saved, ()
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    for file in files:
        _check_file(file, source, str(Path(source.source) / file.relative_to(path)))
    with limited(f"the folder {source.source}", sum(file.stat().st_size for file in files)):
        rows = _read_mixed_columns(
            source, str(path), source.subset or None, cache_dir=_cache_dir(files)
        )
    return rows, () if source.subset else _ignored_files(path)


def _read_verbatim(source: DataSource, *what: str | None, **options: Any) -> Dataset:
    """Load rows with every text as it is in the file.

    ``datasets`` guesses types: it would turn "007" into a number, "None" into a null, text into a
    date, and 5 into 5.0 if another row has 2.5. Where it did, the rows are loaded again with
    explicit types.
    """
    rows = _prepared(source, *what, **options)
    if "features" in options:
        return rows
    kind = rows.info.builder_name
    if kind == "csv":
        options |= _text_columns(rows.column_names)
    elif kind == "json" and (features := _verbatim_features(rows.features)) != rows.features:
        options["features"] = features
    else:
        return rows
    return _prepared(source, *what, **options)


def _prepared(source: DataSource, *what: str | None, **options: Any) -> Dataset:
    """Load rows as ``datasets.load_dataset`` does, but only from files of the data set itself: its
    README.md may name others.
    """
    import datasets

    builder = datasets.load_dataset_builder(*what, **options)
    if "data_files" not in options:
        place = _path_of(source)
        root = f"{place.resolve()}/" if place.is_dir() else f"hf://datasets/{what[0]}@"
        files = (builder.config.data_files or {}).values()
        _refuse_elsewhere(chain.from_iterable(files), root, source)
    builder.download_and_prepare()
    return builder.as_dataset(split=source.split)


def _refuse_elsewhere(files: Iterable[str], root: str, source: DataSource) -> None:
    """Refuse files whose names, or those of the archives they are in, do not begin with that of the
    data set.
    """
    for file in files:
        if not os.path.normpath(file.rpartition("::")[2]).startswith(root.replace("://", ":/")):
            raise reject(
                "data-file-elsewhere",
                "data.source",
                source.source,
                f"names the file {file}, which is outside it",
                "Look at its README.md, or at the files that `save_to_disk` wrote. Name the file "
                "itself if you want to train on it.",
            )


def _looks_like_path(name: str) -> bool:
    """Return whether a source can only be a path, not a hub id."""
    return (
        name.startswith(("/", ".", "~"))
        or Path(name).suffix in (*_READERS, *COMPRESSED)
        or name.count("/") > 1
    )


def _path_of(source: DataSource) -> Path:
    """Return the path that a source names, if it does not name a data set on the hub."""
    return Path(resolve_source(source.source)).expanduser()


def _separator(path: Path) -> str:
    """Return the separator of a CSV file: spreadsheets write semicolons where commas are decimal
    signs.
    """
    if _ending(path) == ".tsv":
        return "\t"
    with fsspec.open(str(path), "rt", encoding="utf-8-sig", compression="infer") as text:
        header = text.readline()
    return ";" if ";" in header and "," not in header else ","


def _cache_dir(files: Iterable[Path]) -> str:
    """Return the folder in which ``datasets`` stores the rows of local files.

    ``datasets`` itself recognises changed files only by their modification time, which copying may
    preserve.
    """
    states = [
        (str(file), state.st_size, state.st_mtime_ns, state.st_ctime_ns)
        for file in files
        for state in (file.stat(),)
    ]
    return str(datasets_cache() / "so-tui" / hashlib.sha256(repr(states).encode()).hexdigest()[:16])


def _ignored_files(folder: Path) -> tuple[str, ...]:
    """Return a warning about data files that ``datasets`` does not read.

    It reads files of one kind only, and if file names mention splits, only those files.
    """
    import datasets

    builder = datasets.load_dataset_builder(str(folder), cache_dir=str(datasets_cache()))
    config = builder.config
    used = {Path(file).resolve() for files in (config.data_files or {}).values() for file in files}
    ignored = [
        str(path.relative_to(folder))
        for path in sorted(folder.rglob("*"))
        if _ending(path) in _READERS
        and path.name not in _METADATA_FILES
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and path.is_file()
        and path.resolve() not in used
    ]
    if not ignored:
        return ()
    more = f" and {len(ignored) - _MAX_NAMED_FILES} more" if len(ignored) > _MAX_NAMED_FILES else ""
    named = ", ".join(ignored[:_MAX_NAMED_FILES])
    return (
        (
            f"{folder}: not read: {named}{more} (only files of one kind are read, and only those "
            "of a split if names mention splits)"
        ),
    )


def _read_mixed_columns(source: DataSource, *what: str | None, **options: Any) -> Dataset:
    """Load local rows, even if later rows of JSON files have other columns or other types than the
    first ones.

    ``datasets`` takes columns and types from the first 10 MB. If loading fails, all rows are
    scanned for columns, and every column is loaded as JSON. The columns that were found are stored
    beside the cached rows.
    """
    import datasets

    columns_file = Path(options["cache_dir"]) / "columns.json"
    if not columns_file.is_file():
        try:
            return _read_verbatim(source, *what, **options)
        # datasets before 4.8 raises KeyError where a column has values of several kinds.
        except (datasets.exceptions.DatasetGenerationError, ValueError, KeyError) as error:
            config = datasets.load_dataset_builder(*what, **options).config
            if type(config).__name__ != "JsonConfig":
                raise
            columns = _json_columns(chain.from_iterable(config.data_files.values()), source)
            if isinstance(error, ValueError):  # no row is wrong, and other columns would not help
                raise
            write_atomic(columns_file, json.dumps(columns).encode())
    names = json.loads(read_bounded(columns_file, LARGEST_FILE_BYTES))
    features = datasets.Features({name: datasets.Json() for name in names})
    return _read_verbatim(source, *what, **options, features=features)


def _json_columns(files: Iterable[str], source: DataSource) -> list[str]:
    """Return the keys of all rows of a source's JSON files.

    Raises:
        InputError: Names the file and the row that is not a JSON object.
        ValueError: A file that is one list is not JSON; the message names the position.
    """
    folder = _path_of(source)
    folder = folder.resolve() if folder.is_dir() else folder  # as datasets names files in it
    found: dict[str, None] = {}
    for file in files:
        name = str(Path(source.source) / os.path.relpath(file, folder))
        with fsspec.open(file, "rt", encoding="utf-8-sig", compression="infer") as text:
            is_list = text.read(1) == "["
            text.seek(0)
            for number, line in enumerate(json.load(text) if is_list else text, 1):
                row = line if is_list else _json_row(line, name, number)
                if not isinstance(row, dict):
                    raise bad_row("data-row-not-object", name, number, "is not a JSON object")
                found |= dict.fromkeys(row)
                _refuse_columns(len(found), name)
    return list(found)


def _json_row(line: str, name: str, number: int) -> Any:
    """Decode a line of a file of rows; a blank one is a row without columns."""
    try:
        return json.loads(line) if line.strip() else {}
    except json.JSONDecodeError as error:
        reason = f"{error.msg.removesuffix(' at')} at character {error.colno}"
        raise bad_row("data-row-not-json", name, number, f"is not JSON ({reason})") from error
    except RecursionError as error:
        raise bad_row("data-row-too-deep", name, number, "is nested too deeply") from error
    except ValueError as error:  # Python converts integers of up to 4,300 digits
        raise bad_row(
            "data-number-too-long", name, number, "has a number of thousands of digits"
        ) from error


def _text_columns(columns: Iterable[str]) -> dict[str, Any]:
    """Return the options that load every column of a CSV file as text."""
    import datasets

    return {
        "features": datasets.Features({name: datasets.Value("string") for name in columns}),
        "keep_default_na": False,
    }


def _verbatim_features(features: Any, name: str = "") -> Any:
    """Replace guessed timestamps, and fractions in text columns, by JSON, which preserves what is
    written.
    """
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


# Turn the errors of ``datasets`` and the hub client into problems with a code and a remedy.
#
# ``datasets`` raises plain ValueErrors for many different mistakes, so their texts are matched
# here, and nowhere else.


NOT_UTF8_REMEDY = "Save the file as UTF-8."
_BAD_SUBSET = re.compile(r"config name is missing|builderconfig")
_BAD_SPLIT = re.compile(
    r"unknown split|bad split|no split|unrecognized instruction|slice boundar|corresponds to no "
    r"data"
)


def _empty_source(source: DataSource) -> InputError:
    """Return the error of a source without rows."""
    return reject(
        "data-source-empty",
        "data.source",
        source.source,
        "has no rows",
        f"Add rows, or choose another split than {source.split}.",
    )


def _unreadable_source(source: DataSource, error: Exception) -> InputError:
    """Explain why a source cannot be opened.

    Args:
        source: The source that was opened.
        error: The exception of ``datasets``, the hub client or the file system.
    """
    reason = _reason(error)
    text = reason.lower()
    if _BAD_SUBSET.search(text):
        return reject(
            "data-subset-unknown",
            "data.subset",
            source.subset,
            f"{source.source}: {reason}",
            "Name one of its subsets.",
        )
    no_rows = "corresponds to no data" in text
    if no_rows and "[" not in source.split:
        return _empty_source(source)
    if _BAD_SPLIT.search(text):
        code, message = (
            ("data-split-empty", "selects no rows")
            if no_rows
            else ("data-split-unknown", reason.rstrip("."))
        )
        return reject(
            code, "data.split", source.split, message, f"Name a split of {source.source}."
        )
    code, remedy = _classify(source, error, text)
    return reject(code, "data.source", source.source, f"cannot be read ({reason})", remedy)


def _classify(source: DataSource, error: Exception, text: str) -> tuple[str, str]:
    """Return the code and the remedy of a source that exists but cannot be read, or does not
    exist.
    """
    names = {type(cause).__name__ for cause in causes(error)}
    if "RecursionError" in names:
        return (
            "data-row-too-deep",
            "Remove the rows with lists or objects that are nested hundreds of levels deep.",
        )
    if "UnicodeDecodeError" in names:
        return "data-not-utf8", NOT_UTF8_REMEDY
    if "zstd" in text or "zstandard" in text:
        return "data-needs-zstandard", "Install the package zstandard, or decompress the file."
    found = exists(_path_of(source))
    if _looks_like_path(source.source) or found:
        code = "data-source-unreadable" if found else "data-source-missing"
        return (
            code,
            (
                "Name a JSON, JSONL, Parquet, CSV or TSV file, or a folder whose files have one "
                "layout."
            ),
        )
    # Asked for what this user may not have: the terms of a gated source, or a private one.
    if "GatedRepoError" in names or any(
        getattr(getattr(cause, "response", None), "status_code", None) in (401, 403)
        for cause in causes(error)
    ):
        return (
            "hub-access-denied",
            "Accept its terms on the hub, then log in with `hf auth login` (or set HF_TOKEN).",
        )
    return (
        "data-source-unreadable",
        "Check the name on the hub and the network, or download it first with `so-tui fetch`.",
    )


def _unwritable_cache(error: BaseException) -> InputError | None:
    """Return the error of a cache folder that cannot be written.

    Args:
        error: The exception that opening a source raised.

    Returns:
        None if the error comes from elsewhere.
    """
    from huggingface_hub import constants

    error = _root_cause(error)
    if not isinstance(error, OSError):
        return None
    caches = {
        datasets_cache(): ("HF_DATASETS_CACHE", "HF_HOME"),
        Path(constants.HF_HUB_CACHE): ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME"),
    }
    folder = None
    if named := error.path if isinstance(error, NotOwnError) else error.filename:
        path = Path(os.fsdecode(named))
        near = (each for each in caches if path.is_relative_to(each) or each.is_relative_to(path))
        folder = next(near, None)
    elif error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        # Nothing else is written. The error does not name the folder, so take the one with the
        # least space.
        folder = min(caches, key=_free_bytes)
    if folder is None:
        return None
    variable = next((name for name in caches[folder] if name in os.environ), "XDG_CACHE_HOME")
    return reject(
        "cache-unwritable",
        variable,
        str(folder),
        f"cannot be written ({error.strerror or error})",
        f"Free some space there, or set {variable} to a folder that you may write to.",
    )


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(
        next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    ).free


def _reason(error: BaseException) -> str:
    """Return the message of the root cause in one line of at most 300 characters."""
    error = _root_cause(error)
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())[:300] or type(error).__name__


def _root_cause(error: BaseException) -> BaseException:
    """Unwrap the DatasetGenerationError that ``datasets`` raises around the error of a reader."""
    inner = (each for each in causes(error) if type(each).__name__ != "DatasetGenerationError")
    return next(inner, error)


class Opened(NamedTuple):
    """A source that is ready to be read."""

    source: DataSource
    rows: Dataset
    """Memory-mapped."""
    layout: Layout
    """The layout of most rows."""
    warnings: tuple[str, ...] = ()

    def conversations(self, first: int, last: int) -> Iterator[Conversation]:
        """Yield rows ``first`` to ``last`` (exclusive) in order. They are read together, so
        ask for few.

        Raises:
            InputError: Names the first row that cannot be read.
        """
        source = self.source
        try:
            batch = self.rows[first:last]
        except (
            UnicodeDecodeError
        ) as error:  # Arrow decodes text only when it becomes a Python string.
            undecodable = thousands(_undecodable_row(self.rows, first))
            raise reject(
                "data-not-utf8",
                "data.source",
                source.source,
                f"row {undecodable} has text that is not UTF-8",
                NOT_UTF8_REMEDY,
            ) from error
        for number, values in enumerate(zip(*batch.values(), strict=True), first + 1):
            yield read_row(dict(zip(batch, values, strict=True)), self.layout, source, number)


def open_sources(spec: DataSpec) -> tuple[Opened, ...]:
    """Open every source of the data section.

    Raises:
        InputError: A source cannot be read, is empty, or has columns that fit no layout.
    """
    return tuple(_open(source) for source in spec.sources)


def _open(source: DataSource) -> Opened:
    rows, warnings = _load(source)
    _leave_encoded(rows.info.features)
    if len(rows) == 0:
        raise _empty_source(source)
    return Opened(source, rows, layout_of(rows.column_names, source), warnings)


def _leave_encoded(feature: Any) -> None:
    """Keep pictures and sounds as they are in the rows, where they may name any file."""
    from datasets import Json

    if isinstance(feature, dict):
        for part in feature.values():
            _leave_encoded(part)
    elif hasattr(feature, "feature"):  # a list
        _leave_encoded(feature.feature)
    elif hasattr(feature, "decode") and not isinstance(feature, Json):
        feature.decode = False


def _load(source: DataSource) -> tuple[Dataset, tuple[str, ...]]:
    """Return the rows of a source and warnings about them."""
    import datasets

    # HTTPError is httpx's own, of whichever httpx it uses.
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    name, path = resolve_source(source.source), _path_of(source)
    try:
        if not (rows := datasets_cache()).exists():
            private_folder(rows)
        if path.exists():
            before = seen_in(path)
            read = _read_folder(path, source) if path.is_dir() else (_read_file(path, source), ())
            if seen_in(path) != before:
                raise reject(
                    "data-source-changed",
                    "data.source",
                    source.source,
                    "has changed while it was read",
                    "Try again while no one writes there, or copy it into a folder of your own.",
                )
            return read
        if _looks_like_path(name):
            raise FileNotFoundError(2, "no such file or folder")
        check_cached("dataset", name, "data.source")
        return _read_verbatim(source, name, source.subset or None, cache_dir=str(rows)), ()
    except (
        OSError,
        ValueError,
        EOFError,
        ImportError,
        RecursionError,
        HTTPError,
        datasets.exceptions.DatasetsError,
    ) as error:
        if problem := _unwritable_cache(error):
            raise problem from error
        raise _unreadable_source(source, error) from error


def _undecodable_row(rows: Dataset, start: int) -> int:
    """Return the number (from 1) of the first row from index ``start`` on that cannot be
    decoded.
    """
    for index in range(start, len(rows)):
        try:
            rows[index]
        except UnicodeDecodeError:
            return index + 1
    return len(rows)
