"""Checkpoints: written by all ranks into ``step-000060.partial``, made valid by one rename, old ones removed after that.

A checkpoint holds the masters, moments and counters of the optimizer (the bf16 weights are a cast of the masters), the random number
generators of every rank, and what the data was. Schedule and place in the data follow from the step.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import Struct

from so_tui.plan.layout import partition_numel
from so_tui.runs import RunDirectory
from so_tui.runs.records import CheckpointRecord
from so_tui.spec import RunSpec, disk_size
from so_tui_trainer import offload
from so_tui_trainer.failures import TrainingError
from so_tui_trainer.ranks import Ranks

_NAME = re.compile(r"step-(\d{6,})")
_PARTIAL = ".partial"
_MANIFEST = "checkpoint.json"
_STATE_BYTES = 12
"""Of one parameter: fp32 master and two moments."""


class Manifest(Struct, frozen=True, kw_only=True):
    """What a checkpoint belongs to; written last, so a folder without it is not one."""

    schema: int = 1
    step: int
    total_steps: int
    ranks: int
    useful_tokens: int
    """Of all steps so far."""
    trained_tokens: int
    data: str
    """Fingerprint of the documents that the step counts through."""
    last_loss: float | None
    spec: RunSpec


def folder_of(run: RunDirectory, spec: RunSpec) -> Path:
    """Where a run's checkpoints lie; a folder of the spec may serve several runs."""
    return Path(spec.checkpoint.folder).expanduser() / run.name if spec.checkpoint.folder else run.checkpoints_dir


class Found(NamedTuple):
    path: Path
    manifest: Manifest
    unreadable: tuple[Path, ...]
    """Newer ones that could not be read."""


def newest(folder: Path) -> Found | None:
    """The newest checkpoint that can be read; None when there is none at all.

    Raises TrainingError when there are some and none can be read: starting anew would throw their training away.
    """
    unreadable: list[Path] = []
    for path in reversed(_checkpoints(folder)):
        try:
            return Found(path, read_manifest(path), tuple(unreadable))
        except (OSError, msgspec.DecodeError, msgspec.ValidationError):
            unreadable.append(path)
    if unreadable:
        reason = f"none of the checkpoints in {folder} can be read"
        raise TrainingError(reason, "They may be of another version of so-tui. Move them elsewhere to start anew.")
    return None


def read_manifest(checkpoint: Path) -> Manifest:
    """Raises OSError or msgspec.DecodeError when the folder is not a whole checkpoint."""
    return msgspec.json.decode((checkpoint / _MANIFEST).read_bytes(), type=Manifest)


def optimizer_folder(checkpoint: Path) -> Path:
    return checkpoint / "optimizer"


def save(engine: Any, manifest: Manifest, folder: Path, ranks: Ranks, attempt: int) -> CheckpointRecord:
    """Write a checkpoint, together with the other ranks, and remove those beyond ``checkpoint.keep``.

    Raises TrainingError, on all ranks alike, when it does not fit or some rank could not write; the checkpoints before it stay as they are.
    """
    began = time.monotonic()
    final = folder / f"step-{manifest.step:06d}"
    partial = final.with_name(final.name + _PARTIAL)
    with _together(ranks, "the checkpoint cannot be started"):
        if ranks.first:
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(f"*{_PARTIAL}"):  # by an attempt that was killed
                shutil.rmtree(left)
            _check_room(engine, folder, ranks)
            optimizer_folder(partial).mkdir(parents=True)
    written = 0
    with _together(ranks, "the checkpoint could not be written", cleanup=partial):
        written = offload.save_state(engine, optimizer_folder(partial))
        torch.save(_random_state(), partial / f"random.rank{ranks.rank}.pt")
    total = int(sum(row[0] for row in ranks.table([float(written)])))
    with _together(ranks, "the checkpoint could not be finished", cleanup=partial):
        if ranks.first:
            (partial / _MANIFEST).write_bytes(msgspec.json.encode(manifest))
            if final.exists():  # the same step again, after a resume from an older checkpoint
                shutil.rmtree(final)
            partial.rename(final)
            _sync(folder)
            for old in _checkpoints(folder)[: -manifest.spec.checkpoint.keep]:
                shutil.rmtree(old)
    seconds = time.monotonic() - began
    return CheckpointRecord(attempt=attempt, time=time.time(), step=manifest.step, path=str(final), bytes=total, seconds=seconds)


def load(engine: Any, checkpoint: Path, manifest: Manifest, ranks: Ranks) -> None:
    """Put the run back to where the checkpoint was made. Raises TrainingError, on all ranks alike, when it does not fit this run."""
    if manifest.ranks != ranks.size:
        raise TrainingError(
            f"{checkpoint} was made by {manifest.ranks} ranks, and this run has {ranks.size}", f"Resume with {manifest.ranks} GPUs."
        )
    with _together(ranks, f"{checkpoint} could not be loaded"):
        offload.load_state(engine, optimizer_folder(checkpoint))
        # Written by ``save`` above: plain tensors and tuples, but numpy's state is not on torch's list of safe types.
        _restore_random_state(torch.load(checkpoint / f"random.rank{ranks.rank}.pt", weights_only=False))


def _checkpoints(folder: Path) -> list[Path]:
    """Ascending by step."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and (path / _MANIFEST).is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


@contextmanager
def _together(ranks: Ranks, what: str, cleanup: Path | None = None) -> Iterator[None]:
    """Run a part of the work on every rank, then agree on whether it worked: one rank's error is an error of all."""
    error: Exception | None = None
    try:
        yield
    except (OSError, RuntimeError, TrainingError, offload.OffloadError) as caught:
        error = caught
    told = error.reason if isinstance(error, TrainingError) else "" if error is None else str(error)
    advice = error.suggestion if isinstance(error, TrainingError) else ""
    problems = [(text, suggestion) for text, suggestion in ranks.gather((told, advice)) if text]
    if not problems and error is None:
        return
    if cleanup is not None and ranks.first:
        shutil.rmtree(cleanup, ignore_errors=True)
    text, suggestion = problems[0]
    remedy = suggestion or "Look at the disk and the permissions of the folder; earlier checkpoints are untouched."
    raise TrainingError(f"{what}: {text}", remedy) from error


def _check_room(engine: Any, folder: Path, ranks: Ranks) -> None:
    """Raises TrainingError when the states of all ranks do not fit on the disk."""
    parameters = (parameter for parameter in engine.module.parameters() if parameter.requires_grad)
    share = sum(partition_numel(getattr(parameter, "ds_numel", parameter.numel()), ranks.size) for parameter in parameters)
    needed, free = _STATE_BYTES * share * ranks.size, shutil.disk_usage(folder).free
    if needed > free:
        raise TrainingError(
            f"a checkpoint needs {disk_size(needed)}, and {folder} has {disk_size(free)} free",
            "Make room, keep fewer checkpoints (`checkpoint.keep`), or set `checkpoint.folder` to a larger disk.",
        )


def _sync(folder: Path) -> None:
    """Make a rename survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
