"""Write the steps of a run as a table that other programs read: CSV, or Parquet where pyarrow is
installed.

Problem codes:
    unknown-format: The file's name ends in neither .csv nor .parquet.
    pyarrow-missing: Parquet needs pyarrow, which is not installed.
    file-exists: There is a file of this name.
    not-writable: The file cannot be written.
    no-steps: The run has no steps.
"""

from __future__ import annotations

import contextlib
import csv
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from so_tui.runs.metrics import MetricsReader
from so_tui.runs.records import Count, EvaluationRecord, StepRecord
from so_tui.spec.check import exists
from so_tui.spec.errors import InputError, reject, shown

EVALUATION_LOSS = "evaluation_loss"
COLUMNS = (*(field for field in StepRecord.__struct_fields__ if field != "v"), EVALUATION_LOSS)
_OF_EVALUATIONS = ("attempt", "time", "step")
_ROWS = 10_000
FORMATS = (".csv", ".parquet")
Progress = Callable[[int], None]
_Write = Callable[[Sequence[tuple[Any, ...]]], object]


def export_metrics(
    reader: MetricsReader,
    path: Path,
    progress: Progress = lambda _: None,
    *,
    columns: Sequence[str] = COLUMNS,
    force: bool = False,
) -> int:
    """Write every step that is not superseded, one row a step, and return the number of rows. The
    file appears when it is complete.

    The loss of an evaluation is in the row of the step after which it was made. Where that has no
    record, such as before the first step, the evaluation has a row of its own.

    Args:
        reader: A reader that knows the run.
        path: A new file, whose name ends in ``.csv`` or ``.parquet``.
        progress: Called with the number of rows so far.
        columns: Fields of the step records, and EVALUATION_LOSS.
        force: Whether the file replaces another one.

    Raises:
        InputError: With the codes of this module.
        OSError: The run cannot be read.
    """
    if path.suffix not in FORMATS:
        raise _unfit(
            path,
            "unknown-format",
            "is neither CSV nor Parquet",
            "Give a name that ends in .csv or .parquet.",
        )
    if reader.latest is None:
        raise _unfit(
            path, "no-steps", "would be empty: the run has no steps yet", "Wait for its first step."
        )
    if path.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise _unfit(
            path,
            "pyarrow-missing",
            "needs pyarrow",
            "Install it (`pip install pyarrow`), or write .csv.",
        )
    return export_rows(path, columns, _rows(reader, columns), progress, force=force)


def export_rows(
    path: Path,
    columns: Sequence[str],
    rows: Iterable[tuple[Any, ...]],
    progress: Progress = lambda _: None,
    *,
    force: bool = False,
) -> int:
    """Write rows into a new file under another name, give it its own once it is complete, and
    return the number of rows. Raises InputError as ``export_metrics``.
    """
    taken = _unfit(
        path, "file-exists", "exists already", "Choose another name, or replace it with --force."
    )
    if exists(path) and not force:
        raise taken
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    count, table = 0, _parquet if path.suffix == ".parquet" else _csv
    try:
        with (
            open(temporary, "xb", opener=partial(os.open, mode=0o600)) as file,
            table(file, columns) as write,
        ):
            left = iter(rows)
            while batch := [*islice(left, _ROWS)]:
                write(batch)
                count += len(batch)
                progress(count)
        if force:
            temporary.replace(path)
        else:  # unlike a rename, a link fails if another process took the name in the meantime
            os.link(temporary, path)
    except FileExistsError:
        raise taken from None
    except OSError as error:
        message = f"cannot be written: {error.strerror or error}"
        raise _unfit(path, "not-writable", message, "Choose another folder.") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return count


def _unfit(path: Path, code: str, message: str, remedy: str) -> InputError:
    return reject(code, "--to", shown(str(path)), message, remedy)


def _rows(reader: MetricsReader, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Yield the rows in the order of steps; of several evaluations after a step, the last
    counts.
    """
    left = deque(
        {record.step: record for record in reader.events.evaluations}.values()
        if EVALUATION_LOSS in columns
        else ()
    )
    for step in reader.steps(0, float("inf")):
        while left and left[0].step < step.step:
            yield _alone(left.popleft(), columns)
        evaluated = left.popleft().loss if left and left[0].step == step.step else None
        yield tuple(
            evaluated if column == EVALUATION_LOSS else getattr(step, column) for column in columns
        )
    for evaluation in left:
        yield _alone(evaluation, columns)


def _alone(evaluation: EvaluationRecord, columns: Sequence[str]) -> tuple[Any, ...]:
    known = {name: getattr(evaluation, name) for name in _OF_EVALUATIONS}
    known[EVALUATION_LOSS] = evaluation.loss
    return tuple(known.get(column) for column in columns)


@contextlib.contextmanager
def _csv(binary: BinaryIO, columns: Sequence[str]) -> Iterator[_Write]:
    with TextIOWrapper(binary, newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        yield writer.writerows  # of numbers alone, so that no cell is a formula


@contextlib.contextmanager
def _parquet(file: BinaryIO, columns: Sequence[str]) -> Iterator[_Write]:
    import pyarrow
    import pyarrow.parquet

    integers = {
        field.name
        for field in msgspec.structs.fields(StepRecord)
        if field.type in (Count, Count | None)
    }
    schema = pyarrow.schema(
        [(name, pyarrow.int64() if name in integers else pyarrow.float64()) for name in columns]
    )
    with pyarrow.parquet.ParquetWriter(file, schema) as writer:

        def write(batch: Sequence[tuple[Any, ...]]) -> None:
            values = dict(zip(columns, zip(*batch, strict=True), strict=True))
            writer.write_table(pyarrow.table(values, schema=schema))

        yield write
