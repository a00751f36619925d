"""Convert a plain tree (parsed TOML) to a RunSpec, or report everything that is wrong with it.

Problem codes of single keys:
    unknown-key: The key does not exist; the nearest known key is named.
    not-a-section: A section was given as a value.
    missing: A required key or section is absent.
    wrong-type: The value has another type than the key takes.
    out-of-range: The value is a number outside the range of the key.
    not-finite: The value is NaN or infinite.
    invalid-choice: The value is not one of the choices of the key.
    invalid-name: The name has characters that names may not have.
    invalid-path: The text cannot be a path.
    invalid-content: An entry of a list or table is wrong.
    empty: The value is empty and must not be.
    not-a-source: An entry of a mixture is not ``{source, weight}``.
    no-gpu, repeated-gpu: The list of GPUs is empty, or names one twice.
    no-data: The list of data sources is empty.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Any, get_type_hints

import msgspec
from msgspec import Struct

from so_tui.spec.combinations import combination_problems
from so_tui.spec.errors import InputError, Problem
from so_tui.spec.fields import FieldInfo, FieldType, field_index, source_index
from so_tui.spec.files import path_fault
from so_tui.spec.sections.data import DataSource
from so_tui.spec.table import REGENERATE
from so_tui.spec.types import RunSpec
from so_tui.spec.wording import nearest, shown

_MISSING_REMEDIES = {
    "name": "Give a short name of lower-case letters, digits, '.', '_' and '-'.",
    "model": 'Add a section [model] with at least `id`, or extend a preset: extends = "qwen3-14b".',
    "data": 'Add a section [data] with at least `source`, or extend a preset: extends = "qwen3-14b".',
    "model.id": 'Give a hub id such as "Qwen/Qwen3-14B", or a folder.',
    "data.source": 'Give a hub id such as "tatsu-lab/alpaca", a file or a folder.',
}

_NAME_REMEDY = "Give at most 64 letters, digits, '.', '_', '-' and '@', without spaces."
_TEXT_REMEDIES = {
    "slurm.partition": "Give at most 64 letters, digits, '.', '_' and '-', without spaces.",
    "slurm.account": _NAME_REMEDY,
    "slurm.qos": _NAME_REMEDY,
    "slurm.time_limit": "Give minutes, HH:MM:SS or D-HH.",
    "slurm.constraint": "Give names of features, joined by '&', '|' or ',', without spaces.",
    "slurm.site": "Give lower-case letters, digits and '-'.",
}
"""What to give where a text must have a certain form."""

_PATH_KEYS = ("model.id", "model.tokenizer", "data.source", "data.evaluation", "checkpoint.folder")
"""Keys whose value may be a path."""

_SOURCE = re.compile(r"^data\.source\[\d+\]\.")
"""Prefix of the keys of one source of a mixture."""

_MOST_PROBLEMS = 50
"""Problems of one tree that are reported; a file of random keys would have a hundred thousand."""
_PYTHON_TYPES: dict[FieldType, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "text": (str,),
    "boolean": (bool,),
}
"""Types of a value that only its range can make wrong. A bool is an int in Python and is excluded separately."""


def check_tree(tree: dict[str, Any], file: str = "") -> RunSpec:
    """Return the RunSpec of a plain tree.

    Args:
        tree: Sections and values as parsed from TOML.
        file: File that the tree comes from, to name in the problems.

    Raises:
        InputError: With all problems of the tree.
    """
    problems = problems_in(tree)
    if problems:
        raise InputError([msgspec.structs.replace(problem, file=file) for problem in problems])
    return msgspec.convert(tree, RunSpec)


def problems_in(tree: dict[str, Any]) -> tuple[Problem, ...]:
    """Return everything that is wrong with a plain tree; ``Problem.field`` is the dotted path of the key."""
    problems = tuple(islice(_section_problems(tree, RunSpec, ""), _MOST_PROBLEMS))
    wrong = {problem.field for problem in problems}
    return problems + tuple(
        problem
        for problem in islice(combination_problems(tree), _MOST_PROBLEMS)
        if problem.field not in wrong
    )


@cache
def _keys(struct: type[Struct]) -> dict[str, Any]:
    """Return the annotated type of each key; the annotations hold the ranges."""
    hints = get_type_hints(struct, include_extras=True)
    return {name: hints[name] for name in struct.__struct_fields__}


@cache
def _required(struct: type[Struct]) -> tuple[str, ...]:
    return tuple(field.name for field in msgspec.structs.fields(struct) if field.required)


def _section_problems(tree: dict[str, Any], struct: type[Struct], prefix: str) -> Iterator[Problem]:
    keys = _keys(struct)
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if key not in keys:
            yield _unknown(path, value, tuple(keys) if prefix else (*keys, "extends"), prefix)
        elif isinstance(keys[key], type) and issubclass(keys[key], Struct):
            if isinstance(value, dict):
                yield from _section_problems(value, keys[key], f"{path}.")
            else:
                remedy = f"Write [{path}] and its keys below it."
                yield Problem(
                    code="not-a-section",
                    field=path,
                    value=shown(value),
                    message="is a section and takes no value",
                    remedy=remedy,
                )
        else:
            yield from _value_problems(path, value, keys[key])
    for key in _required(struct):
        if key not in tree:
            path = f"{prefix}{key}"
            remedy = _MISSING_REMEDIES[_SOURCE.sub("data.", path)]
            yield Problem(code="missing", field=path, value="", message="is missing", remedy=remedy)


def _unknown(path: str, value: Any, known: tuple[str, ...], prefix: str) -> Problem:
    key = path.removeprefix(prefix)
    where = f"[{prefix[:-1]}]" if prefix else "the top level"
    elsewhere = [full for full in field_index() if full.endswith(f".{key}")]
    hint = f"Did you mean `{elsewhere[0]}`? " if elsewhere else nearest(key, known)
    remedy = f"{hint}Keys of {where}: {', '.join(known)}."
    return Problem(
        code="unknown-key",
        field=path,
        value=shown(value),
        message="is not a known key",
        remedy=remedy,
    )


def _value_problems(path: str, value: Any, kind: Any) -> Iterator[Problem]:
    if path == "data.source" and value in ([], ()):
        remedy = _MISSING_REMEDIES["data.source"]
        yield Problem(
            code="no-data", field="data.source", value="[]", message="names no data", remedy=remedy
        )
        return
    if path == "data.source" and isinstance(value, list):
        for index, part in enumerate(value):
            yield from _source_problems(f"{path}[{index}]", part)
        return
    info = source_index()[_SOURCE.sub("", path)] if _SOURCE.match(path) else field_index().get(path)
    if not _is_finite(value):
        message = (
            "is not finite"
            if isinstance(value, float)
            else "holds a number that is not finite, which JSON cannot hold"
        )
        yield _value_problem("not-finite", path, value, info, message)
        return
    if (
        isinstance(value, str)
        and _SOURCE.sub("data.", path) in _PATH_KEYS
        and (fault := path_fault(value))
    ):
        what = "a folder" if path == "checkpoint.folder" else "a hub id, a file or a folder"
        yield Problem(
            code="invalid-path",
            field=path,
            value=shown(value),
            message=fault,
            remedy=f"Give {what}.",
        )
        return
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        code, message = _fault(info, value, str(error))
        yield _value_problem(code, path, value, info, message)
    else:
        if path == "gpus" and isinstance(value, list | tuple):
            yield from _gpu_problems(value)


def _is_finite(value: Any) -> bool:
    """Return whether a value and all that it holds are finite."""
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _gpu_problems(gpus: Sequence[int]) -> Iterator[Problem]:
    """Yield what is wrong with a list of indices of GPUs."""
    if not gpus:
        remedy = "Give a count (gpus = 1) or a list of indices (gpus = [0, 1])."
        yield Problem(
            code="no-gpu", field="gpus", value="[]", message="names no GPU", remedy=remedy
        )
    elif len(set(gpus)) < len(gpus):
        yield Problem(
            code="repeated-gpu",
            field="gpus",
            value=shown(gpus),
            message="names a GPU twice",
            remedy="Give each index once.",
        )


def _source_problems(path: str, part: Any) -> Iterator[Problem]:
    """Yield what is wrong with one source of a mixture."""
    if isinstance(part, dict):
        yield from _section_problems(part, DataSource, f"{path}.")
        return
    name = part if isinstance(part, str) else "NAME"
    remedy = f'Write {{source = "{name}", weight = 1}}.'
    yield Problem(
        code="not-a-source",
        field=path,
        value=shown(part),
        message="is not a source with a weight",
        remedy=remedy,
    )


def _fault(info: FieldInfo | None, value: Any, reason: str) -> tuple[str, str]:
    """Return code and message for a value that the type of its key rejects; ``reason`` is the library's own."""
    if info is None or (
        isinstance(value, list | dict) and (info.takes_list or info.type_name == "table")
    ):
        return "invalid-content", f"has a wrong entry: {reason[0].lower()}{reason[1:]}"
    if info.choices:
        return "invalid-choice", "is not one of the choices"
    if not _has_type(info, value):
        return "wrong-type", f"is not {info.expected}"
    if info.path == "name":
        return "invalid-name", "is not a valid name"
    if info.range_text:
        return "out-of-range", "is out of range"
    return (
        ("invalid-text", "is not a value that this key takes")
        if value
        else ("empty", "must not be empty")
    )


def _has_type(info: FieldInfo, value: Any) -> bool:
    """Return whether a value has the right type, so that its range or length must be wrong."""
    types = _PYTHON_TYPES.get(info.type_name, ())
    return isinstance(value, types) and (bool in types or not isinstance(value, bool))


def _value_problem(
    code: str, path: str, value: Any, info: FieldInfo | None, message: str
) -> Problem:
    """Return a problem whose remedy says what the key takes."""
    if info is None:
        return Problem(
            code=code, field=path, value=shown(value), message=message, remedy=REGENERATE
        )
    if info.path in _MISSING_REMEDIES and info.path != "data.source":
        return Problem(
            code=code,
            field=path,
            value=shown(value),
            message=message,
            remedy=_MISSING_REMEDIES[info.path],
        )
    if code == "invalid-text" and info.path in _TEXT_REMEDIES:
        return Problem(
            code=code,
            field=path,
            value=shown(value),
            message=message,
            remedy=_TEXT_REMEDIES[info.path],
        )
    hint = nearest(value, info.choices) if isinstance(value, str) else ""
    default = "" if info.required or info.default in (None, "", (), {}) else shown(info.default)
    return Problem(
        code=code,
        field=path,
        value=shown(value),
        message=message,
        remedy=f"{hint}Give {info.expected}.",
        default=default,
    )
