"""Converts optimizer states on disk between ours (``checkpoint``) and DeepSpeed's, one parameter at
a time. No engine is needed.

Ours become DeepSpeed's universal format, which its ZeRO-3 loads on any number of ranks
(``"checkpoint": {"load_universal": true}``). What DeepSpeed saved is read from there or from
ZeRO-3's own files. Those are pickles: they are loaded as tensors and plain values only, so reading
them runs no code of theirs.
"""

from __future__ import annotations

import math
import os
import pickle
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import torch
from torch import Tensor

from so_tui.model.sharding import partition_numel
from superoffload.checkpoint import (
    Manifest,
    NamedStates,
    Save,
    SubGroupRecord,
    manifests,
    saved_states,
    sync,
)
from superoffload.errors import OffloadError

_LATEST, _LATEST_UNIVERSAL = "latest", "latest_universal"
_NAME = re.compile(r"\w[\w.-]*")
"""Names of parameters and of steps' folders, which are parts of paths."""
_RANK_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{2})_optim_states\.pt")
_MODEL_FILE = "zero_pp_rank_0_mp_rank_00_model_states.pt"
_KINDS = ("fp32", "exp_avg", "exp_avg_sq")
_LARGEST_TAG_BYTES = 4096


class Progress(NamedTuple):
    """How far a training has come."""

    step: int
    samples: int
    """Sequences of all steps."""
    extra: Mapping[str, Any] = {}
    """More plain values, which DeepSpeed returns as the client's state."""


@dataclass(frozen=True)
class DeepSpeedStates:
    """What DeepSpeed's ZeRO-3 saved of one step."""

    progress: Progress
    adam_step: int
    numels: Mapping[str, int]
    """Elements of each parameter."""
    moments: bool
    """Whether the moments were saved. DeepSpeed's own SuperOffload keeps those of the CPU out of
    reach.
    """
    read: Callable[[], Iterator[NamedStates]]
    """Yields the states of one parameter after another, in the order of ``numels``. Raises
    OffloadError as ``deepspeed_states``.
    """


def deepspeed_states(folder: Path) -> DeepSpeedStates:
    """Return what DeepSpeed saved, in its universal format or in ZeRO-3's own.

    Args:
        folder: The folder given to ``save_checkpoint``, or that of a step in it.

    Raises:
        OffloadError: It is no such folder (``not-deepspeeds``), its files are more than tensors and
            plain values (``unsafe-pickle``), they contradict each other (``unreadable``), or the
            model was cut across ranks (``tensor-parallel``).
    """
    folder = _step_folder(Path(folder))
    model = _load(folder / _MODEL_FILE)
    with _understood(folder):
        extra = model.get("so_tui")
        progress = Progress(
            int(model["global_steps"]),
            int(model["global_samples"]),
            extra if isinstance(extra, dict) else {},
        )
        if (folder / "zero").is_dir():
            return _universal(folder / "zero", progress)
        return _sharded(folder, model["param_shapes"], progress)


def _universal(zero: Path, progress: Progress) -> DeepSpeedStates:
    """Return what is in a universal checkpoint: a folder for each parameter, a file for each of its
    states.
    """
    names = sorted(entry.name for entry in os.scandir(zero) if entry.is_dir(follow_symlinks=False))
    numels = {name: _tensor(_load(zero / name / "fp32.pt")).numel() for name in names}
    moments = all((zero / name / "exp_avg_sq.pt").is_file() for name in names)
    kinds = _KINDS if moments else _KINDS[:1]

    def read() -> Iterator[NamedStates]:
        for name, numel in numels.items():
            files = (_load(zero / name / f"{kind}.pt") for kind in kinds)
            yield name, tuple(_flat(_tensor(loaded), name, numel) for loaded in files)

    optimizer = _load(zero / "optimizer_state.pt")["optimizer_state_dict"]
    return DeepSpeedStates(progress, _adam_step(optimizer, progress), numels, moments, read)


def _sharded(
    folder: Path, shapes: Sequence[Mapping[str, Sequence[int]]], progress: Progress
) -> DeepSpeedStates:
    """Return what is in ZeRO-3's own files: one for each rank, with a flat tensor for each state of
    each sub-group.
    """
    ranks = [_load(path)["optimizer_state_dict"] for path in _rank_files(folder)]
    groups = [{str(name): math.prod(shape) for name, shape in group.items()} for group in shapes]
    moments = all(_has_moments(rank, len(groups)) for rank in ranks)
    kinds = _KINDS if moments else _KINDS[:1]

    def flat_of(rank: Mapping[str, Any], index: int, kind: str) -> Tensor:
        if kind == "fp32":
            return _tensor(rank["fp32_flat_groups"][index])
        return _tensor(rank["optimizer_state_dict"]["state"][index][kind])

    def read() -> Iterator[NamedStates]:
        for index, group in enumerate(groups):
            flats = [[flat_of(rank, index, kind) for rank in ranks] for kind in kinds]
            offset = 0
            for name, numel in group.items():
                shard = partition_numel(numel, len(ranks))
                lengths = [
                    min(shard, max(0, numel - number * shard)) for number in range(len(ranks))
                ]
                wholes = (
                    torch.cat(
                        [
                            flat[offset : offset + length]
                            for flat, length in zip(ranks_flats, lengths, strict=True)
                        ]
                    )
                    for ranks_flats in flats
                )
                yield name, tuple(_flat(whole, name, numel) for whole in wholes)
                offset += shard

    numels = {name: numel for group in groups for name, numel in group.items()}
    adam_step = _adam_step(ranks[0]["optimizer_state_dict"], progress)
    return DeepSpeedStates(progress, adam_step, numels, moments, read)


def _adam_step(optimizer: Mapping[str, Any], progress: Progress) -> int:
    """Return the optimizer's count of steps; that of the training if it has none."""
    steps = (int(state["step"]) for state in optimizer["state"].values() if "step" in state)
    return max(steps, default=progress.step)


def write_universal(
    states: Path, folder: Path, progress: Progress, rename: Callable[[str], str] = str
) -> Path:
    """Write saved states in DeepSpeed's universal format, with the files that ``load_checkpoint``
    looks for.

    States without moments, which DeepSpeed's own SuperOffload saves, get moments of zero at step 0.

    Args:
        states: A folder of states that ``save_state`` wrote, on any number of ranks.
        folder: Where to; it exists and is empty.
        progress: How far the training had come.
        rename: Returns DeepSpeed's name of a parameter for ours.

    Returns:
        The folder of the step.

    Raises:
        OffloadError: A file is missing or cut short, or the name of a parameter cannot be that of a
            folder (``impossible-name``).
        OSError: It cannot be written.
    """
    states, folder = Path(states), Path(folder)
    saved = manifests(states)
    step = saved[0].sub_groups[0].step if saved[0].moments and saved[0].sub_groups else 0
    target = folder / f"global_step{progress.step}"
    (target / "zero").mkdir(parents=True)
    for name, kinds in saved_states(states):
        new = rename(name)
        if not _NAME.fullmatch(new):
            raise OffloadError(
                f"{new!r} cannot be the name of a folder, which a parameter of a universal "
                "checkpoint has.",
                code="impossible-name",
            )
        (target / "zero" / new).mkdir()
        for kind, tensor in zip(
            _KINDS, (kinds[0], *(kinds[1:] or (torch.zeros_like(kinds[0]),) * 2)), strict=True
        ):
            _save(tensor, target / "zero" / new / f"{kind}.pt")
    # Without hyperparameters: DeepSpeed would give those of the first group to all, and the script
    # that loads it has its own.
    adam = {"state": {0: {"step": step}}, "param_groups": [{"params": []}]}
    _save(
        {"optimizer_state_dict": adam, "param_groups": adam["param_groups"]},
        target / "zero" / "optimizer_state.pt",
    )
    model = {
        "module": {},
        "param_shapes": [],
        "lr_scheduler": {"last_batch_iteration": progress.step - 1},
        "skipped_steps": 0,
        "global_steps": progress.step,
        "global_samples": progress.samples,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": deepspeed.__version__,
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
        "so_tui": dict(progress.extra),
    }
    _save(model, target / _MODEL_FILE)
    (folder / _LATEST_UNIVERSAL).write_text(target.name)
    return target


def write_states(source: DeepSpeedStates, folder: Path, rename: Callable[[str], str] = str) -> None:
    """Write what DeepSpeed saved as one rank's states of ours, which any number of ranks can load.

    Args:
        source: DeepSpeed's.
        folder: Where to.
        rename: Returns our name of a parameter for DeepSpeed's.

    Raises:
        OffloadError: As ``deepspeed_states``.
        OSError: It cannot be written.
    """
    records = tuple(
        SubGroupRecord(
            numel,
            "cpu",
            source.adam_step,
            source.moments,
            (rename(name),),
            (numel,),
        )
        for name, numel in source.numels.items()
    )
    described = Manifest(
        deepspeed=deepspeed.__version__,
        mode="gpu",
        engine="deepspeed",
        ratio=0.0,
        rank=0,
        ranks=1,
        sub_groups=records,
    )
    with closing(Save(Path(folder), described)) as file:
        for index, (_, states) in enumerate(source.read()):
            file.write(index, states)
        file.finish()


def _step_folder(folder: Path) -> Path:
    """Return the folder of the step that a folder's file names as its latest, or the folder
    itself.
    """
    for latest in (_LATEST_UNIVERSAL, _LATEST):
        if (path := folder / latest).is_file():
            with path.open("rb") as file:
                name = file.read(_LARGEST_TAG_BYTES).decode(errors="replace").strip()
            if not _NAME.fullmatch(name):
                raise OffloadError(
                    f"{path} names {name[:200]!r}, which is no folder in it.", code="unreadable"
                )
            folder = folder / name
            break
    if not (folder / _MODEL_FILE).is_file():
        raise OffloadError(
            f"{folder} has no {_MODEL_FILE}: it is no checkpoint of DeepSpeed's ZeRO-3, and no "
            "step of one.",
            code="not-deepspeeds",
        )
    return folder


def _rank_files(folder: Path) -> list[Path]:
    """Return the optimizer files of all ranks, in order."""
    found = {}
    for path in folder.iterdir():
        if named := _RANK_FILE.fullmatch(path.name):
            if int(named[2]):
                raise OffloadError(
                    f"{folder} is of a model that was cut across ranks (tensor parallelism).",
                    code="tensor-parallel",
                )
            found[int(named[1])] = path
    if sorted(found) != list(range(len(found))) or not found:
        raise OffloadError(
            f"{folder} lacks the optimizer files of some ranks: it has {len(found)}.",
            code="unreadable",
        )
    return [found[rank] for rank in range(len(found))]


def _has_moments(rank: Mapping[str, Any], groups: int) -> bool:
    state = rank["optimizer_state_dict"]["state"]
    sizes = [flat.numel() for flat in rank["fp32_flat_groups"]]
    return len(sizes) == groups and all(
        index in state
        and all(kind in state[index] and state[index][kind].numel() == size for kind in _KINDS[1:])
        for index, size in enumerate(sizes)
    )


def _flat(tensor: Tensor, name: str, numel: int) -> Tensor:
    if tensor.numel() != numel:
        raise OffloadError(
            f"{name} has {tensor.numel()} elements instead of {numel}.", code="unreadable"
        )
    return tensor.detach().flatten().float().contiguous()


def _tensor(loaded: Any) -> Tensor:
    found = loaded.get("param") if isinstance(loaded, dict) else loaded
    if not isinstance(found, Tensor):
        raise OffloadError("A file of a parameter holds no tensor.", code="unreadable")
    return found


def _save(content: Any, path: Path) -> None:
    torch.save(content, path)
    sync(path)


def _load(path: Path) -> Any:
    """Load a file's tensors, mapped into memory, and plain values. Anything that would run code is
    refused.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    with _understood(path):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise OffloadError(f"{path} is a link or not a regular file.", code="unreadable")
        try:
            # Python 3.11.2 (Debian 12) saves the member of an enum as an attribute that getattr is
            # to read, 3.11.7 does not.
            known = [LossScaler, DynamicLossScaler, ZeroStageEnum, (_stage, "builtins.getattr")]
            with torch.serialization.safe_globals(known):
                return torch.load(  # noqa: TID251 -- with weights_only
                    path, map_location="cpu", weights_only=True, mmap=True
                )
        except pickle.UnpicklingError as error:
            raise OffloadError(
                f"{path} holds more than tensors and plain values, and loading it could run code: "
                f"{str(error).splitlines()[0]}",
                code="unsafe-pickle",
            ) from error


def _stage(kind: object, name: str) -> object:
    """Return a saved stage of ZeRO by its name, in the place of ``getattr``. Raises UnpicklingError
    if it would be anything else.
    """
    from deepspeed.runtime.zero.config import ZeroStageEnum

    stages: dict[str, object] = dict(ZeroStageEnum.__members__)
    if kind is not ZeroStageEnum or name not in stages:
        raise pickle.UnpicklingError(f"getattr of {kind!r} and {name!r}")
    return stages[name]


@contextmanager
def _understood(path: Path) -> Iterator[None]:
    """Turn the errors of reading a damaged or foreign file into OffloadError (``unreadable``)."""
    try:
        yield
    except (
        OSError,
        RuntimeError,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        EOFError,
    ) as error:
        raise OffloadError(
            f"{path} cannot be read: {type(error).__name__}: {error}", code="unreadable"
        ) from error
