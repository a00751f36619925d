"""Open the sources of the data section: hub ids, files and folders, memory-mapped.

Imports ``datasets`` only when a source is opened.
"""

from __future__ import annotations

import codecs
import errno
import filecmp
import hashlib
import lzma
import os
import re
import shutil
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple
from zipfile import BadZipFile, ZipFile, is_zipfile

import numpy as np

from so_tui.spec import DataSource, DataSpec, InputError, resolve_source
from so_tui.spec.check import exists
from so_tui.spec.errors import reject
from so_tui.trust.files import NotOwnError, open_descriptor
from so_tui.trust.folders import private_folder
from so_tui.units import thousands
from so_tui_trainer.data.files import (
    COMPRESSED,
    LONGEST_ROW_BYTES,
    NOT_UTF8_REMEDY,
    READERS,
    builder_of,
    columns_of,
    content_of,
    data_in,
    ending,
    is_data,
    refuse_columns,
    values_of,
)
from so_tui_trainer.data.rows import Layout, bad_row, layout_of, read_row
from so_tui_trainer.data.turns import Conversation
from so_tui_trainer.foreign import check_cached, datasets_cache, seen_in
from so_tui_trainer.hub import causes
from so_tui_trainer.pointers import refuse_pointers
from so_tui_trainer.step_limits import limited

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder


# What is checked of a local data file before ``datasets`` reads it, which takes minutes and much
# memory for a file that is no data.
#
# Other errors are left to the readers of ``datasets``.


MOST_NESTED = 100
"""Levels of lists and objects in a row. Tool calls have about ten."""
MOST_TIMES = 100
"""How often larger than its file the content of a compressed one may be. Text is some ten times as
large. Content up to ``_CHECKED_BYTES`` is not judged.
"""
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
_OTHER_CODES = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
"""How UTF-16 begins, and one kind of UTF-32."""


def _check_file(path: Path, source: DataSource, name: str = "") -> bool:
    """Refuse a file with a line that no reader can handle.

    Args:
        path: The file.
        source: The source that it belongs to.
        name: What errors call it; by default the name of the source.

    Returns:
        Whether it has rows.

    Raises:
        InputError: It is no regular file (``data-source-not-a-file``), only a pointer to one
            (``lfs-pointer``), is UTF-16 (``data-not-utf8``), or has a row that is too
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
    kind = READERS.get(ending(path))
    refuse_pointers((path,), "data.source", name)
    try:
        if kind == "parquet":
            _check_parquet(path, name)
        else:
            with os.fdopen(open_descriptor(path), "rb") as stored:
                if is_zipfile(stored):
                    return _check_archive(ZipFile(stored), path, name)
                stored.seek(0)
                return kind is None or _check_content(stored, kind, name)
    except (
        EOFError,
        ValueError,
        RuntimeError,  # encrypted
        BadZipFile,
        zlib.error,
        lzma.LZMAError,
    ):  # cut short or damaged: the reader says which
        return True
    return True


def _check_archive(archive: ZipFile, path: Path, name: str) -> bool:
    members = [*data_in(archive)]
    _refuse_expansion(sum(each.file_size for each in members), path.stat().st_size, name)
    checked = []
    for member in members:
        with archive.open(member) as stored:
            kind = READERS[ending(Path(member.filename))]
            checked.append(
                kind == "parquet" or _check_content(stored, kind, f"{name}/{member.filename}")
            )
    return any(checked)


def _check_content(stored: IO[bytes], kind: str, name: str) -> bool:
    with content_of(stored) as file:
        has_rows = _check_rows(file, name, is_table=kind == "csv")
        if file is not stored:
            while file.tell() < _CHECKED_BYTES and file.read(_CHUNK_BYTES):
                pass
            _refuse_expansion(file.tell(), stored.tell(), name)
        return has_rows


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
    refuse_columns(found.num_columns, name)
    content = sum(found.row_group(index).total_byte_size for index in range(found.num_row_groups))
    _refuse_expansion(content, path.stat().st_size, name)


def _check_rows(file: IO[bytes], name: str, *, is_table: bool) -> bool:
    """Check the lines of a file of rows, or a file that is one JSON list as a whole.

    Args:
        file: Its content.
        name: What errors call it.
        is_table: Whether it is CSV or TSV, where only the first line has the columns.

    Returns:
        Whether it has rows.
    """
    checked_bytes = row = written = 0
    while (
        checked_bytes < _CHECKED_BYTES
        and row < _CHECKED_ROWS
        and (line := file.readline(LONGEST_ROW_BYTES + 1))
    ):
        checked_bytes, row = checked_bytes + len(line), row + 1
        if row == 1 and (line.startswith(_OTHER_CODES) or line[:2].count(0) == 1):
            raise reject(
                "data-not-utf8",
                "data.source",
                name,
                "is written as UTF-16 or UTF-32",
                "Save the file as UTF-8: `iconv -f UTF-16 -t UTF-8 FILE > NEW`.",
            )
        if line.isspace():
            continue
        written += len(line.splitlines())
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
            return b"{" in content or content.strip() != b"[]"
        if len(line) > LONGEST_ROW_BYTES:
            raise bad_row(
                "data-row-too-long",
                name,
                row,
                f"is longer than {LONGEST_ROW_BYTES >> 20} MiB; a file of rows has one row a line",
            )
        if is_table:
            if row == 1:
                refuse_columns(1 + max(map(line.count, (b",", b";", b"\t"))), name)
            continue
        if _is_deep(line):
            raise bad_row(
                "data-row-too-deep", name, row, f"is nested more than {MOST_NESTED} levels deep"
            )
    return written > is_table


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


_METADATA_FILES = ("dataset_info.json", "dataset_infos.json", "config.json")
"""Files that data sets come with, which ``datasets`` does not read as rows."""
_CARDS = ("README.md", ".huggingface.yaml")
"""They name the subsets of a folder."""
_MAX_NAMED_FILES = 3


def _read_file(path: Path, source: DataSource) -> Dataset:
    """Open one file.

    Raises:
        InputError: The file has an unknown ending, is empty or cannot be read, or a subset was
            asked for.
    """
    import datasets

    reader = READERS.get(ending(path))
    if reader is None:
        raise reject(
            "data-file-type-unknown",
            "data.source",
            source.source,
            f"files ending in {path.suffix or 'nothing'} cannot be read",
            f"Use one of {', '.join(READERS)}. Unpack an archive first.",
        )
    if source.subset:
        raise reject(
            "data-subset-of-file",
            "data.subset",
            source.subset,
            f"{source.source} is a file, which has no subsets",
            "Leave it empty. In a list of sources, set it for the source that has subsets.",
        )
    if not _check_file(path, source):
        raise _empty_source(source)
    cache = Path(_cache_dir((path,)))
    with limited(f"the file {source.source}", path.stat().st_size):
        if reader == "parquet":
            links = _linked(path.parent, (Path(path.name),), cache, rename="rows.parquet")
            builder = datasets.load_dataset_builder(str(links), cache_dir=str(cache))
        else:
            files = {"train": (str(path.absolute()),)}
            builder = builder_of(files, reader == "csv", str(cache), lambda _: source.source)
        return _prepared(source, builder)


def _read_folder(path: Path, source: DataSource) -> tuple[Dataset, tuple[str, ...]]:
    """Open a folder of files, of subsets, or one that ``save_to_disk`` wrote.

    Returns:
        The rows, and warnings about files that are not read.
    """
    import datasets

    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        refuse_pointers((file for file in path.rglob("*.arrow")), "data.source", source.source)
        saved = datasets.load_from_disk(str(path), keep_in_memory=False)
        if not isinstance(saved, datasets.Dataset):
            if source.split not in saved:
                raise ValueError(f"it has no split {source.split}, but {', '.join(saved)}")
            saved = saved[source.split]
        _refuse_elsewhere((file["filename"] for file in saved.cache_files), f"{path}/", source)
        return saved, ()
    inside = sorted(file.relative_to(path) for file in _files_in(path))
    data = [file for file in inside if is_data(file) and file.name not in _METADATA_FILES]
    if not data:
        raise ValueError("it has no data files")
    full = [file for file in data if _check_file(path / file, source, _named(source, file))]
    if not full:
        raise _empty_source(source)
    cache = Path(_cache_dir([path / file for file in inside]))
    with limited(f"the folder {source.source}", sum((path / file).stat().st_size for file in full)):
        cards = (file for file in inside if str(file) in _CARDS)
        links = _linked(path, (*full, *cards), cache)
        root = f"{path.resolve()}/"
        try:
            builder = datasets.load_dataset_builder(
                str(links), source.subset or None, cache_dir=str(cache)
            )
        except FileNotFoundError as error:
            reason = str(error).replace(f"{links}/", root)
            _refuse_elsewhere(re.findall("Unable to find '([^']+)'", reason), root, source)
            raise FileNotFoundError(reason) from error
        files = builder.config.data_files or {}
        places = (file.replace(f"{links}/", root) for each in files.values() for file in each)
        _refuse_elsewhere(places, root, source)
        own = _own(builder, str(cache), lambda file: _named(source, os.path.relpath(file, links)))
        rows = _prepared(source, own)
    used = {Path(os.path.realpath(file)) for each in files.values() for file in each}
    return rows, (
        *(() if source.subset else _left_out(path, inside, used)),
        *_doubled(path, [file for file in full if (path / file).resolve() in used]),
    )


def _named(source: DataSource, file: Path | str) -> str:
    """Return what errors call a file in a folder."""
    return str(Path(source.source) / file)


def _files_in(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder, also in folders that links lead to, each folder once."""
    met = set[tuple[int, int]]()
    for root, folders, files in os.walk(folder, followlinks=True):
        state = Path(root).stat()
        if (state.st_dev, state.st_ino) in met:
            folders.clear()
            continue
        met.add((state.st_dev, state.st_ino))
        yield from (file for name in files if (file := Path(root, name)).is_file())


def _linked(folder: Path, files: Iterable[Path], cache: Path, rename: str = "") -> Path:
    """Link to files from a folder without any others: ``datasets`` takes brackets in paths for
    patterns, counts backups as data, and knows endings in lower case only.
    """
    links = cache.resolve() / "files"
    for file in files:
        name = file.with_suffix(file.suffix.lower())
        if name != file and (folder / name).exists():
            name = file
        link = links / (rename or name)
        link.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):  # another rank was faster
            link.symlink_to((folder / file).absolute())
    return links


def _own(builder: DatasetBuilder, cache_dir: str, name_of: Callable[[str], str]) -> DatasetBuilder:
    """Return our builder instead of one for JSON or tables."""
    kind = type(builder.config).__name__
    if kind not in ("JsonConfig", "CsvConfig"):
        return builder
    names = {}
    if builder.repo_id:  # offline, datasets looks for rows by these names, and takes the newest
        names = {
            "dataset_name": builder.dataset_name,
            "repo_id": builder.repo_id,
            "config_name": builder.config.name,
            "config_id": builder.config_id,
            "hash": f"{builder.hash}-rows",
        }
    return builder_of(builder.config.data_files, kind == "CsvConfig", cache_dir, name_of, **names)


def _prepared(source: DataSource, builder: DatasetBuilder) -> Dataset:
    try:
        builder.download_and_prepare()
    except Exception as error:
        for cause in causes(error):
            if isinstance(cause, InputError):
                raise cause from None
        raise
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
        or Path(name).suffix in (*READERS, *COMPRESSED)
        or name.count("/") > 1
    )


def _path_of(source: DataSource) -> Path:
    """Return the path that a source names, if it does not name a data set on the hub."""
    return Path(resolve_source(source.source)).expanduser()


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


def _left_out(folder: Path, files: Iterable[Path], used: set[Path]) -> tuple[str, ...]:
    """Return a warning about files that look like data and are not read. Hidden ones are not
    named.
    """
    left_out = [
        str(file)
        for file in files
        if any(kind in file.name.lower() for kind in (*READERS, ".zip"))
        and file.name not in (*_CARDS, *_METADATA_FILES)
        and not any(part.startswith(".") for part in file.parts)
        and (folder / file).resolve() not in used
    ]
    if not left_out:
        return ()
    more = (
        f" and {thousands(len(left_out) - _MAX_NAMED_FILES)} more"
        if len(left_out) > _MAX_NAMED_FILES
        else ""
    )
    count = "1 file" if len(left_out) == 1 else f"{thousands(len(left_out))} files"
    return (
        (
            f"{folder}: {count} not read: {', '.join(left_out[:_MAX_NAMED_FILES])}{more} (backups "
            "and empty files are not read; of the others, only files of one kind are, and only "
            "those of a split if names mention splits)"
        ),
    )


def _doubled(folder: Path, files: Iterable[Path]) -> Iterator[str]:
    """Yield a warning for each file with the same content as another one."""
    by_size: dict[int, list[Path]] = {}
    for file in files:
        same = by_size.setdefault((folder / file).stat().st_size, [])
        for earlier in same:
            if filecmp.cmp(folder / earlier, folder / file, shallow=False):
                yield f"{folder}: {file} has the same content as {earlier}, and both are read"
                break
        same.append(file)


# Turn the errors of ``datasets`` and the hub client into problems with a code and a remedy.
#
# ``datasets`` raises plain ValueErrors for many different mistakes, so their texts are matched
# here, and nowhere else.


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
    columns: tuple[str, ...]
    """Those that any row has."""
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
        rows = values_of(batch, self.columns, self.rows.features)
        for number, row in enumerate(rows, first + 1):
            yield read_row(row, self.layout, source, number)


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
    columns = columns_of(rows)
    return Opened(source, rows, layout_of(columns, source), tuple(columns), warnings)


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
        builder = datasets.load_dataset_builder(name, source.subset or None, cache_dir=str(rows))
        files = builder.config.data_files or {}
        _refuse_elsewhere(chain.from_iterable(files.values()), f"hf://datasets/{name}@", source)
        return _prepared(source, _own(builder, str(rows), lambda file: file)), ()
    except (
        OSError,
        ValueError,
        EOFError,
        ImportError,
        RecursionError,
        BadZipFile,
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
