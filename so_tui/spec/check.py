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

import contextlib
import math
import os
import re
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from so_tui.spec.errors import InputError, Problem, Problems, nearest, shown
from so_tui.spec.keys import FieldInfo, FieldType, field_index, fields_of
from so_tui.spec.model_table import (
    REGENERATE,
    layer_kinds,
    mixing_kinds,
    packing_problem,
    recurrent_kinds,
    table_problems,
)
from so_tui.spec.run_spec import MACHINE_DECIDES, DataSource, RunSpec

# What speaks against ranks that share sequences, in a spec.


def _sharing_problems(
    model: dict[str, Any], data: dict[str, Any], train: dict[str, Any], gpus: Any
) -> Problems:
    """Yield what speaks against ``train.sequence_parallel``, from sections of a plain tree, of
    whose types nothing is known.
    """
    ranks = train.get("sequence_parallel", 1)
    length = data.get("sequence_length", field_index()["data.sequence_length"].default)
    if not isinstance(ranks, int) or ranks < 2:
        return
    count = len(gpus) if isinstance(gpus, list | tuple) else gpus
    field, value = "train.sequence_parallel", shown(ranks)
    if isinstance(count, int) and count % ranks:
        yield Problem(
            "sequence-parallel-gpus",
            field,
            value,
            f"ranks cannot share each sequence: gpus = {count} is no multiple of it",
            "Choose a divisor of the number of GPUs.",
        )
    elif isinstance(length, int) and length % ranks:
        yield Problem(
            "sequence-parallel-length",
            field,
            value,
            f"cannot divide data.sequence_length = {length}",
            "Choose a divisor of the sequence length.",
        )
    elif train.get("router_loss_coefficient"):
        yield Problem(
            "sequence-parallel-router",
            field,
            value,
            "cannot be combined with a router loss, which is computed over whole sequences",
            "Set train.sequence_parallel to 1, or train.router_loss_coefficient to 0.",
        )
    elif problem := sharing_problem(layer_kinds(section_of(model, "config")), ranks):
        yield problem


def sharing_problem(kinds: Iterable[str], ranks: int) -> Problem | None:
    """Return why ranks cannot share the sequences of a model with layers of these kinds; None if
    they can.
    """
    whole = sorted({*mixing_kinds(kinds), *recurrent_kinds(kinds)})
    if ranks == 1 or not whole:
        return None
    return Problem(
        "sequence-parallel-layers",
        "train.sequence_parallel",
        str(ranks),
        f"the model has layers of {', '.join(whole)}, which would see only a rank's part of a "
        "sequence",
        "Set it to 1.",
    )


# Find values of a plain tree that do not go together. What is wrong with single keys is found in
# ``check``.
#
# Problem codes: several-lengths, no-length: More than one of ``train.steps``, ``epochs`` and
# ``tokens`` is set, or none. several-step-sizes: Both ``gradient_accumulation`` and
# ``tokens_per_step`` are set. missing-architecture: Random weights without ``[model.config]``.
# rope-factor: ``model.rope_factor`` without ``model.rope_scaling``, or the reverse. no-experts: A
# router loss for a model without experts. sequence-parallel-gpus, sequence-parallel-length:
# ``train.sequence_parallel`` does not divide the GPUs, or the sequence length. sequence-parallel-
# layers: A layer of the model is not attention that can be divided among ranks. sequence-parallel-
# router: Ranks that share sequences cannot compute a router loss. nothing-to-offload:
# ``model.activation_offload`` where no layer keeps what it moves. nothing-to-tile:
# ``model.tiled_mlp = "on"`` where no dense feed-forward block is recomputed. published-config:
# ``offload.config`` of DeepSpeed's examples with another engine or mode. padded-packing, padded-
# sequence-parallel: ``data.loss = "padded"`` with rows that are packed or shared. parameter-
# offload: ``offload.parameters = "cpu"`` with an optimizer that keeps the weights on the GPU.
# states-format: ``offload.states`` other than ``"fp32"`` with an optimizer that has no other.
# several-evaluations: Both ``held_out`` and other evaluation data are set. no-evaluation-data: An
# evaluation interval without data to evaluate on.


LENGTHS = ("steps", "epochs", "tokens")
"""Alternative keys of ``[train]`` for the length of the run."""
STEP_SIZES = ("gradient_accumulation", "tokens_per_step")
"""Alternative keys of ``[train]`` for the gradient accumulation steps."""

_EXPERTS = frozenset({"num_experts", "num_local_experts"})
"""Keys of models with experts in ``[model.config]``."""


def _combination_problems(tree: dict[str, Any]) -> Problems:
    """Yield problems of combinations of keys. Single keys may be wrong too, so nothing is assumed
    about their types.
    """
    model, data, train = (section_of(tree, name) for name in ("model", "data", "train"))
    yield from _length_problems(train, section_of(tree, "benchmark"))
    yield from _model_problems(model, train)
    if data.get("packing", True) is True and (
        problem := packing_problem(layer_kinds(section_of(model, "config")))
    ):
        yield problem
    yield from table_problems(model)
    yield from _offload_problems(section_of(tree, "offload"))
    if data.get("held_out") and (data.get("evaluation") or data.get("evaluation_split")):
        yield Problem(
            "several-evaluations",
            "data.held_out",
            shown(data["held_out"]),
            "and data.evaluation both choose the evaluation data",
            "Keep one of them: hold out a part of the data, or name other data.",
        )
    if train.get("evaluate_every_steps") and not any(
        data.get(key) for key in ("held_out", "evaluation", "evaluation_split")
    ):
        yield Problem(
            "no-evaluation-data",
            "train.evaluate_every_steps",
            shown(train["evaluate_every_steps"]),
            "there is nothing to evaluate on",
            "Set data.held_out (0.01 holds out one document in a hundred), or data.evaluation.",
        )
    yield from _sharing_problems(model, data, train, tree.get("gpus", 1))
    yield from _padding_problems(data, train)


def _padding_problems(data: dict[str, Any], train: dict[str, Any]) -> Problems:
    if data.get("loss") != "padded":
        return
    if data.get("packing", True) is True:
        yield Problem(
            "padded-packing",
            "data.loss",
            '"padded"',
            "fills up each row on its own, and data.packing fills a sequence with several",
            "Set data.packing = false too, or another data.loss.",
        )
    if train.get("sequence_parallel", 1) != 1:
        yield Problem(
            "padded-sequence-parallel",
            "data.loss",
            '"padded"',
            "trains rows that ranks cannot share",
            'Set train.sequence_parallel = 1, or data.loss = "all".',
        )


def _length_problems(train: dict[str, Any], benchmark: dict[str, Any]) -> Problems:
    given = [key for key in LENGTHS if isinstance(train.get(key), int | float) and train[key]]
    if len(given) > 1:
        values = ", ".join(f"{key} = {shown(train[key])}" for key in given)
        yield Problem(
            "several-lengths",
            f"train.{given[-1]}",
            shown(train[given[-1]]),
            f"is one of several lengths of the run ({values})",
            "Keep one of train.steps, train.epochs and train.tokens and set the others to 0.",
        )
    elif not any(train.get(key) for key in LENGTHS) and not benchmark.get("measured_steps"):
        yield Problem(
            "no-length",
            "train.steps",
            "",
            "the run has no length",
            "Give one of train.steps, train.epochs and train.tokens (or "
            "benchmark.measured_steps) a value above 0.",
        )
    accumulation, target = train.get("gradient_accumulation"), train.get("tokens_per_step")
    if target and isinstance(accumulation, int) and accumulation > 1:
        yield Problem(
            "several-step-sizes",
            "train.tokens_per_step",
            shown(target),
            "determines the gradient accumulation steps, and so does "
            f"train.gradient_accumulation = {accumulation}",
            "Keep one of the two: set train.tokens_per_step to 0, or leave "
            "train.gradient_accumulation at 1.",
        )


def _model_problems(model: dict[str, Any], train: dict[str, Any]) -> Problems:
    config = section_of(model, "config")
    if model.get("weights") == "random" and not config.get("model_type"):
        yield Problem(
            "missing-architecture",
            "model.config",
            "",
            'weights = "random" needs the architecture of the model',
            "Write [model.config] with `model_type` and the keys of the model's config.json, "
            'or use weights = "pretrained".',
        )
    offload, policy = (
        model.get("activation_offload"),
        model.get("activation_checkpointing", "auto"),
    )
    if offload in ("on", "inputs") and policy == "none":
        yield Problem(
            "nothing-to-offload",
            "model.activation_offload",
            shown(offload),
            "moves the inputs of checkpointed layers, and with activation_checkpointing = "
            '"none" there are none',
            'Set model.activation_checkpointing to "full", "attention" or "selective", or '
            'leave model.activation_offload at "auto".',
        )
    if offload == "attention" and policy not in ("auto", "attention"):
        yield Problem(
            "nothing-to-offload",
            "model.activation_offload",
            shown(offload),
            'moves what activation_checkpointing = "attention" keeps of attention, and that is '
            "not set",
            'Set model.activation_checkpointing to "attention", or model.activation_offload to '
            '"inputs" or "auto".',
        )
    if model.get("tiled_mlp") == "on" and (
        model.get("activation_checkpointing") in ("selective", "none") or _EXPERTS & config.keys()
    ):
        yield Problem(
            "nothing-to-tile",
            "model.tiled_mlp",
            '"on"',
            "cuts dense feed-forward blocks that are recomputed, and this model has none",
            'Leave it at "auto". It needs model.activation_checkpointing = "full" or '
            '"attention", and a model without experts.',
        )
    scaling, factor = model.get("rope_scaling", "model"), model.get("rope_factor", 1)
    if (scaling != "model") != (factor != 1):
        yield Problem(
            "rope-factor",
            "model.rope_factor",
            shown(factor),
            f'does not go with model.rope_scaling = "{scaling}"',
            'Set both: "yarn" or "linear", and a factor above 1; or neither.',
        )
    if train.get("router_loss_coefficient") and config and not _EXPERTS & config.keys():
        yield Problem(
            "no-experts",
            "train.router_loss_coefficient",
            shown(train["router_loss_coefficient"]),
            "the model has no experts",
            "Set it to 0; it balances the load of the experts in a mixture-of-experts model.",
        )


def _offload_problems(offload: dict[str, Any]) -> Problems:
    mode, engine, states = offload.get("mode"), offload.get("engine"), offload.get("states", "fp32")
    if states != "fp32" and (mode == "zerooffload" or engine == "deepspeed"):
        yield Problem(
            "states-format",
            "offload.states",
            shown(states),
            "is not supported by DeepSpeed's optimizers, which have fp32 moments",
            'Use "fp32", or offload.mode = "superoffload" with offload.engine = "so-tui".',
        )
    if offload.get("config", "so-tui") != "so-tui" and (
        engine != "deepspeed" or mode not in ("superoffload", "zerooffload")
    ):
        yield Problem(
            "published-config",
            "offload.config",
            shown(offload["config"]),
            "is a config of DeepSpeed's own SuperOffload or ZeRO-Offload",
            'Set offload.engine = "deepspeed", and offload.mode = "superoffload" or "zerooffload", '
            'or name PRESET:as-published. offload.config = "so-tui" is ours.',
        )
    if offload.get("parameters") == "cpu" and (
        mode == "gpu" or (engine == "deepspeed" and mode != "zerooffload")
    ):
        optimizer = "without offload" if mode == "gpu" else "with DeepSpeed's own SuperOffload"
        yield Problem(
            "parameter-offload",
            "offload.parameters",
            '"cpu"',
            f"is not supported {optimizer}, where the weights stay on the GPU",
            'Use "none", or offload.mode = "superoffload" with offload.engine = "so-tui", or '
            'offload.mode = "zerooffload".',
        )


def section_of(tree: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a section of a plain tree; empty where there is none, or a value in its place."""
    section = tree.get(name)
    return section if isinstance(section, dict) else {}


# Atomic file writes, and checks of paths and their names.


_LONGEST_NAME_BYTES, _LONGEST_PATH_BYTES = 255, 4095
"""Limits of Linux and its common file systems."""


def path_fault(text: str) -> str:
    """Return why a text cannot be a path, or an empty string if it can.

    Even testing whether such a path exists raises an error, so check before.
    """
    try:
        path = os.fsencode(text)
    except UnicodeEncodeError:
        return "contains characters that file names cannot have"
    if len(path) > _LONGEST_PATH_BYTES or max(map(len, path.split(b"/"))) > _LONGEST_NAME_BYTES:
        return "is too long for a file name"
    if b"\0" in path:
        return "contains a NUL character, which file names cannot have"
    try:
        Path(text).expanduser()
    except RuntimeError:
        return "begins with `~` and the name of an unknown user"
    return ""


def exists(path: Path) -> bool:
    """Return whether this user can see a file or folder there. Path's own method raises without
    permission and on a stale handle.
    """
    return os.path.exists(path)  # noqa: PTH110


def is_folder(path: Path) -> bool:
    """Return whether this user can see a folder there. Path's own method raises as for
    ``exists``.
    """
    return os.path.isdir(path)  # noqa: PTH112


def write_atomic(path: Path, content: bytes, *, mode: int = 0o600, overwrite: bool = True) -> None:
    """Replace a file atomically: readers see the old content or the new.

    Args:
        path: The file.
        content: All of its new content.
        mode: Its permissions, less those that the umask takes away.
        overwrite: False raises FileExistsError where there is a file already.

    Raises:
        OSError: If writing fails; the old file is unchanged and no temporary file is left.
    """
    temporary = path.with_name(
        f".{path.name}.{os.urandom(4).hex()}.tmp"
    )  # unique: processes on other hosts may write the same file
    try:
        # With its mode from the beginning: one that is set later leaves a moment in which others
        # may open it.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if overwrite:
            temporary.replace(path)
        else:
            # Unlike a rename, this fails if another process took the name in the meantime.
            os.link(temporary, path)
            temporary.unlink()
    except OSError as error:
        error.filename = error.filename or str(
            path
        )  # an error from a descriptor (disk full) has no file name
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


_MISSING_REMEDIES = {
    "name": "Give a short name of lower-case letters, digits, '.', '_' and '-'.",
    "model": 'Add a section [model] with at least `id`, or extend a preset: extends = "qwen3-14b".',
    "data": (
        'Add a section [data] with at least `source`, or extend a preset: extends = "qwen3-14b".'
    ),
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
    "prometheus.folder": "Give an absolute path.",
    "alerts.command": "Give a program and its arguments, as texts without NUL characters.",
    "alerts.on": "Give names that docs/settings.md lists.",
}
"""What to give where texts must have a certain form."""

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
"""Types of a value that only its range can make wrong. A bool is an int in Python and is excluded
separately.
"""


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
        raise InputError([replace(problem, file=file) for problem in problems])
    return msgspec.convert(tree, RunSpec)


def problems_in(tree: dict[str, Any]) -> tuple[Problem, ...]:
    """Return everything that is wrong with a plain tree; ``Problem.field`` is the dotted path of
    the key.
    """
    problems = tuple(islice(section_problems(tree, RunSpec, field_index()), _MOST_PROBLEMS))
    wrong = {problem.field for problem in problems}
    return problems + tuple(
        problem
        for problem in islice(_combination_problems(tree), _MOST_PROBLEMS)
        if problem.field not in wrong
    )


@cache
def _keys(struct: type[Struct]) -> dict[str, Any]:
    """Return the annotated type of each key; the annotations hold the ranges."""
    hints = get_type_hints(struct, include_extras=True)
    return {name: hints[name] for name in struct.__struct_fields__}


def section_problems(
    tree: dict[str, Any], struct: type[Struct], index: Mapping[str, FieldInfo], prefix: str = ""
) -> Problems:
    """Yield what is wrong with single keys of a plain tree of a struct.

    Args:
        tree: Sections and values as parsed from TOML.
        struct: What the tree is to become.
        index: What is known of the keys, by dotted path.
        prefix: What comes before the tree's keys in these paths.
    """
    keys = _keys(struct)
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if key not in keys:
            known = (*keys, "extends") if struct is RunSpec else tuple(keys)
            yield _unknown(path, value, known, index, prefix)
        elif not (isinstance(keys[key], type) and issubclass(keys[key], Struct)):
            yield from _value_problems(path, value, keys[key], index)
        elif isinstance(value, dict):
            yield from section_problems(value, keys[key], index, f"{path}.")
        else:
            yield Problem(
                "not-a-section",
                path,
                shown(value),
                "is a section and takes no value",
                f"Write [{path}] and its keys below it.",
            )
    for field in msgspec.structs.fields(struct):
        if field.required and field.name not in tree:
            path = f"{prefix}{field.name}"
            remedy = _MISSING_REMEDIES[_SOURCE.sub("data.", path)]
            yield Problem("missing", path, "", "is missing", remedy)


def _unknown(
    path: str, value: Any, known: tuple[str, ...], index: Iterable[str], prefix: str
) -> Problem:
    key = path.removeprefix(prefix)
    where = f"[{prefix[:-1]}]" if prefix else "the top level"
    elsewhere = [full for full in index if full.endswith(f".{key}")]
    hint = f"Did you mean `{elsewhere[0]}`? " if elsewhere else nearest(key, known)
    return Problem(
        "unknown-key",
        path,
        shown(value),
        "is not a known key",
        f"{hint}Keys of {where}: {', '.join(known)}.",
    )


@cache
def _source_index() -> dict[str, FieldInfo]:
    """Return the keys of one source of a mixture (``weight``), by name."""
    return {info.path: info for info in fields_of(DataSource)}


def _value_problems(path: str, value: Any, kind: Any, index: Mapping[str, FieldInfo]) -> Problems:
    if path == "data.source" and value in ([], ()):
        yield Problem("no-data", path, "[]", "names no data", _MISSING_REMEDIES[path])
        return
    if path == "data.source" and isinstance(value, list):
        for number, part in enumerate(value):
            yield from _source_problems(f"{path}[{number}]", part)
        return
    info = _source_index()[_SOURCE.sub("", path)] if _SOURCE.match(path) else index.get(path)
    if not _is_finite(value):
        message = (
            "is not finite"
            if isinstance(value, float)
            else "holds a number that is not finite, which JSON cannot hold"
        )
        yield _value_problem("not-finite", path, value, info, message)
        return
    can_be_path = isinstance(value, str) and _SOURCE.sub("data.", path) in _PATH_KEYS
    if can_be_path and (fault := path_fault(value)):
        what = "a folder" if path == "checkpoint.folder" else "a hub id, a file or a folder"
        yield Problem("invalid-path", path, shown(value), fault, f"Give {what}.")
        return
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        code, message = _fault(info, value, str(error))
        yield _value_problem(code, path, value, info, message)
        return
    if path != "gpus" or not isinstance(value, list | tuple):
        return
    if not value:
        yield Problem(
            "no-gpu",
            path,
            "[]",
            "names no GPU",
            "Give a count (gpus = 1) or a list of indices (gpus = [0, 1]).",
        )
    elif len(set(value)) < len(value):
        yield Problem(
            "repeated-gpu", path, shown(value), "names a GPU twice", "Give each index once."
        )


def _is_finite(value: Any) -> bool:
    """Return whether a value and all that it holds are finite."""
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _source_problems(path: str, part: Any) -> Problems:
    """Yield what is wrong with one source of a mixture."""
    if isinstance(part, dict):
        yield from section_problems(part, DataSource, field_index(), f"{path}.")
        return
    name = part if isinstance(part, str) else "NAME"
    yield Problem(
        "not-a-source",
        path,
        shown(part),
        "is not a source with a weight",
        f'Write {{source = "{name}", weight = 1}}.',
    )


def _fault(info: FieldInfo | None, value: Any, reason: str) -> tuple[str, str]:
    """Return code and message for a value that the type of its key rejects; ``reason`` is the
    library's own.
    """
    if info is None or (
        isinstance(value, list | dict) and (info.takes_list or info.type_name == "table")
    ):
        return "invalid-content", f"has a wrong entry: {reason[0].lower()}{reason[1:]}"
    if info.choices:
        return "invalid-choice", "is not one of the choices"
    types = _PYTHON_TYPES.get(info.type_name, ())
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        return "wrong-type", f"is not {info.expected}"
    # It has the right type, so that its range or length must be wrong.
    if info.path == "name":
        return "invalid-name", "is not a valid name"
    if info.range_text:
        return "out-of-range", "is out of range"
    if value:
        return "invalid-text", "is not a value that this key takes"
    return "empty", "must not be empty"


def _value_problem(
    code: str, path: str, value: Any, info: FieldInfo | None, message: str
) -> Problem:
    """Return a problem whose remedy says what the key takes."""
    if info is None:
        return Problem(code, path, shown(value), message, REGENERATE)
    if info.path in _MISSING_REMEDIES and info.path != "data.source":
        return Problem(code, path, shown(value), message, _MISSING_REMEDIES[info.path])
    if code in ("invalid-text", "invalid-content") and info.path in _TEXT_REMEDIES:
        return Problem(code, path, shown(value), message, _TEXT_REMEDIES[info.path])
    hint = nearest(value, info.choices) if isinstance(value, str) else ""
    default = "" if info.required or info.default in (None, "", (), {}) else shown(info.default)
    if info.path in MACHINE_DECIDES and not info.path.startswith("checkpoint."):
        default = shown("auto")  # the value that stands in the type is only where the search begins
    return Problem(
        code, path, shown(value), message, f"{hint}Give {info.expected}.", default=default
    )
