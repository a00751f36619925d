"""Where a pretrained model's weights lie: its folder, the hub's cache, or, for MXFP4, the bf16 folder that was made of them once."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from so_tui.spec import InputError, ModelSpec, Problem, resolve_source
from so_tui_trainer import mxfp4


def weights_folder(model: ModelSpec, say: Callable[[str], None] = lambda text: None) -> Path:
    """A folder with the model's weights as they can be trained; downloaded and converted first where that was not done.

    Whoever comes first does the work, and others (ranks, `so-tui prepare`) wait for it. Raises InputError: not to be had, quantised in a
    way that cannot be trained, no room on the disk.
    """
    folder = _downloaded(model)
    quantisation = _quantisation(folder)
    if not quantisation:
        return folder
    if not mxfp4.is_mxfp4(quantisation):
        message = f"its weights are quantised ({quantisation.get('quant_method', 'in an unknown way')}), which cannot be trained"
        raise InputError([Problem(field="model.id", value=model.id, message=message, remedy="Choose a checkpoint in bf16.")])
    target = converted_folder(folder)
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _alone(target.with_name(target.name + ".lock")):
        return mxfp4.convert(folder, target, say)


def converted_folder(source: Path) -> Path:
    """Where the bf16 weights of an MXFP4 folder go: in the user's cache, named by what the folder holds."""
    files = sorted(path for path in source.glob("*.safetensors"))
    content = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if cache.startswith("/") else Path.home() / ".cache") / "so-tui" / "models" / key


def _downloaded(model: ModelSpec) -> Path:
    given = Path(resolve_source(model.id)).expanduser()
    if given.is_dir():
        return given
    from huggingface_hub import snapshot_download

    from so_tui_trainer.tools.hub import UNWANTED, WANTED

    try:
        found = snapshot_download(model.id, revision=model.revision, allow_patterns=list(WANTED), ignore_patterns=list(UNWANTED))
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        remedy = "Check the name and the network, or fetch it with `so-tui fetch` where there is one."
        raise InputError([Problem(field="model.id", value=model.id, message=f"cannot be had ({reason})", remedy=remedy)]) from error
    return Path(found)


def _quantisation(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text()).get("quantization_config") or {}
    return found


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Holds the file's lock; it goes when the process does, however that ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
