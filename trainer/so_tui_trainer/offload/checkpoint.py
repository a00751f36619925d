"""Optimizer states on disk: every rank writes and reads one file of its own, without copies in between.

``rank_00000.states`` holds, sub-group after sub-group, the fp32 master weights, the first and the second moments, as raw little-endian
floats; ``rank_00000.json`` says what they belong to and is written last, so a state without it is incomplete. The bf16 weights are not
saved: they are a cast of the masters, and are made from them on loading.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import torch

from so_tui_trainer.offload.deepspeed_0_19_8 import SubGroupState
from so_tui_trainer.offload.errors import OffloadError, StateMismatchError

SCHEMA = 1


class SubGroupRecord(msgspec.Struct, frozen=True):
    numel: int
    device: str
    step: int
    moments: bool
    names: tuple[str, ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a state file belongs to."""

    schema: int = SCHEMA
    deepspeed: str
    mode: str
    engine: str
    ratio: float
    rank: int
    ranks: int
    byteorder: str = sys.byteorder
    sub_groups: tuple[SubGroupRecord, ...]

    @property
    def bytes(self) -> int:
        return sum(4 * group.numel * (3 if group.moments else 1) for group in self.sub_groups)


def records(states: Iterable[SubGroupState], names: Iterable[tuple[str, ...]]) -> tuple[SubGroupRecord, ...]:
    """The manifest's view of the sub-groups."""
    return tuple(
        SubGroupRecord(state.master.numel(), state.device, state.step, state.exp_avg is not None, group_names)
        for state, group_names in zip(states, names, strict=True)
    )


def write(folder: Path, manifest: Manifest, states: Iterable[SubGroupState]) -> int:
    """Writes this rank's state, synced to disk; returns its bytes. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    data_path, manifest_path = _paths(folder, manifest.rank)
    manifest_path.unlink(missing_ok=True)
    with data_path.open("wb", buffering=0) as file:
        for tensor in chain.from_iterable(map(_tensors, states)):
            _write_all(file.fileno(), _bytes_of(tensor.detach().cpu().contiguous()))
        os.fsync(file.fileno())
    partial = manifest_path.with_suffix(".json.partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    partial.replace(manifest_path)
    return manifest.bytes


def read(folder: Path, expected: Manifest, states: Iterable[SubGroupState]) -> None:
    """Reads this rank's state into ``states``, in place.

    Raises StateMismatchError when it belongs to something else, OffloadError when it is torn.
    """
    data_path, manifest_path = _paths(folder, expected.rank)
    if not manifest_path.is_file():
        raise OffloadError(f"{folder} holds no complete optimizer state of rank {expected.rank}: {manifest_path.name} is missing.")
    try:
        found = msgspec.json.decode(manifest_path.read_bytes(), type=Manifest)
    except msgspec.DecodeError as error:
        raise OffloadError(f"{manifest_path} cannot be read: {error}") from error
    problems = tuple(differences(found, expected))
    if problems:
        raise StateMismatchError(f"The optimizer state in {folder} does not fit this run:\n  " + "\n  ".join(problems))
    if data_path.stat().st_size != found.bytes:
        raise OffloadError(f"{data_path} has {data_path.stat().st_size} bytes where its manifest says {found.bytes}: it is torn.")
    with data_path.open("rb", buffering=0) as file:
        for state, record in zip(states, found.sub_groups, strict=True):
            for tensor in _tensors(state):
                _read_into(file.fileno(), tensor, data_path)
            state.set_step(record.step)


def differences(found: Manifest, expected: Manifest) -> Iterator[str]:
    """What keeps ``found`` from being loaded where ``expected`` is, in words."""
    for name in ("schema", "deepspeed", "mode", "engine", "ratio", "rank", "ranks", "byteorder"):
        saved, here = getattr(found, name), getattr(expected, name)
        if saved != here:
            yield f"{name}: saved with {saved}, this run has {here}"
    if len(found.sub_groups) != len(expected.sub_groups):
        yield f"sub-groups: saved {len(found.sub_groups)}, this run has {len(expected.sub_groups)} (offload.sub_group_size changed?)"
        return
    for index, (saved_group, group) in enumerate(zip(found.sub_groups, expected.sub_groups, strict=True)):
        if not saved_group.moments or not group.moments:
            yield (
                f"sub-group {index}: DeepSpeed's own SuperOffload engine keeps Adam's moments out of reach, so a run with it cannot be "
                'resumed exactly; train with offload.engine = "so-tui"'
            )
        elif saved_group.names != group.names:
            position = next((i for i, pair in enumerate(zip(saved_group.names, group.names, strict=False)) if pair[0] != pair[1]), None)
            detail = "" if position is None else f": {saved_group.names[position]} against {group.names[position]}"
            yield f"sub-group {index}: other parameters or another order{detail}"
        elif saved_group.numel != group.numel:
            yield f"sub-group {index}: saved {saved_group.numel} elements, this run has {group.numel}"
        elif saved_group.device != group.device:
            yield f"sub-group {index}: saved on {saved_group.device}, this run keeps it on {group.device}"


def _paths(folder: Path, rank: int) -> tuple[Path, Path]:
    return folder / f"rank_{rank:05d}.states", folder / f"rank_{rank:05d}.json"


def _tensors(state: SubGroupState) -> Iterator[torch.Tensor]:
    yield state.master
    if state.exp_avg is not None and state.exp_avg_sq is not None:
        yield state.exp_avg
        yield state.exp_avg_sq


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.numpy()
    return memoryview(array).cast("B")


def _write_all(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view) :]


def _read_into(descriptor: int, tensor: torch.Tensor, path: Path) -> None:
    target = tensor if tensor.device.type == "cpu" else torch.empty(tensor.shape, dtype=tensor.dtype)
    view = _bytes_of(target)
    while view:
        got = os.readv(descriptor, [view])
        if got == 0:
            raise OffloadError(f"{path} ended early: it is torn.")
        view = view[got:]
    if target is not tensor:
        tensor.copy_(target)
