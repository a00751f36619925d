"""Where a pretrained model's weights lie: its folder, the hub's cache, or, for MXFP4, the bf16 folder that was made of them once."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from so_tui.spec import InputError, ModelSpec, Problem, first_line, resolve_source
from so_tui.spec.folders import cache_home
from so_tui_trainer.model import mxfp4


def weights_folder(model: ModelSpec) -> Path:
    """A folder with the model's weights as they can be trained; downloaded and converted first where that was not done.

    Whoever comes first does the work, and others (ranks, `so-tui prepare`) wait for it. Raises InputError: not to be had, quantised in a
    way that cannot be trained, no room on the disk.
    """
    for line in prepare_weights(model):
        print(line, flush=True)
    return trainable_folder(_downloaded(model))


def prepare_weights(model: ModelSpec) -> Iterator[str]:
    """The work of ``weights_folder``, a line of progress before each part of it."""
    source = _downloaded(model)
    target = trainable_folder(source)
    if target.is_dir():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(target.name + ".lock")):
        yield from mxfp4.convert(source, target)


def downloaded(model: ModelSpec) -> Path | None:
    """The model's own folder, when all of it is on this machine."""
    try:
        return _downloaded(model, local_files_only=True)
    except InputError:
        return None


def trainable_folder(source: Path) -> Path:
    """Where the weights of a model's folder are, or will be, as they can be trained: the folder itself, unless they are in MXFP4.

    Raises InputError when they are quantised in another way.
    """
    try:
        quantisation: dict[str, Any] = json.loads((source / "config.json").read_text()).get("quantization_config") or {}
    except (OSError, ValueError) as error:
        raise _problem(str(source), f"has no readable config.json ({error})", "Name the folder of a whole model.") from error
    method = quantisation.get("quant_method")
    if not quantisation:
        return source
    if method != "mxfp4":
        raise _problem(str(source), f"its weights are quantised ({method}), which cannot be trained", "Choose a checkpoint in bf16.")
    return converted_folder(source)


def converted_folder(source: Path) -> Path:
    """Where the bf16 weights of an MXFP4 folder go: in the user's cache, named by what the folder holds."""
    files = sorted(path for path in source.glob("*.safetensors"))
    content = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
    return cache_home() / "models" / key


def _downloaded(model: ModelSpec, *, local_files_only: bool = False) -> Path:
    given = Path(resolve_source(model.id)).expanduser()
    if given.is_dir():
        return given
    from huggingface_hub import snapshot_download

    from so_tui_trainer.tools.hub import UNWANTED, WANTED

    download: Any = snapshot_download
    wanted = {"allow_patterns": list(WANTED), "ignore_patterns": list(UNWANTED)}
    try:
        return Path(download(model.id, revision=model.revision, local_files_only=local_files_only, **wanted))
    except (OSError, ValueError) as error:
        remedy = "Check the name and the network, or fetch it with `so-tui fetch` where there is one."
        raise _problem(model.id, f"cannot be had ({first_line(error)})", remedy) from error


def _problem(value: str, message: str, remedy: str) -> InputError:
    return InputError([Problem(field="model.id", value=value, message=message, remedy=remedy)])


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the file's lock; it goes when the process does, however that ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
