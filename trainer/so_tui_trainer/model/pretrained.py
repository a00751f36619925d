"""Locate a pretrained model's weights: its folder, the hub's cache, or the converted bf16 folder of MXFP4 weights."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from so_tui.folders import cache_home
from so_tui.spec import InputError, ModelSpec, Problem, first_line, resolve_source
from so_tui_trainer.model import mxfp4


def weights_folder(model: ModelSpec) -> Path:
    """Return a folder with the model's weights in a form that can be trained, after downloading and converting them if needed.

    The first process does the work; others (ranks, `so-tui prepare`) wait for it.

    Raises:
        InputError: The weights cannot be downloaded, are quantised in an unsupported way, or do not fit on the disk.
    """
    for line in prepare_weights(model):
        print(line, flush=True)
    return trainable_folder(_downloaded(model))


def prepare_weights(model: ModelSpec) -> Iterator[str]:
    """Do the work of ``weights_folder``.

    Yields:
        A line of progress before each part.
    """
    source = _downloaded(model)
    target = trainable_folder(source)
    if target.is_dir():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(target.name + ".lock")):
        yield from mxfp4.convert(source, target)


def downloaded(model: ModelSpec) -> Path | None:
    """Return the model's own folder if all of it is on this machine, otherwise None."""
    try:
        return _downloaded(model, local_files_only=True)
    except InputError:
        return None


def trainable_folder(source: Path) -> Path:
    """Return where the trainable weights of a model's folder are, or will be: the folder itself unless they are in MXFP4.

    Raises:
        InputError: They are quantised in another way, or config.json cannot be read.
    """
    try:
        quantisation: dict[str, Any] = (
            json.loads((source / "config.json").read_text()).get("quantization_config") or {}
        )
    except (OSError, ValueError) as error:
        message, remedy = (
            f"has no readable config.json ({error})",
            "Name the folder of a complete model.",
        )
        raise _problem("model-config-unreadable", str(source), message, remedy) from error
    method = quantisation.get("quant_method")
    if not quantisation:
        return source
    if method != "mxfp4":
        message, remedy = (
            f"its weights are quantised ({method}), which cannot be trained",
            "Choose a checkpoint in bf16.",
        )
        raise _problem("weights-quantised", str(source), message, remedy)
    return converted_folder(source)


def converted_folder(source: Path) -> Path:
    """Return the cache folder for the bf16 weights of an MXFP4 folder, named by the content of that folder."""
    files = sorted(path for path in source.glob("*.safetensors"))
    content = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
    return cache_home() / "models" / key


def _downloaded(model: ModelSpec, *, local_files_only: bool = False) -> Path:
    given = Path(resolve_source(model.id)).expanduser()
    if given.is_dir():
        return given
    from huggingface_hub import snapshot_download

    from so_tui_trainer.hub import UNWANTED, WANTED

    download: Any = snapshot_download
    wanted = {"allow_patterns": list(WANTED), "ignore_patterns": list(UNWANTED)}
    try:
        return Path(
            download(model.id, revision=model.revision, local_files_only=local_files_only, **wanted)
        )
    except (OSError, ValueError) as error:
        remedy = "Check the name and the network, or download it with `so-tui fetch` where there is a network."
        raise _problem(
            "model-unavailable", model.id, f"cannot be downloaded ({first_line(error)})", remedy
        ) from error


def _problem(code: str, value: str, message: str, remedy: str) -> InputError:
    return InputError(
        [Problem(code=code, field="model.id", value=value, message=message, remedy=remedy)]
    )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file. The kernel releases it when the process ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
