"""From a plain tree (parsed TOML) to a RunSpec, or to everything that is wrong with it at once."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import cache
from math import prod
from typing import Any, get_type_hints

import msgspec
from msgspec import Struct

from so_tui.spec.errors import InputError, Problem
from so_tui.spec.fields import FieldInfo, field_index, source_index
from so_tui.spec.files import path_fault
from so_tui.spec.types import DataSource, ParameterBlock, RunSpec

LENGTHS = ("steps", "epochs", "tokens")
"""The keys of ``[train]`` of which one gives the length of the run."""
STEP_SIZES = ("gradient_accumulation", "tokens_per_step")
"""The keys of ``[train]`` of which one gives the micro-steps of an optimizer step."""

_MISSING_REMEDIES = {
    "name": "Give a short name of small letters, digits, '.', '_' and '-'.",
    "model": 'Add a section [model] with at least `id`, or extend a preset: extends = "qwen3-14b".',
    "data": 'Add a section [data] with at least `source`, or extend a preset: extends = "qwen3-14b".',
    "model.id": 'Give a hub id such as "Qwen/Qwen3-14B", or a folder.',
    "data.source": 'Give a hub id such as "tatsu-lab/alpaca", a file or a folder.',
}

_PLACES = ("model.id", "model.tokenizer", "data.source", "data.evaluation", "checkpoint.folder")
"""Keys that may hold a path."""

_REGENERATE = "Generate the table again: python -m so_tui_trainer.tools.presets FILE."

_PLAIN_KINDS = frozenset(("gpt_oss", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe", "seed_oss"))
"""Kinds of models whose tensors have the sizes that the config names, whatever else it says."""
_TABLE_SIZES: dict[tuple[str, ...], tuple[str, int]] = {
    ("vocab_size",): ("model.embed_tokens.weight", 0),
    ("hidden_size",): ("model.embed_tokens.weight", 1),
    ("intermediate_size",): ("mlp.down_proj.weight", 1),
    ("num_attention_heads", "head_dim"): ("self_attn.q_proj.weight", 0),
    ("num_key_value_heads", "head_dim"): ("self_attn.k_proj.weight", 0),
}
"""Keys of the shape, and the dimension of a tensor that is their product."""

_SOURCE = re.compile(r"^data\.source\[\d+\]\.")
"""Where the path of a key of a mixture's source begins."""


def check_tree(tree: dict[str, Any], file: str = "") -> RunSpec:
    """The RunSpec of a plain tree. Raises InputError with all problems, each naming ``file`` where one is given."""
    problems = problems_in(tree)
    if problems:
        raise InputError([msgspec.structs.replace(problem, file=file) for problem in problems])
    return msgspec.convert(tree, RunSpec)


def problems_in(tree: dict[str, Any]) -> tuple[Problem, ...]:
    """Everything that is wrong with a plain tree; ``Problem.field`` is the dotted path of the key."""
    problems = tuple(_section_problems(tree, RunSpec, ""))
    wrong = {problem.field for problem in problems}
    return problems + tuple(problem for problem in _cross_problems(tree) if problem.field not in wrong)


def nearest(word: str, known: tuple[str, ...]) -> str:
    """``Did you mean ...? `` for a misspelt word, or nothing when no known word is near."""
    from difflib import get_close_matches

    found = get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return f"Did you mean `{found[0]}`? " if found else ""


def shown(value: Any) -> str:
    """A value as it would be written in TOML, shortened to one line."""
    if isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, str):
        text = f'"{value}"'
    elif isinstance(value, dict):
        text = "{" + ", ".join(value) + "}"
    else:
        text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


@cache
def _keys(struct: type[Struct]) -> dict[str, Any]:
    """Key -> annotated type; ranges stand in the annotations."""
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
                yield Problem(
                    field=path, value=shown(value), message="is a section, not a value", remedy=f"Write [{path}] and its keys below it."
                )
        else:
            yield from _value_problems(path, value, keys[key])
    for key in _required(struct):
        if key not in tree:
            path = f"{prefix}{key}"
            yield Problem(field=path, value="", message="is missing", remedy=_MISSING_REMEDIES[_SOURCE.sub("data.", path)])


def _unknown(path: str, value: Any, known: tuple[str, ...], prefix: str) -> Problem:
    key = path.removeprefix(prefix)
    where = f"[{prefix[:-1]}]" if prefix else "the top level"
    elsewhere = [full for full in field_index() if full.endswith(f".{key}")]
    hint = f"Did you mean `{elsewhere[0]}`? " if elsewhere else nearest(key, known)
    return Problem(field=path, value=shown(value), message="is not a known key", remedy=f"{hint}Keys of {where}: {', '.join(known)}.")


def _value_problems(path: str, value: Any, kind: Any) -> Iterator[Problem]:
    if path == "data.source" and isinstance(value, list):
        for index, part in enumerate(value):
            yield from _source_problems(f"{path}[{index}]", part)
        return
    info = source_index()[_SOURCE.sub("", path)] if _SOURCE.match(path) else field_index().get(path)
    if isinstance(value, float) and not math.isfinite(value):
        yield Problem(field=path, value=shown(value), message="is not finite", remedy=_remedy(info, value))
        return
    if isinstance(value, str) and _SOURCE.sub("data.", path) in _PLACES and (fault := path_fault(value)):
        what = "a folder" if path == "checkpoint.folder" else "a name on the hub, a file or a folder"
        yield Problem(field=path, value=shown(value), message=fault, remedy=f"Give {what}.")
        return
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        yield Problem(field=path, value=shown(value), message=_message(info, value, str(error)), remedy=_remedy(info, value))


def _source_problems(path: str, part: Any) -> Iterator[Problem]:
    """What is wrong with one source of a mixture."""
    if isinstance(part, dict):
        yield from _section_problems(part, DataSource, f"{path}.")
        return
    name = part if isinstance(part, str) else "NAME"
    remedy = f'Write {{source = "{name}", weight = 1}}.'
    yield Problem(field=path, value=shown(part), message="is not a source with its weight", remedy=remedy)


def _message(info: FieldInfo | None, value: Any, error: str) -> str:
    if info is None or (isinstance(value, list | dict) and (info.takes_list or info.type_name == "table")):
        return f"is wrong inside: {error[0].lower()}{error[1:]}"
    if info.choices:
        return "is not one of the choices"
    if not error.partition(" - at")[0].count(", got"):
        if info.path == "name":
            return "is not a valid name"
        return "is out of range" if info.range_text else "must not be empty"
    return f"is not {info.expected}"


def _remedy(info: FieldInfo | None, value: Any) -> str:
    if info is None:
        return _REGENERATE
    if info.path in _MISSING_REMEDIES and info.path != "data.source":
        return _MISSING_REMEDIES[info.path]
    hint = nearest(value, info.choices) if isinstance(value, str) else ""
    default = "" if info.required or info.default in (None, "", (), {}) else f" The default is {shown(info.default)}."
    return f"{hint}Give {info.expected}.{default}"


def _cross_problems(tree: dict[str, Any]) -> Iterator[Problem]:
    """What no single key shows. Reads defensively: the keys themselves may be wrong."""
    model, train, offload, benchmark = (_section(tree, name) for name in ("model", "train", "offload", "benchmark"))
    yield from _length_problems(train, benchmark)
    accumulation, target = train.get("gradient_accumulation"), train.get("tokens_per_step")
    if target and isinstance(accumulation, int) and accumulation > 1:
        yield Problem(
            field="train.tokens_per_step",
            value=shown(target),
            message=f"decides the accumulation, and train.gradient_accumulation = {accumulation} does too",
            remedy="Keep one of the two: set train.tokens_per_step to 0 or leave train.gradient_accumulation at 1.",
        )
    if model.get("weights") == "random" and not _section(model, "config").get("model_type"):
        yield Problem(
            field="model.config",
            value="",
            message='weights = "random" needs the shape of the model',
            remedy='Write [model.config] with `model_type` and the keys of the model\'s config.json, or use weights = "pretrained".',
        )
    shape = _section(model, "config")
    if train.get("router_loss_coefficient") and shape and not {"num_experts", "num_local_experts"} & shape.keys():
        yield Problem(
            field="train.router_loss_coefficient",
            value=shown(train["router_loss_coefficient"]),
            message="the model has no experts",
            remedy="Set it to 0; it balances the load of the experts in a mixture-of-experts model.",
        )
    yield from _table_problems(model)
    if offload.get("parameters") == "cpu":
        yield Problem(
            field="offload.parameters",
            value='"cpu"',
            message="is refused: SuperOffload and this program's own engine keep the bf16 weights on the GPU",
            remedy='Use "none". If the weights do not fit, train on more GPUs: each holds its share of them.',
        )
    data = _section(tree, "data")
    if data.get("held_out") and (data.get("evaluation") or data.get("evaluation_split")):
        yield Problem(
            field="data.held_out",
            value=shown(data["held_out"]),
            message="and data.evaluation both say what to evaluate on",
            remedy="Keep one of them: hold out a part of the data, or name other data.",
        )
    if train.get("evaluate_every_steps") and not any(data.get(key) for key in ("held_out", "evaluation", "evaluation_split")):
        yield Problem(
            field="train.evaluate_every_steps",
            value=shown(train["evaluate_every_steps"]),
            message="there is nothing to evaluate on",
            remedy="Set data.held_out (0.01 holds out one document in a hundred), or data.evaluation.",
        )
    gpus = tree.get("gpus")
    if isinstance(gpus, list | tuple):
        if not gpus:
            yield Problem(
                field="gpus", value="[]", message="names no GPU", remedy="Give a count (gpus = 1) or a list of indices (gpus = [0, 1])."
            )
        elif len(set(map(str, gpus))) < len(gpus):
            yield Problem(field="gpus", value=shown(gpus), message="names a GPU twice", remedy="Give each index once.")
    if _section(tree, "data").get("source") in ([], ()):
        yield Problem(field="data.source", value="[]", message="names no data", remedy=_MISSING_REMEDIES["data.source"])


def _table_problems(model: dict[str, Any]) -> Iterator[Problem]:
    """What is wrong with a parameter table that is one by its types."""
    try:
        blocks = msgspec.convert(model.get("parameters", ()), tuple[ParameterBlock, ...])
    except msgspec.ValidationError:  # told with the key itself
        return
    for number, block in enumerate(blocks, 1):
        if not block.tensors:
            yield _table_problem("", f"has no tensors in block {number}")
    tensors = [(block, tensor) for block in blocks for tensor in block.tensors]
    for _, tensor in tensors:
        if any(size < 1 for size in tensor.shape):
            yield _table_problem(tensor.name, f"has a dimension below 1 ({', '.join(map(str, tensor.shape))})")
    if any(tensor.tied for _, tensor in tensors):
        repeats = ((tensor, index) for block, tensor in tensors for index in range(block.first, block.first + block.repeat))
        own = {tensor.name.replace("{i}", str(index)) for tensor, index in repeats if not tensor.tied}
        for _, tensor in tensors:
            if tensor.tied and tensor.tied not in own:
                yield _table_problem(tensor.name, f"is tied to {tensor.tied}, which is no tensor with storage of its own")

    if not model.get("trust_remote_code"):
        yield from _other_shape_problems(_section(model, "config"), blocks)


def _other_shape_problems(shape: dict[str, Any], blocks: tuple[ParameterBlock, ...]) -> Iterator[Problem]:
    """Keys of ``[model.config]`` that were changed after the table was made, where the kind of model leaves no doubt about it."""
    if shape.get("model_type") not in _PLAIN_KINDS:
        return
    sizes = {tensor.name.removeprefix("model.layers.{i}."): tensor.shape for block in blocks for tensor in block.tensors}
    layered = [block for block in blocks if any(tensor.name.startswith("model.layers.{i}.") for tensor in block.tensors)]
    made_for: dict[tuple[str, ...], int] = {("num_hidden_layers",): sum(block.repeat for block in layered)}
    for keys, (name, dimension) in _TABLE_SIZES.items():
        if len(sizes.get(name, ())) == 2:
            made_for[keys] = sizes[name][dimension]
    for keys, size in made_for.items():
        values = [value for key in keys if type(value := shape.get(key)) is int]
        if size and len(values) == len(keys) and prod(values) != size:
            yield Problem(
                field=f"model.config.{keys[0]}",
                value=shown(values[0]),
                message=f"[[model.parameters]] was made for another shape ({' x '.join(keys)} = {size})",
                remedy=_REGENERATE,
            )


def _table_problem(name: str, message: str) -> Problem:
    return Problem(field="model.parameters", value=shown(name) if name else "", message=message, remedy=_REGENERATE)


def _length_problems(train: dict[str, Any], benchmark: dict[str, Any]) -> Iterator[Problem]:
    given = [key for key in LENGTHS if isinstance(train.get(key), int | float) and train[key]]
    if len(given) > 1:
        values = ", ".join(f"{key} = {shown(train[key])}" for key in given)
        yield Problem(
            field=f"train.{given[-1]}",
            value=shown(train[given[-1]]),
            message=f"is one of several lengths of the run ({values})",
            remedy="Keep one of train.steps, train.epochs and train.tokens and set the others to 0.",
        )
    elif not any(train.get(key) for key in LENGTHS) and not benchmark.get("measured_steps"):
        yield Problem(
            field="train.steps",
            value="",
            message="the run has no length",
            remedy="Give one of train.steps, train.epochs and train.tokens (or benchmark.measured_steps) a value above 0.",
        )


def _section(tree: dict[str, Any], name: str) -> dict[str, Any]:
    section = tree.get(name)
    return section if isinstance(section, dict) else {}
