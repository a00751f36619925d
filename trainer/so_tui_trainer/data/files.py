"""Read rows from files of JSON, CSV and TSV, each value as it is written.

The readers of ``datasets`` guess types, and lose what does not fit their guess: they write numbers
in columns of several types with ten decimals, fill in keys that other rows have, read text that
happens to be JSON as JSON, and shift columns where a line of CSV has one field too many. So a row
of JSON is stored as its text here, and a row of a table as texts. ``datasets`` still chooses a
folder's files and splits, prepares the rows once for all ranks, and maps them into memory.

Imports ``datasets`` only when something is read.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Literal
from zipfile import ZipFile, ZipInfo, is_zipfile

import fsspec
import pyarrow

from so_tui.spec import InputError
from so_tui.spec.errors import reject
from so_tui.trust.files import open_descriptor
from so_tui.units import thousands
from so_tui_trainer.data.rows import bad_row

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder

MOST_COLUMNS = 2_000
"""Columns that a table may have, or keys that the rows of a file may have. Wide tables with text
have some hundred.
"""
_Open = Callable[[], Any]
"""Opens a file of bytes."""
ROW, KEYS = "row of JSON", "keys of the row"
"""The columns in which rows of JSON are stored: their text, and their keys as a JSON list."""
READERS = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
}
LONGEST_ROW_BYTES = 32 << 20
"""Limit for a line of JSON. A million tokens of text are about 5 MB."""
COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
NOT_UTF8_REMEDY = "Save the file as UTF-8."
_MAGIC = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\x00": "xz", b"BZh": "bz2", b"(\xb5/\xfd": "zstd"}
_BOM = b"\xef\xbb\xbf"
_BLANK = re.compile(r"\s+")
_WRONG = {
    "end of data": "opens a quote that nothing closes",
    "expected after": "has text after the closing quote of a field",
}
"""What the errors of ``csv`` mean."""
_BATCH_ROWS = 1_000
_SEPARATORS = {".tsv": "\t,;|"}
"""The first of them that the header has separates the columns."""


def ending(path: Path) -> str:
    """Return a file's ending without that of a compression, in lower case."""
    suffixes = path.suffixes
    if suffixes and suffixes[-1].lower() in COMPRESSED:
        suffixes.pop()
    return suffixes[-1].lower() if suffixes else ""


def refuse_columns(count: int, name: str) -> None:
    """Refuse a file with far more columns than data have (``data-too-many-columns``)."""
    if count > MOST_COLUMNS:
        raise reject(
            "data-too-many-columns",
            "data.source",
            name,
            f"has {thousands(count)} columns or keys in its rows; the limit is "
            f"{thousands(MOST_COLUMNS)}",
            "Write a file with the columns that are trained on.",
        )


def is_data(path: Path) -> bool:
    """Return whether a file of a folder is read: its name ends as data files do, and is not that of
    a hidden or temporary file, nor is it in a folder that is.
    """
    *folders, name = path.parts
    hidden = name.startswith((".", "~")) or any(part.startswith((".", "__")) for part in folders)
    return not hidden and (ending(path) in READERS or path.suffix.lower() == ".zip")


def data_in(archive: ZipFile) -> Iterator[ZipInfo]:
    """Yield the data files in a ZIP archive. Archives in it are left out."""
    for member in archive.infolist():
        path = Path(member.filename)
        if is_data(path) and ending(path) in READERS and not member.is_dir():
            yield member


class _Zstandard(io.RawIOBase):
    """The content of a file that is compressed with Zstandard. pyarrow's stream is no file."""

    def __init__(self, stored: IO[bytes]) -> None:
        self._stream, self._position = pyarrow.CompressedInputStream(stored, "zstd"), 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        found = self._stream.read(len(buffer))
        buffer[: len(found)] = found
        self._position += len(found)
        return len(found)


@contextmanager
def content_of(stored: IO[bytes]) -> Iterator[IO[bytes]]:
    """Open the content of a file, which may be compressed, whatever its name is."""
    head = stored.read(6)
    stored.seek(0)
    kind = next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)
    if kind is None:
        yield stored
    elif kind == "zstd":
        with io.BufferedReader(_Zstandard(stored)) as file:
            yield file
    else:
        with fsspec.compression.compr[kind](stored, mode="rb") as file:
            yield file


# JSON


def _float(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"{text[:30]} is too large")
    return value


class _KeyTwiceError(ValueError):
    """An object that has a key twice, of which a reader would take the last."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _KeyTwiceError(next(key for key in found if keys.count(key) > 1))
    return found


_HOOKS: dict[str, Any] = {
    "parse_float": _float,
    "parse_constant": lambda name: None if name == "NaN" else float(name),
}
"""NaN is what pandas writes where a value is missing."""
_DECODER = json.JSONDecoder(**_HOOKS)
"""For rows that were read once."""
_READER = json.JSONDecoder(**_HOOKS, object_pairs_hook=_object)


def decoded(text: str) -> dict[str, Any]:
    """Return a stored row of JSON."""
    row: dict[str, Any] = _DECODER.decode(text)
    return row


def _json_row(text: str, name: str, number: int) -> dict[str, Any]:
    try:
        row = _READER.decode(text)
    except _KeyTwiceError as error:
        raise _key_twice(f"{name}, row {thousands(number)}", error) from error
    except json.JSONDecodeError as error:
        reason = f"{error.msg.removesuffix(' at')} at character {error.colno}"
        raise bad_row("data-row-not-json", name, number, f"is not JSON ({reason})") from error
    except RecursionError as error:
        raise bad_row("data-row-too-deep", name, number, "is nested too deeply") from error
    except ValueError as error:  # Python converts integers of up to 4,300 digits
        raise bad_row(
            "data-number-too-long",
            name,
            number,
            "has a number of thousands of digits, or one that is too large for a float",
        ) from error
    _check_row(row, text, name, number)
    return row  # type: ignore[no-any-return]


def _key_twice(name: str, error: _KeyTwiceError) -> InputError:
    return reject(
        "data-key-twice",
        "data.source",
        name,
        f"has an object with two values of the key {str(error)!r}",
        "Remove one of them.",
    )


def _check_row(row: Any, text: str, name: str, number: int) -> None:
    if not isinstance(row, dict):
        raise bad_row("data-row-not-object", name, number, "is not a JSON object")
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            broken = ascii(error.object[error.start])
            raise bad_row(
                "data-half-character",
                name,
                number,
                f"has half of a surrogate pair ({broken}), which is not text",
            ) from error


def _json_rows(opened: _Open, name: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the rows of JSON lines, of one list, or of objects one after another, each with its
    text.
    """
    with opened() as stored, content_of(stored) as content:
        yield from _rows_in(content, name)


def _rows_in(file: IO[bytes], name: str) -> Iterator[tuple[dict[str, Any], str]]:
    number = 0
    for number, line in enumerate(file, 1):
        first = line.removeprefix(_BOM) if number == 1 else line
        if first.strip():
            break
    else:
        return
    try:
        is_lines = isinstance(_DECODER.decode(first.decode()), dict)
    except json.JSONDecodeError:
        is_lines = False
    except (ValueError, RecursionError):  # reading the line again says why
        is_lines = True
    if is_lines:
        for at, line in enumerate(chain((first,), file), number):
            if text := _text(line, name, at).strip():
                yield _json_row(text, name, at), text
        return
    text = (first + file.read()).decode()
    try:
        if text.lstrip().startswith("["):
            rows = _READER.decode(text)
        else:
            rows = _in_sequence(text, name, number)
        for at, row in enumerate(rows, 1):
            written = json.dumps(row)
            _check_row(row, written, name, at)
            yield row, written
    except _KeyTwiceError as error:
        raise _key_twice(name, error) from error


def _in_sequence(text: str, name: str, first_line: int) -> Iterator[Any]:
    """Yield JSON values that follow each other, each of them on one line or several."""
    position = 0
    while position < len(text):
        if blank := _BLANK.match(text, position):
            position = blank.end()
            continue
        try:
            value, position = _READER.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise bad_row(
                "data-row-not-json",
                name,
                first_line + error.lineno - 1,
                f"is not JSON ({error.msg.removesuffix(' at')} at character {error.colno})",
            ) from error
        yield value


def _text(line: bytes, name: str, number: int, what: str = "row") -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise reject(
            "data-not-utf8",
            "data.source",
            name,
            f"{what} {thousands(number)} has text that is not UTF-8",
            NOT_UTF8_REMEDY,
        ) from error


# Tables


def _table_rows(opened: _Open, name: str, kind: str) -> Iterator[tuple[dict[str, str], str]]:
    """Yield the rows of a table.

    TSV is also written without quotes around fields: where a quote encloses no field, and no
    backslash escapes it, quotes are text.
    """
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL
    if kind == ".tsv":
        try:
            for _ in _fields(opened, name, kind, quoting):
                pass
        except InputError:
            with suppress(InputError):  # otherwise the first error counts
                plain = _fields(opened, name, kind, csv.QUOTE_NONE)
                if not any('\\"' in field for row, _ in plain for field in row.values()):
                    quoting = csv.QUOTE_NONE
    yield from _fields(opened, name, kind, quoting)


def _fields(
    opened: _Open, name: str, kind: str, quoting: Literal[0, 3]
) -> Iterator[tuple[dict[str, str], str]]:
    csv.field_size_limit(LONGEST_ROW_BYTES)
    with (
        opened() as stored,
        content_of(stored) as content,
        io.TextIOWrapper(content, encoding="utf-8-sig", newline="") as text,
    ):
        header, number = list[str](), 0
        try:
            first = text.readline()
            choice = _SEPARATORS.get(kind, ",;\t|")
            separator = next((each for each in choice if each in first), choice[0])
            reader = csv.reader(
                chain((first,), text), delimiter=separator, strict=True, quoting=quoting
            )
            for row in reader:
                if not row:
                    continue
                if not header:
                    header = _header(row, name)
                    continue
                number += 1
                if len(row) != len(header):
                    wrong = f"does not have {len(header)} fields as the header, but {len(row)}"
                    raise _bad_line(name, number, wrong, reader)
                fields = dict(zip(header, row, strict=True))
                yield fields, json.dumps(fields)
        except csv.Error as error:
            wrong = next((text for part, text in _WRONG.items() if part in str(error)), str(error))
            raise _bad_line(name, number + 1, wrong, reader) from error
        except UnicodeDecodeError:  # it was decoded in blocks: decode each line
            with opened() as stored, content_of(stored) as lines:
                for at, line in enumerate(lines, 1):
                    _text(line, name, at, "line")
            raise


def _header(row: list[str], name: str) -> list[str]:
    header = [column or f"unnamed {at}" for at, column in enumerate(row, 1)]
    if twice := next((column for column in header if header.count(column) > 1), ""):
        raise reject(
            "data-column-twice",
            "data.source",
            name,
            f"has two columns named {twice}",
            "Rename or remove one of them.",
        )
    return header


def _bad_line(name: str, number: int, message: str, reader: Any) -> InputError:
    return reject(
        "data-line-unreadable",
        "data.source",
        f"{name}, row {thousands(number)}",
        f"{message} (line {thousands(reader.line_num)} of the file)",
        'Put fields that contain the separator, a quote or a line end in quotes ("), and write a '
        'quote in them twice (""): backslashes do not escape it. Or write JSONL.',
    )


# Files


def builder_of(
    data_files: Mapping[str, Iterable[str]],
    is_table: bool,
    cache_dir: str,
    name_of: Callable[[str], str],
    **names: Any,
) -> DatasetBuilder:
    """Return a builder that prepares the rows of these files of each split.

    Args:
        data_files: As a configuration of ``datasets`` has them.
        is_table: Whether they are CSV or TSV.
        cache_dir: Where prepared rows are stored.
        name_of: What errors call a file.
        names: What ``datasets`` calls prepared rows, if not as those of local files.
    """
    import datasets

    class Rows(datasets.ArrowBasedBuilder):  # type: ignore[misc]
        """Reads rows as they are written."""

        def _info(self) -> datasets.DatasetInfo:
            columns = {ROW: datasets.Value("large_string"), KEYS: datasets.Value("string")}
            return datasets.DatasetInfo(features=datasets.Features(columns))

        def _split_generators(self, dl_manager: Any) -> list[datasets.SplitGenerator]:
            files = self.config.data_files
            return [
                datasets.SplitGenerator(
                    name=split,
                    gen_kwargs={
                        "files": [
                            (file if file.startswith("/") else dl_manager.download(file), file)
                            for file in files[split]
                        ]
                    },
                )
                for split in files
            ]

        def _generate_tables(
            self, files: list[tuple[str, str]]
        ) -> Iterator[tuple[Any, pyarrow.Table]]:
            rows = chain.from_iterable(
                _rows_of(Path(path), name_of(original), is_table, ending(Path(original)))
                for path, original in files
            )
            schema = self.info.features.arrow_schema
            for number in count():
                if not (batch := [*islice(rows, _BATCH_ROWS)]):
                    return
                columns = {ROW: [text for _, text in batch], KEYS: [keys for keys, _ in batch]}
                yield number, pyarrow.Table.from_pydict(columns, schema)

    return Rows(
        cache_dir=cache_dir,
        **{"dataset_name": "rows", "hash": "1", **names},
        data_files=datasets.data_files.DataFilesDict(
            {
                split: datasets.data_files.DataFilesList([*files], [()] * len([*files]))
                for split, files in data_files.items()
            }
        ),
    )


def _rows_of(path: Path, name: str, is_table: bool, kind: str) -> Iterator[tuple[str, str]]:
    """Yield the keys and the text of each row of a file, or of the files in a ZIP archive."""
    with _opened(path) as stored:
        if is_zipfile(stored):
            archive = ZipFile(stored)
            for member in data_in(archive):
                opened, inside = partial(archive.open, member), Path(member.filename)
                yield from _texts_of(opened, f"{name}/{inside}", is_table, ending(inside))
            return
    yield from _texts_of(partial(_opened, path), name, is_table, kind)


def _opened(path: Path) -> BinaryIO:
    return os.fdopen(open_descriptor(path), "rb")


def _texts_of(opened: _Open, name: str, is_table: bool, kind: str) -> Iterator[tuple[str, str]]:
    columns, met = set[str](), set[str]()
    for row, text in _table_rows(opened, name, kind) if is_table else _json_rows(opened, name):
        if (keys := json.dumps([*row])) not in met:
            met.add(keys)
            columns |= row.keys()
            refuse_columns(len(columns), name)
        yield keys, text


def columns_of(rows: Dataset) -> list[str]:
    """Return the columns of prepared rows, or the keys of all rows of JSON."""
    if KEYS not in rows.column_names:
        return list(rows.column_names)
    return [*dict.fromkeys(chain.from_iterable(map(json.loads, rows.unique(KEYS))))]


def values_of(
    batch: Mapping[str, list[Any]], columns: Iterable[str], features: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a batch, each with all columns.

    Args:
        batch: Rows as ``datasets`` has them.
        columns: The columns that any row of the source has.
        features: The types of the batch.
    """
    if ROW in batch:
        empty = dict.fromkeys(columns)
        yield from (empty | decoded(text) for text in batch[ROW])
    else:
        cleared = (
            [_without_nulls(value, features[name]) for value in values]
            if _has_objects(features[name])
            else values
            for name, values in batch.items()
        )
        for values in zip(*cleared, strict=True):
            yield dict(zip(batch, values, strict=True))


def _has_objects(feature: Any) -> bool:
    return isinstance(feature, dict) or (
        hasattr(feature, "feature") and _has_objects(feature.feature)
    )


def _without_nulls(value: Any, feature: Any) -> Any:
    """Leave out the keys of typed objects that are null: each object has the keys of all. What is
    stored as JSON stays as it is.
    """
    if isinstance(value, dict) and isinstance(feature, dict):
        return {
            name: _without_nulls(inner, feature[name])
            for name, inner in value.items()
            if inner is not None
        }
    if isinstance(value, list) and hasattr(feature, "feature"):
        return [_without_nulls(inner, feature.feature) for inner in value]
    return value
