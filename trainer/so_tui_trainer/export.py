"""A checkpoint as a Hugging Face folder: bf16 weights from the masters, configuration, tokenizer. One process, no DeepSpeed, no GPU."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from msgspec import Struct

import so_tui
import superoffload
from so_tui.spec import InputError, ModelSpec, Problem, resolve_source
from so_tui.units import disk_size
from so_tui_trainer.checkpoint import optimizer_folder, read_manifest
from so_tui_trainer.data.chat import chat_of
from so_tui_trainer.data.tokens import load_tokenizer
from so_tui_trainer.model.build import PREFIX, load_config
from so_tui_trainer.model.matching import meta_model

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

_MARKER_NAME = "so_tui_export.json"


class ExportMarker(Struct, frozen=True, kw_only=True):
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
    folder = folder.resolve()
    refuse_foreign(folder)
    manifest = read_manifest(checkpoint)
    spec = manifest.spec
    config = load_config(spec.model)
    model: Any = meta_model(config, trust_remote_code=spec.model.trust_remote_code)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    refuse_without_room(folder, sum(shape.numel() for shape in shapes.values()) * torch.bfloat16.itemsize)
    state = weights(checkpoint, shapes)
    if missing := shapes.keys() - state.keys():
        raise ValueError(f"the checkpoint lacks {', '.join(sorted(missing)[:5])}")
    # Tied tensors share storage, which save_pretrained recognises; the loader ties them again.
    model.config.use_cache = True
    tokenizer = load_tokenizer(spec)
    model.generation_config = generation_config(spec.model, config, tokenizer)
    with replacing(folder, ExportMarker(run=run_name, step=manifest.step, version=so_tui.__version__)) as partial:
        model.save_pretrained(partial, state_dict=state)
        tokenizer.save_pretrained(partial)
    return sum(path.stat().st_size for path in folder.iterdir())


def weights(checkpoint: Path, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Tensor]:
    """The bf16 weights that a checkpoint's masters stand for, by their name in the model. Raises ValueError for one that does not fit."""
    found = {}
    for full_name, master in superoffload.saved_master_weights(optimizer_folder(checkpoint)):
        name = full_name.removeprefix(PREFIX)
        if name not in shapes or shapes[name].numel() != len(master):
            raise ValueError(f"{name} of the checkpoint, {len(master)} elements, does not fit the model")
        found[name] = master.to(torch.bfloat16).view(shapes[name])
    return found


def generation_config(model: ModelSpec, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """How the model that was trained generates, and stops: now also at the token that ends an answer of the data.

    Settings that contradict each other, which transformers refuses to write, are left out.
    """
    from transformers import GenerationConfig

    found = GenerationConfig.from_model_config(config)
    if model.weights == "pretrained":
        with suppress(OSError):  # it need not have any
            found = GenerationConfig.from_pretrained(resolve_source(model.id), revision=model.revision)
    try:
        found.validate(strict=True)
    except ValueError:
        tokens = {key: getattr(found, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        found = GenerationConfig.from_dict(tokens)
    chat = chat_of(tokenizer)
    known = found.eos_token_id if isinstance(found.eos_token_id, list) else [found.eos_token_id]
    ends = dict.fromkeys([*known, tokenizer.convert_tokens_to_ids(chat.stop or chat.end)])
    ids = [number for number in ends if number is not None]
    found.eos_token_id = ids if len(ids) > 1 else ids[0]
    return found


def refuse_foreign(folder: Path) -> None:
    """Raises InputError when something lies at ``folder`` that is neither an export nor an empty folder."""
    if not folder.exists() or (folder.is_dir() and ((folder / _MARKER_NAME).is_file() or not any(folder.iterdir()))):
        return
    message = f"holds files that are no export of so-tui (no {_MARKER_NAME})" if folder.is_dir() else "is not a folder"
    raise InputError([Problem(field="--to", value=str(folder), message=message, remedy="Name a new or an empty folder with --to.")])


def refuse_without_room(folder: Path, needed_bytes: int) -> None:
    """Raises InputError when the disk of ``folder`` has less free; an older export goes only when the new one is whole."""
    free_bytes = shutil.disk_usage(next(parent for parent in folder.resolve().parents if parent.is_dir())).free
    if free_bytes < needed_bytes:
        message = f"an export needs {disk_size(needed_bytes)}, and {disk_size(free_bytes)} are free"
        remedy = "Make room, or name a folder on a larger disk with --to."
        raise InputError([Problem(field="--to", value=str(folder), message=message, remedy=remedy)])


@contextmanager
def replacing(folder: Path, mark: ExportMarker) -> Iterator[Path]:
    """A marked folder beside ``folder`` to write into, which takes its place when everything went well and goes when not."""
    partial, old = (folder.with_name(folder.name + suffix) for suffix in (".partial", ".old"))
    for left in (partial, old):  # by an export that was killed
        refuse_foreign(left)
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir()
    try:
        (partial / _MARKER_NAME).write_bytes(msgspec.json.encode(mark))
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
