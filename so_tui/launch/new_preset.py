"""A preset for any model: its shape from a helper process, sensible settings around it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from so_tui.launch.helpers import call_tool
from so_tui.spec import InputError, Problem, RunSpec, check_tree, create_preset, load_catalog, user_folder, with_values
from so_tui.spec.catalog import BUILTIN

_LONGEST_SEQUENCE = 4096
_PARAMETERS_PER_GPU = 25_000_000_000
"""What one GH200 with 480 GB trains at most, by the SuperOffload paper (arXiv 2509.21271)."""
_TIMEOUT_S = 300.0


class Described(NamedTuple):
    """A spec that is not saved yet, and what is worth knowing about the model."""

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
    """The spec of a hub id or folder; seconds, in a helper process; downloads the config.json at most.

    ``name`` is by default made from the model's, ``changes`` are dotted keys as in ``--set``. Raises InputError (no such model, gated, no
    network, not a causal language model, code of its own, name taken, ...), Refused without the training software.
    """
    chosen = name or preset_name(model)
    _refuse_taken(chosen)
    changes = changes or {}
    _refuse_other_shape(changes)
    asked = {"tokenizer": changes.get("model.tokenizer", ""), "weights": changes.get("model.weights", "")}
    request = {"model": model, "revision": revision, "trust_remote_code": trust_remote_code}
    answer = call_tool("describe_model", request | asked, timeout_s=_TIMEOUT_S)
    spec = check_tree(_tree(answer, chosen))
    return Described(with_values(spec, changes) if changes else spec, tuple(answer["notes"]))


def add_preset(described: Described) -> Path:
    """Save it as a preset of the user. Raises InputError where the name is taken meanwhile or the folder cannot be written."""
    return create_preset(described.spec)


def preset_name(model: str) -> str:
    """``Qwen/Qwen3-14B`` is ``qwen3-14b``; a folder gives its own name, also as ``.``."""
    folder = Path(model.strip()).expanduser()
    name = folder.resolve().name if folder.is_dir() else _last_part(model)
    words = re.sub(r"[^a-z0-9._-]+", "-", name.lower())
    return words.strip("-._")[:64] or "model"


def _tree(answer: dict[str, Any], name: str) -> dict[str, Any]:
    """What a preset of this model says; all else is the default."""
    length = min(_LONGEST_SEQUENCE, answer["longest_sequence"] or _LONGEST_SEQUENCE)
    return {
        "name": name,
        "title": re.sub(r"[-_]+", " ", _last_part(answer["model"]["id"])),
        "gpus": _gpus(answer["parameters"]),
        "model": {key: value for key, value in answer["model"].items() if value not in ("", [], {})},
        "data": {"source": "tatsu-lab/alpaca", "format": "auto", "sequence_length": length, "packing": True},
        "train": {"epochs": 1},
        "offload": {"mode": "auto"},
    }


def _gpus(parameters: int) -> int:
    """The fewest of 1, 2, 4, 8 or 16 that this many parameters take on superchips with 480 GB."""
    return next((count for count in (1, 2, 4, 8) if parameters <= count * _PARAMETERS_PER_GPU), 16)


def _last_part(model: str) -> str:
    return model.strip().rstrip("/").removeprefix(BUILTIN).rpartition("/")[2] or model.strip()


def _refuse_other_shape(changes: dict[str, str]) -> None:
    """Raises InputError for a change of the shape: the parameter table would be another model's."""
    for key, value in changes.items():
        if key.startswith(("model.config", "model.parameters")):
            remedy = "Copy the folder, change its config.json, and add that one; or use model.weights=random with it."
            raise InputError([Problem(field=key, value=value, message="is read from the model", remedy=remedy)])


def _refuse_taken(name: str) -> None:
    """Raises InputError before the model is looked at: that takes seconds."""
    older = load_catalog().presets.get(name)
    taken = older.path if older else str(user_folder() / f"{name}.toml")
    if older or Path(taken).exists():
        remedy = "Use that one, or give another name (--name)."
        raise InputError([Problem(field="name", value=name, message=f"is taken by {taken}", remedy=remedy)])
