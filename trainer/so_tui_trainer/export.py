"""A checkpoint as a Hugging Face folder: bf16 weights from the masters, configuration, tokenizer. One process, no DeepSpeed, no GPU."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct

import so_tui
from so_tui.spec import InputError, Problem, disk_size
from so_tui_trainer import offload
from so_tui_trainer.checkpoint import optimizer_folder, read_manifest
from so_tui_trainer.data.tokens import load_tokenizer
from so_tui_trainer.model.build import PREFIX, load_config

_MARK = "so_tui_export.json"


class Mark(Struct, frozen=True, kw_only=True):
    """Lies in every export: what it was made from, and that it may be replaced. Models of other origin look alike but for this file."""

    run: str
    step: int
    version: str
    """Of so-tui."""


def export(checkpoint: Path, folder: Path, run_name: str) -> int:
    """Write the model of a checkpoint into ``folder``, which ``from_pretrained`` loads; returns its bytes.

    The folder appears whole or not at all, and replaces an older export, but nothing else. Raises OSError, InputError (something else lies
    there; no room; tokenizer or configuration not to be had), ValueError (states that do not fit the model).
    """
    from transformers import AutoModelForCausalLM

    folder = folder.resolve()
    refuse_foreign(folder)
    manifest = read_manifest(checkpoint)
    spec = manifest.spec
    config = load_config(spec.model)
    factory: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = factory.from_config(config, dtype=torch.bfloat16)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    refuse_without_room(folder, sum(shape.numel() for shape in shapes.values()) * torch.bfloat16.itemsize)
    state = weights(checkpoint, shapes)
    if missing := shapes.keys() - state.keys():
        raise ValueError(f"the checkpoint lacks {', '.join(sorted(missing)[:5])}")
    # Tied tensors share storage, which save_pretrained recognises; the loader ties them again.
    model.config.use_cache = True
    with replacing(folder, Mark(run=run_name, step=manifest.step, version=so_tui.__version__)) as partial:
        model.save_pretrained(partial, state_dict=state)
        load_tokenizer(spec).save_pretrained(partial)
    return sum(path.stat().st_size for path in folder.iterdir())


def weights(checkpoint: Path, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Tensor]:
    """The bf16 weights that a checkpoint's masters stand for, by their name in the model. Raises ValueError for one that does not fit."""
    found = {}
    for full_name, master in offload.saved_masters(optimizer_folder(checkpoint)):
        name = full_name.removeprefix(PREFIX)
        if name not in shapes or shapes[name].numel() != len(master):
            raise ValueError(f"{name} of the checkpoint, {len(master)} elements, does not fit the model")
        found[name] = master.to(torch.bfloat16).view(shapes[name])
    return found


def refuse_foreign(folder: Path) -> None:
    """Raises InputError when something lies at ``folder`` that is neither an export nor an empty folder."""
    if not folder.exists() or (folder.is_dir() and ((folder / _MARK).is_file() or not any(folder.iterdir()))):
        return
    message = f"holds files that are no export of so-tui (no {_MARK})" if folder.is_dir() else "is not a folder"
    raise InputError([Problem(field="--to", value=str(folder), message=message, remedy="Name a new or an empty folder with --to.")])


def refuse_without_room(folder: Path, needed_bytes: int) -> None:
    """Raises InputError when the disk of ``folder`` has less free; an older export goes only when the new one is whole."""
    free_bytes = shutil.disk_usage(next(parent for parent in folder.resolve().parents if parent.is_dir())).free
    if free_bytes < needed_bytes:
        message = f"an export needs {disk_size(needed_bytes)}, and {disk_size(free_bytes)} are free"
        remedy = "Make room, or name a folder on a larger disk with --to."
        raise InputError([Problem(field="--to", value=str(folder), message=message, remedy=remedy)])


@contextmanager
def replacing(folder: Path, mark: Mark) -> Iterator[Path]:
    """A marked folder beside ``folder`` to write into, which takes its place when everything went well and goes when not."""
    partial, old = (folder.with_name(folder.name + suffix) for suffix in (".partial", ".old"))
    for left in (partial, old):  # by an export that was killed
        refuse_foreign(left)
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        (partial / _MARK).write_bytes(msgspec.json.encode(mark))
        yield partial
        refuse_foreign(folder)  # writing takes minutes, in which someone else may have put something there
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        if old.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)
