"""A checkpoint as a Hugging Face folder: bf16 weights from the masters, configuration, tokenizer. One process, no DeepSpeed, no GPU."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import Struct

import so_tui
from so_tui.plan.layout import partition_numel
from so_tui.spec import InputError, Problem
from so_tui_trainer.checkpoint import optimizer_folder, read_manifest
from so_tui_trainer.model import PREFIX, load_config
from so_tui_trainer.offload.checkpoint import Manifest as StateManifest
from so_tui_trainer.tokens import load_tokenizer

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
    there; tokenizer or configuration not to be had), ValueError (states that do not fit the model).
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
    state = {name: master.to(torch.bfloat16) for name, master in masters(optimizer_folder(checkpoint), shapes)}
    if missing := shapes.keys() - state.keys():
        raise ValueError(f"the checkpoint lacks {', '.join(sorted(missing)[:5])}")
    # Tied tensors share storage, which save_pretrained recognises; the loader ties them again.
    model.config.use_cache = True
    with replacing(folder, Mark(run=run_name, step=manifest.step, version=so_tui.__version__)) as partial:
        model.save_pretrained(partial, state_dict=state)
        load_tokenizer(spec).save_pretrained(partial)
    return sum(path.stat().st_size for path in folder.iterdir())


def refuse_foreign(folder: Path) -> None:
    """Raises InputError when something lies at ``folder`` that is neither an export nor an empty folder."""
    if not folder.exists() or (folder.is_dir() and ((folder / _MARK).is_file() or not any(folder.iterdir()))):
        return
    message = f"holds files that are no export of so-tui (no {_MARK})" if folder.is_dir() else "is not a folder"
    raise InputError([Problem(field="--to", value=str(folder), message=message, remedy="Name a new or an empty folder with --to.")])


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


def masters(folder: Path, shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, torch.Tensor]]:
    """The fp32 weights of every parameter, put together from all ranks' states; a tensor at a time."""
    manifests = [msgspec.json.decode(path.read_bytes(), type=StateManifest) for path in sorted(folder.glob("rank_*.json"))]
    if not manifests or len(manifests) != manifests[0].ranks:
        raise ValueError(f"{folder} holds the states of {len(manifests)} ranks of {manifests[0].ranks if manifests else 'unknown'}")
    files = [np.memmap(folder / f"rank_{manifest.rank:05d}.states", dtype=np.float32, mode="r") for manifest in manifests]
    ranks, start = len(manifests), 0
    for group in manifests[0].sub_groups:
        offset = start
        for full_name in group.names:
            name = full_name.removeprefix(PREFIX)
            shape = shapes[name]
            share = partition_numel(math.prod(shape), ranks)
            flat = np.concatenate([file[offset : offset + share] for file in files])[: math.prod(shape)]
            yield name, torch.from_numpy(flat).view(shape)
            offset += share
        start += group.numel * (3 if group.moments else 1)
