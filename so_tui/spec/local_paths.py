"""Local paths in a spec: recognised without asking the hub, made absolute, and checked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from so_tui.spec.errors import Problem
from so_tui.spec.files import exists
from so_tui.spec.sections.data import DataSource
from so_tui.spec.types import RunSpec

_DATA_SUFFIXES = (
    ".json",
    ".jsonl",
    ".ndjson",
    ".parquet",
    ".csv",
    ".tsv",
    ".txt",
    ".gz",
    ".zst",
    ".arrow",
)
_BUILTIN = "builtin:"


def with_absolute_paths(spec: RunSpec) -> RunSpec:
    """Return the spec with relative paths made absolute: runs, resumes and saved presets begin in other folders."""
    model = msgspec.structs.replace(
        spec.model, id=_absolute(spec.model.id), tokenizer=_absolute(spec.model.tokenizer)
    )
    source: str | tuple[DataSource, ...]
    if isinstance(spec.data.source, str):
        source = _absolute(spec.data.source)
    else:
        source = tuple(
            msgspec.structs.replace(part, source=_absolute(part.source))
            for part in spec.data.source
        )
    folder = spec.checkpoint.folder and str(Path(spec.checkpoint.folder).expanduser().absolute())
    return msgspec.structs.replace(
        spec,
        model=model,
        data=msgspec.structs.replace(
            spec.data, source=source, evaluation=_absolute(spec.data.evaluation)
        ),
        checkpoint=msgspec.structs.replace(spec.checkpoint, folder=folder),
    )


def missing_paths(spec: RunSpec) -> Iterator[Problem]:
    """Yield a problem (code ``path-not-found``) for each model, tokenizer or data path of the spec that does not exist."""
    for field, text in _named(spec):
        if _is_path(text) and not exists(Path(text).expanduser()):
            remedy = "Check the path. A name on the hub has the form owner/name."
            message = "there is no such file or folder, or you may not see it"
            yield Problem(
                code="path-not-found", field=field, value=text, message=message, remedy=remedy
            )


def _named(spec: RunSpec) -> Iterator[tuple[str, str]]:
    yield "model.id", spec.model.id
    yield "model.tokenizer", spec.model.tokenizer
    yield "data.evaluation", spec.data.evaluation
    if isinstance(spec.data.source, str):
        yield "data.source", spec.data.source
    else:
        yield from (
            (f"data.source[{index}].source", part.source)
            for index, part in enumerate(spec.data.source)
        )


def _is_path(text: str) -> bool:
    """Return whether a text can only be a path: it is written as one, or ends like a data file, which no hub name does."""
    written_as_path = (
        text.startswith(("/", "./", "../", "~"))
        or text.count("/") > 1
        or text.endswith(_DATA_SUFFIXES)
    )
    return written_as_path and not text.startswith(_BUILTIN)


def _absolute(text: str) -> str:
    if not text or text.startswith(_BUILTIN):
        return text
    path = Path(text).expanduser()
    return str(path.absolute()) if _is_path(text) or exists(path) else text
