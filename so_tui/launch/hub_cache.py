"""What of a spec is in the local cache of the Hugging Face hub, by its files alone: a login node may have none of the packages.

Problem codes:
    not-cached: Nodes without internet would have to download it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from so_tui.spec import Problem, RunSpec, resolve_source
from so_tui.spec.files import exists
from so_tui.trust.decoding import read_json
from so_tui.trust.printable import so_tui_command
from so_tui.trust.reading import read_bounded

_INDEX = "model.safetensors.index.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


class _Index(Struct):
    """Of weights in several files."""

    weight_map: dict[str, str]
    """The file of each tensor."""


class HubCache:
    """The cache folders that an environment names."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        home = Path(
            environment.get("HF_HOME")
            or Path(environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
        ).expanduser()
        self.hub = Path(
            environment.get("HF_HUB_CACHE")
            or environment.get("HUGGINGFACE_HUB_CACHE")
            or home / "hub"
        ).expanduser()
        self.datasets = Path(environment.get("HF_DATASETS_CACHE") or home / "datasets").expanduser()

    def snapshot(self, name: str, revision: str) -> Path | None:
        """Return the folder of a model's files at a branch, tag or commit; None if there is none."""
        folder = self.hub / f"models--{name.replace('/', '--')}"
        try:
            commit = read_bounded(folder / "refs" / revision, 100).decode(errors="replace").strip()
        except OSError:
            commit = revision
        found = folder / "snapshots" / commit
        return found if "/" not in commit and found.is_dir() else None

    def has_data(self, name: str) -> bool:
        """Return whether anything of a data set was downloaded or prepared."""
        prepared, downloaded = (
            self.datasets / name.replace("/", "___"),
            self.hub / f"datasets--{name.replace('/', '--')}" / "snapshots",
        )
        return (
            prepared.is_dir()
            or prepared.with_name(prepared.name.lower()).is_dir()
            or downloaded.is_dir()
        )


def not_cached(spec: RunSpec, environment: Mapping[str, str], where: str) -> Iterator[Problem]:
    """Yield a problem for each part of a spec that is on the hub and not in the cache.

    Args:
        spec: What is to be trained.
        environment: In which the nodes would look for it.
        where: Whose nodes have no internet, for the message.
    """
    cache = HubCache(environment)
    for field, name in _models(spec):
        if (missing := _missing_of_model(cache, spec, field, name)) is not None:
            yield _problem(spec, field, name, f"{missing} is not in {cache.hub}", where)
    for field, name in _data(spec):
        if not cache.has_data(name):
            yield _problem(
                spec, field, name, f"is neither in {cache.datasets} nor in {cache.hub}", where
            )


def _models(spec: RunSpec) -> Iterator[tuple[str, str]]:
    tokenizer = spec.model.tokenizer or spec.model.id
    if spec.model.weights == "pretrained" and _on_hub(spec.model.id):
        yield "model.id", spec.model.id
    if _on_hub(tokenizer) and (spec.model.tokenizer or spec.model.weights != "pretrained"):
        yield "model.tokenizer" if spec.model.tokenizer else "model.id", tokenizer


def _data(spec: RunSpec) -> Iterator[tuple[str, str]]:
    for source in spec.data.sources:
        if _on_hub(source.source):
            yield "data.source", source.source
    if spec.data.evaluation and _on_hub(spec.data.evaluation):
        yield "data.evaluation", spec.data.evaluation


def _on_hub(text: str) -> bool:
    return (
        resolve_source(text) == text
        and text.count("/") <= 1
        and not exists(Path(text).expanduser())
    )


def _missing_of_model(cache: HubCache, spec: RunSpec, field: str, name: str) -> str | None:
    """Return which file of a model or tokenizer is missing; None if none is."""
    folder = cache.snapshot(name, spec.model.revision if name == spec.model.id else "main")
    if folder is None:
        return f"revision {spec.model.revision}" if name == spec.model.id else "it"
    if not any((folder / file).exists() for file in _TOKENIZERS) and (
        field == "model.tokenizer" or not spec.model.tokenizer
    ):
        return "its tokenizer"
    if field == "model.tokenizer" or spec.model.weights != "pretrained":
        return None
    return next((file for file in _weights(folder) if not (folder / file).exists()), None)


def _weights(folder: Path) -> tuple[str, ...]:
    """Return the names of the files that hold a model's weights."""
    try:
        index = read_json(folder / _INDEX, _Index)
    except (OSError, msgspec.DecodeError):
        return ("config.json", "model.safetensors")
    return ("config.json", *sorted(set(index.weight_map.values())))


def _problem(spec: RunSpec, field: str, value: str, message: str, where: str) -> Problem:
    command = so_tui_command("prepare", spec.name)
    remedy = f"Run `{command}` here first, with the same HF_HOME."
    return Problem(
        code="not-cached",
        field=field,
        value=value,
        message=f"{message}, and nodes of {where} have no internet",
        remedy=remedy,
    )
