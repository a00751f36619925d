"""Presets for any model: a helper process reads the model's shape, and the other settings get sensible values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from so_tui.folders import user_folder
from so_tui.launch.helpers import call_tool
from so_tui.spec import (
    InputError,
    Problem,
    RunSpec,
    check_tree,
    create_preset,
    load_catalog,
    with_values,
)
from so_tui.spec.catalog import BUILTIN
from so_tui.spec.files import exists, is_folder
from so_tui.spec.layers import layer_kinds, packing_problem

_LONGEST_SEQUENCE = 4096
_PARAMETERS_PER_GPU = 25_000_000_000
"""The largest model that one GH200 with 480 GB can train, by the SuperOffload paper (arXiv 2509.21271)."""
_TIMEOUT_S = 300.0


class Described(NamedTuple):
    """A spec that is not saved yet, and notes about the model."""

    spec: RunSpec
    notes: tuple[str, ...]


def describe_model(
    model: str,
    *,
    name: str | None = None,
    revision: str = "main",
    trust_remote_code: bool = False,
    changes: dict[str, str] | None = None,
) -> Described:
    """Make the spec of a model. Takes seconds, in a helper process that downloads at most config.json.

    Args:
        model: A hub id or a local folder.
        name: The preset's name; by default made from the model's.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Run the Python code that comes with the model.
        changes: Dotted keys and values, as for ``--set``.

    Raises:
        InputError: There is no such model, it is gated, it is not a causal language model, there is no network ... Codes of this module
            are ``name-taken`` and ``read-from-the-model``.
        Refused: The training software is not installed.
    """
    chosen = name or preset_name(model)
    _refuse_taken(chosen)
    changes = changes or {}
    _refuse_other_shape(changes)
    asked = {
        "tokenizer": changes.get("model.tokenizer", ""),
        "weights": changes.get("model.weights", ""),
    }
    request = {"model": model, "revision": revision, "trust_remote_code": trust_remote_code}
    answer = call_tool("describe_model", request | asked, timeout_s=_TIMEOUT_S)
    spec = check_tree(_tree(answer, chosen))
    return Described(with_values(spec, changes) if changes else spec, tuple(answer["notes"]))


def add_preset(described: Described) -> Path:
    """Save it as a user preset. Raises InputError if the name has been taken since, or the folder cannot be written."""
    return create_preset(described.spec)


def preset_name(model: str) -> str:
    """Return a preset name for a model: ``qwen3-14b`` for ``Qwen/Qwen3-14B``, and a folder's own name, even for ``.``."""
    folder = Path(model.strip()).expanduser()
    name = folder.resolve().name if is_folder(folder) else _last_part(model)
    words = re.sub(r"[^a-z0-9._-]+", "-", name.lower())
    return words.strip("-._")[:64] or "model"


def _tree(answer: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the preset as a tree. Keys that it lacks keep their defaults."""
    length = min(_LONGEST_SEQUENCE, answer["longest_sequence"] or _LONGEST_SEQUENCE)
    packs = packing_problem(layer_kinds(answer["model"]["config"])) is None
    return {
        "name": name,
        "title": re.sub(r"[-_]+", " ", _last_part(answer["model"]["id"])),
        "gpus": _gpus(answer["parameters"]),
        "model": {
            key: value for key, value in answer["model"].items() if value not in ("", [], {})
        },
        "data": {
            "source": "tatsu-lab/alpaca",
            "format": "auto",
            "sequence_length": length,
            "packing": packs,
        },
        "train": {"epochs": 1},
        "offload": {"mode": "auto"},
    }


def _gpus(parameters: int) -> int:
    """Return the smallest number of superchips with 480 GB (1, 2, 4, 8 or 16) that can train this many parameters."""
    return next((count for count in (1, 2, 4, 8) if parameters <= count * _PARAMETERS_PER_GPU), 16)


def _last_part(model: str) -> str:
    return model.strip().rstrip("/").removeprefix(BUILTIN).rpartition("/")[2] or model.strip()


def _refuse_other_shape(changes: dict[str, str]) -> None:
    """Refuse changes of the shape, after which the parameter table would belong to another model."""
    for key, value in changes.items():
        if key.startswith(("model.config", "model.parameters")):
            remedy = "Copy the folder, change its config.json, and add the copy; or use it with model.weights=random."
            raise InputError(
                [
                    Problem(
                        code="read-from-the-model",
                        field=key,
                        value=value,
                        message="is read from the model",
                        remedy=remedy,
                    )
                ]
            )


def _refuse_taken(name: str) -> None:
    """Refuse a name that is taken before the model is read, which takes seconds."""
    older = load_catalog().presets.get(name)
    taken = older.path if older else str(user_folder() / f"{name}.toml")
    if older or exists(Path(taken)):
        remedy = "Use that preset, or give another name (--name)."
        raise InputError(
            [
                Problem(
                    code="name-taken",
                    field="name",
                    value=name,
                    message=f"is taken by {taken}",
                    remedy=remedy,
                )
            ]
        )
