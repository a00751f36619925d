"""Turn the errors of ``datasets`` and the hub client into problems with a code and a remedy.

``datasets`` raises plain ValueErrors for many different mistakes, so their texts are matched here, and nowhere else.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from so_tui.spec import DataSource, Problem, resolve_source
from so_tui.spec.files import exists
from so_tui_trainer.data.readers import files_read, is_saved_dataset, looks_like_path
from so_tui_trainer.data.rows import bad_row

NOT_UTF8_REMEDY = "Save the file as UTF-8."
_NO_ROWS_SELECTED = re.compile(r"corresponds to no data")
_BAD_SUBSET = re.compile(r"config name is missing|builderconfig")
_BAD_SPLIT = re.compile(
    r"unknown split|bad split|no split|unrecognized instruction|slice boundar|corresponds to no data"
)
_MISSING_ZSTD = re.compile(r"zstd|zstandard")


def source_problem(source: DataSource, code: str, message: str, remedy: str) -> Problem:
    """Return a problem of ``data.source``."""
    return Problem(
        code=code, field="data.source", value=source.source, message=message, remedy=remedy
    )


def empty_source(source: DataSource) -> Problem:
    """Return the problem of a source without rows."""
    return source_problem(
        source,
        "data-source-empty",
        "has no rows",
        f"Add rows, or choose another split than {source.split}.",
    )


def unreadable_source(source: DataSource, error: Exception) -> Problem:
    """Explain why a source cannot be opened.

    Args:
        source: The source that was opened.
        error: The exception of ``datasets``, the hub client or the file system.
    """
    reason = _reason(error)
    text = reason.lower()
    if _BAD_SUBSET.search(text):
        message = f"{source.source}: {reason}"
        return Problem(
            code="data-subset-unknown",
            field="data.subset",
            value=source.subset,
            message=message,
            remedy="Name one of its subsets.",
        )
    no_rows = _NO_ROWS_SELECTED.search(text) is not None
    if no_rows and "[" not in source.split:
        return empty_source(source)
    if _BAD_SPLIT.search(text):
        code, message = (
            ("data-split-empty", "selects no rows")
            if no_rows
            else ("data-split-unknown", reason.rstrip("."))
        )
        return Problem(
            code=code,
            field="data.split",
            value=source.split,
            message=message,
            remedy=f"Name a split of {source.source}.",
        )
    code, remedy = _classify(source, error, text)
    return source_problem(source, code, f"cannot be read ({reason})", remedy)


def _classify(source: DataSource, error: Exception, text: str) -> tuple[str, str]:
    """Return the code and the remedy of a source that exists but cannot be read, or does not exist."""
    names = {type(cause).__name__ for cause in _causes(error)}
    if "RecursionError" in names:
        return (
            "data-row-too-deep",
            "Remove the rows with lists or objects that are nested hundreds of levels deep.",
        )
    if "UnicodeDecodeError" in names:
        return "data-not-utf8", NOT_UTF8_REMEDY
    if _MISSING_ZSTD.search(text):
        return "data-needs-zstandard", "Install the package zstandard, or decompress the file."
    found = exists(Path(resolve_source(source.source)).expanduser())
    if looks_like_path(source.source) or found:
        code = "data-source-unreadable" if found else "data-source-missing"
        return (
            code,
            "Name a JSON, JSONL, Parquet, CSV or TSV file, or a folder whose files have one layout.",
        )
    if "GatedRepoError" in names or _is_denied(error):
        return (
            "hub-access-denied",
            "Accept its terms on the hub, then log in with `hf auth login` (or set HF_TOKEN).",
        )
    return (
        "data-source-unreadable",
        "Check the name on the hub and the network, or download it first with `so-tui fetch`.",
    )


def _is_denied(error: BaseException) -> bool:
    """Return whether the hub refused a request because of who asked."""
    responses = (getattr(cause, "response", None) for cause in _causes(error))
    return any(getattr(response, "status_code", None) in (401, 403) for response in responses)


def unwritable_cache(error: BaseException) -> Problem | None:
    """Return the problem of a cache folder that cannot be written.

    Args:
        error: The exception that opening a source raised.

    Returns:
        None if the error comes from elsewhere.
    """
    import datasets
    from huggingface_hub import constants

    error = _root_cause(error)
    if not isinstance(error, OSError):
        return None
    variables = {
        Path(datasets.config.HF_DATASETS_CACHE): ("HF_DATASETS_CACHE", "HF_HOME"),
        Path(constants.HF_HUB_CACHE): ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME"),
    }
    if error.filename:
        folders = [
            folder for folder in variables if _is_related(Path(os.fsdecode(error.filename)), folder)
        ]
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        # Nothing else is written. The error does not name the folder, so take the one with the least space.
        folders = sorted(variables, key=_free_bytes)
    else:
        folders = []
    if not folders:
        return None
    variable = next(
        (name for name in variables[folders[0]] if name in os.environ), "XDG_CACHE_HOME"
    )
    return Problem(
        code="cache-unwritable",
        field=variable,
        value=str(folders[0]),
        message=f"cannot be written ({error.strerror})",
        remedy=f"Free some space there, or set {variable} to a folder that you may write to.",
    )


def raise_for_bad_json(path: Path, source: DataSource) -> None:
    """Look for the first row that is not a JSON object; return if there is none.

    Args:
        path: The file or folder of the source; a hub id is ignored.
        source: The source, for the names of the files in the error.

    Raises:
        InputError: Names the file and the row.
    """
    import datasets

    if path.is_file():
        _check_rows(path, source.source)
    elif path.is_dir() and not is_saved_dataset(path):
        try:
            files = sorted(files_read(path, source.subset))
        except (OSError, ValueError, datasets.exceptions.DatasetsError):
            return  # The files cannot even be listed, which the caller reports.
        for file in files:
            _check_rows(file, str(Path(source.source) / file.relative_to(path.resolve())))


def _check_rows(path: Path, name: str) -> None:
    if path.suffix.lower() not in (".jsonl", ".ndjson", ".json"):
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        if file.read(1) == "[":
            return  # One list: the reader's own message names the position.
        file.seek(0)
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line) if line.strip() else {}
            except json.JSONDecodeError as error:
                message = (
                    f"is not JSON ({error.msg.removesuffix(' at')} at character {error.colno})"
                )
                raise bad_row("data-row-not-json", name, number, message) from error
            except RecursionError as error:
                raise bad_row("data-row-too-deep", name, number, "is nested too deeply") from error
            except ValueError as error:  # Python converts integers of up to 4,300 digits
                raise bad_row(
                    "data-number-too-long", name, number, "has a number of thousands of digits"
                ) from error
            if not isinstance(row, dict):
                raise bad_row("data-row-not-object", name, number, "is not a JSON object")


def _is_related(path: Path, folder: Path) -> bool:
    """Return whether one of the paths contains the other."""
    return path == folder or folder in path.parents or path in folder.parents


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(
        next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    ).free


def _reason(error: BaseException) -> str:
    """Return the message of the root cause in one line of at most 300 characters."""
    error = _root_cause(error)
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines)[:300] if lines else type(error).__name__


def _root_cause(error: BaseException) -> BaseException:
    """Unwrap the DatasetGenerationError that ``datasets`` raises around the error of a reader."""
    while (
        type(error).__name__ == "DatasetGenerationError"
        and (error.__cause__ or error.__context__) is not None
    ):
        error = error.__cause__ or error.__context__ or error
    return error


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the errors that led to it."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
