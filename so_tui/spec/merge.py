"""Combine plain trees: a preset over its base, ``--set`` over a spec, and the differences of a spec
from its base.

Problem codes:
    unknown-key: ``--set`` names a key that does not exist.
    not-text: A value of ``--set`` is not UTF-8 text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from so_tui.spec.check import LENGTHS, STEP_SIZES, check_tree, problems_in, section_of
from so_tui.spec.errors import InputError, Problem, nearest, shown
from so_tui.spec.keys import KEYS_MEANT, FieldInfo, field_index
from so_tui.spec.run_spec import MACHINE_DECIDES, SPLIT, DataSpec, ModelSpec, RunSpec
from so_tui.trust.decoding import Tree, decode_toml

_FREE_TABLE = "model.config."
"""Keys below this prefix are those of a Hugging Face config.json."""
_SEPARATOR = re.compile("[,_ \u00a0\u2009\u202f]")
_GROUPED = re.compile(rf"[+-]?\d{{1,3}}({_SEPARATOR.pattern})\d{{3}}(\1\d{{3}})*(\.\d+)?", re.ASCII)
"""Numbers with their thousands grouped, by one kind of separator: the first group says which."""
_OF_A_SOURCE = ("subset", "split", "format")
_AUTO = "auto"
"""The value that leaves a key to the machine."""
_WANTED = ("gpus", *SPLIT)
"""Keys that say what is wanted even where the machine decides: a number of GPUs to begin with, and
the sequences of a step.
"""


def of_a_source(data_format: object) -> tuple[str, ...]:
    """Return the keys of ``[data]`` that describe the source, and say nothing of another one. A
    format of one use says what to make of any rows, and is none of them.
    """
    return _OF_A_SOURCE[:2] if data_format == "alpaca-deepspeed" else _OF_A_SOURCE


def spec_tree(spec: RunSpec, *, full: bool = True) -> Tree:
    """Return the spec as plain values without defaults, which ``check_tree`` accepts.

    Args:
        spec: The spec to convert.
        full: False also leaves out ``model.config`` and ``model.parameters``, for people to read.
    """
    tree = differences(complete_tree(spec), _defaults())
    if not full:
        for key in ("config", "parameters"):
            tree["model"].pop(key, None)
    return tree


def complete_tree(spec: RunSpec) -> Tree:
    """Return the spec as plain values, including defaults."""
    tree: Tree = msgspec.to_builtins(spec)
    return tree


def with_values(spec: RunSpec, values: Mapping[str, str]) -> RunSpec:
    """Return the spec with some values changed, as ``--set`` does.

    Setting one of ``train.steps``, ``epochs`` and ``tokens`` clears the other two, and
    ``benchmark.measured_steps``; so it is with ``gradient_accumulation`` and ``tokens_per_step``.
    Changing ``model.config`` drops the parameter table, which describes the previous architecture,
    and changing ``data.source`` what describes the previous source: subset, split and format (but
    ``alpaca-deepspeed`` stays). What the machine decides is fixed by a value, and left to it again
    by ``auto``.

    Args:
        spec: The spec to change.
        values: Values by dotted key. A value is parsed as TOML; text that is not TOML is taken
            literally, ``0,1`` as a list.

    Raises:
        InputError: With all problems of the result.
    """
    changes: Tree = {}
    problems = []
    for path, text in values.items():
        if path not in field_index() and not path.startswith(_FREE_TABLE):
            problems.append(_unknown_path(path, text))
            continue
        try:
            text.encode()
        except UnicodeEncodeError:  # bytes of the command line became lone surrogates
            problems.append(
                Problem(
                    "not-text", path, shown(text), "is not UTF-8 text", "Write the value as UTF-8."
                )
            )
            continue
        *sections, key = path.split(".")
        section = changes
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = parse_value(text, field_index().get(path))
    tree = set_over(complete_tree(spec), changes)
    if problems:
        raise InputError([*problems, *problems_in(tree)])
    return check_tree(tree)


def parse_value(text: str, info: FieldInfo | None) -> Any:
    """Parse the text of a ``--set`` option or a form field, guided by the type of its field."""
    kind, takes_list = (info.type_name, info.takes_list) if info else ("", False)
    if kind in ("text", "choice") and not (takes_list and text.lstrip().startswith("[")):
        return _unquoted(text)
    if kind in ("integer", "number") and not takes_list and _GROUPED.fullmatch(text.strip()):
        # Thousands are grouped as people write them: ``16,384`` or ``16 384``.
        text = _SEPARATOR.sub("", text.strip())
    value = _toml_value(text)
    if takes_list and isinstance(value, str) and "," in value:
        parts = value.strip().removesuffix(",").split(",")
        return [_toml_value(part.strip()) for part in parts]
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def merged(base: Tree, changes: Tree) -> Tree:
    """Return ``base`` with ``changes`` applied section by section; lists and values are replaced as
    a whole.
    """
    tree = _overlaid(base, changes)
    changed = section_of(changes, "train")
    for alternatives in (LENGTHS, STEP_SIZES):
        if sum(bool(changed.get(key)) for key in alternatives) == 1:
            for key in set(alternatives) - set(changed):
                tree["train"].pop(key, None)
    measured = "measured_steps" in section_of(changes, "benchmark")
    if any(changed.get(key) for key in LENGTHS) and not measured:
        section_of(tree, "benchmark").pop("measured_steps", None)
    described = section_of(changes, "data")
    if "source" in described and described["source"] != section_of(base, "data").get("source"):
        former = section_of(base, "data").get("format")
        for key in set(of_a_source(former)) - set(described):
            tree["data"].pop(key, None)
    model = section_of(changes, "model")
    old, new = (section_of(each, "model").get("config") for each in (base, tree))
    if "config" in model and "parameters" not in model and old != new:
        tree["model"].pop("parameters", None)
    return tree


def set_over(base: Tree, changes: Tree) -> Tree:
    """Return ``base`` with what a person changed, as ``merged``, and with the keys that are fixed
    then: those that the machine would decide, and that have a value other than ``auto``.
    """
    asked = changes.get("fixed", base.get("fixed", ()))
    if not isinstance(asked, list | tuple) or not all(isinstance(key, str) for key in asked):
        return merged(base, changes)  # ``check_tree`` says what is wrong
    values = {
        key: value for key in MACHINE_DECIDES if (value := value_at(changes, key)) is not None
    }
    opened = {key for key, value in values.items() if value == _AUTO}
    released = {*opened, *(SPLIT if opened.intersection(SPLIT) else ())}
    if section_of(changes, "train").get("tokens_per_step"):
        released.add("train.gradient_accumulation")  # follows from it
    fixed = {*asked} - released | (values.keys() - opened)
    changes = _overlaid(changes, {})
    for key in opened:
        section, _, name = key.rpartition(".")
        there = changes[section] if section else changes
        if key in _WANTED:
            del there[name]
        else:
            there[name] = field_index()[key].default
    unknown = [key for key in asked if key not in MACHINE_DECIDES]
    known = [key for key in MACHINE_DECIDES if key in fixed]
    return merged(base, changes) | {"fixed": [*known, *unknown]}


def value_at(tree: Tree, path: str) -> Any:
    """Return the value of a dotted key of one or two parts; None where it does not stand."""
    section, _, name = path.rpartition(".")
    return (section_of(tree, section) if section else tree).get(name)


def differences(tree: Tree, base: Tree) -> Tree:
    """Return the part of ``tree`` that differs from ``base``; sections without a difference are
    left out.
    """
    found: Tree = {}
    for key, value in tree.items():
        if key in base and base[key] == value:
            continue
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            value = differences(value, base[key])
        found[key] = value
    return found


def _overlaid(base: Tree, changes: Tree) -> Tree:
    tree = {key: dict(value) if isinstance(value, dict) else value for key, value in base.items()}
    for key, value in changes.items():
        both = isinstance(tree.get(key), dict) and isinstance(value, dict)
        tree[key] = _overlaid(tree[key], value) if both else value
    return tree


def _defaults() -> Tree:
    """Return the defaults of every section; required keys are absent."""
    tree = complete_tree(RunSpec(name="", model=ModelSpec(id=""), data=DataSpec(source="")))
    del tree["name"], tree["model"]["id"], tree["data"]["source"]
    return tree


def _toml_value(text: str) -> Any:
    try:
        return decode_toml(f"value = {text}".encode())["value"] if "\n" not in text else text
    except ValueError:  # no TOML, nested too deeply, or a lone surrogate: taken literally
        return text


def _unquoted(text: str) -> str:
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'":
        value = _toml_value(text)
        return value if isinstance(value, str) else text
    return text


def _unknown_path(path: str, text: str) -> Problem:
    known = tuple(field_index())
    last = path.rpartition(".")[2]
    same_key = [full for full in known if full.rpartition(".")[2] == last]
    if meant := KEYS_MEANT.get(last.replace("_", "-")):
        same_key.append(meant)
    hint = f"Did you mean `{same_key[0]}`? " if same_key else nearest(path, known)
    if below := [full for full in known if full.startswith(f"{path}.")]:
        hint = f"`{path}` is a section: name one of its keys, such as `{below[0]}`. "
    return Problem(
        "unknown-key",
        path,
        shown(text),
        "is not a known key",
        f"{hint}`docs/presets.md` lists all keys, with ranges and units.",
    )
