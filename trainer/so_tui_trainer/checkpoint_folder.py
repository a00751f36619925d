"""The folder of a run's checkpoints: which there are, which of them can be read, which go. Knows no engine and no other rank.

step-000060             valid: it got this name by one rename, when all ranks had written it
step-000080.partial     being written, or being removed; left by a process that was killed
step-000070.damaged     could not be read when the run was resumed; the run went on from an older one
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

import superoffload
from so_tui.runs import RunDirectory
from so_tui.spec import RunSpec
from so_tui.units import disk_size
from so_tui_trainer.failures import TrainingError

SCHEMA = 2
_NAME = re.compile(r"step-(\d{6,})")
_PARTIAL = ".partial"
_DAMAGED = ".damaged"
_MANIFEST = "checkpoint.json"
_SMALL_BYTES = 64 << 20
"""What is read again whole in no time: all but the states of a model worth its name."""


class Manifest(Struct, frozen=True, kw_only=True):
    """What a checkpoint belongs to; written last, so a folder without it is not one."""

    schema: int = SCHEMA
    step: int
    total_steps: int
    ranks: int
    consumed_sequences: int
    """Position in the data, which does not depend on ranks or batch sizes."""
    useful_tokens: int
    """Of all steps so far."""
    trained_tokens: int
    data: str
    """Fingerprint of the documents that the sequences are made of."""
    last_loss: float | None
    spec: RunSpec
    files: dict[str, int] = {}
    """Every other file of the checkpoint, and its bytes."""
    checksums: dict[str, int] = {}
    """CRC-32 of the small ones, whole. Of large files of states a part is sampled, by checksums of their own."""


class Damage(NamedTuple):
    path: Path
    reason: str


class Found(NamedTuple):
    path: Path
    manifest: Manifest
    damaged: tuple[Damage, ...]
    """Newer ones that could not be read."""


def folder_of(run: RunDirectory, spec: RunSpec) -> Path:
    """Where a run's checkpoints lie; a folder of the spec may serve several runs."""
    return Path(spec.checkpoint.folder).expanduser() / run.name if spec.checkpoint.folder else run.checkpoints_dir


def newest(folder: Path) -> Found | None:
    """The newest checkpoint that is proven readable; None when there is none at all.

    Raises TrainingError when there are some and none can be read: starting anew would throw their training away.
    """
    damaged: list[Damage] = []
    for path in reversed(_checkpoints(folder)):
        try:
            return Found(path, verify(path), tuple(damaged))
        except (OSError, msgspec.DecodeError, superoffload.OffloadError) as error:
            if not path.is_dir():  # not damaged: a run that goes on has replaced it by a newer one meanwhile
                return newest(folder)
            damaged.append(Damage(path, f"{_MANIFEST}: {error}" if isinstance(error, msgspec.DecodeError) else str(error)))
    if damaged:
        reasons = "; ".join(f"{damage.path.name}: {damage.reason}" for damage in damaged)
        reason = f"none of the checkpoints in {folder} can be read ({reasons})"
        raise TrainingError(reason, "They may be of another version of so-tui. Move them elsewhere to start anew.")
    return None


def verify(checkpoint: Path) -> Manifest:
    """Prove a checkpoint readable: every file there and of its size, and samples of the states as they were written.

    Raises OSError, msgspec.DecodeError or OffloadError, which say what is wrong.
    """
    manifest = read_manifest(checkpoint)
    for name, size in manifest.files.items():
        if (found := (checkpoint / name).stat().st_size) != size:
            raise superoffload.OffloadError(f"{checkpoint / name} has {found} bytes where the checkpoint says {size}: it is torn.")
    for name, checksum in manifest.checksums.items():
        if zlib.crc32((checkpoint / name).read_bytes()) != checksum:
            raise superoffload.OffloadError(f"{checkpoint / name} does not hold what was written (its checksum is another).")
    superoffload.verify_state(optimizer_folder(checkpoint))
    return manifest


def read_manifest(checkpoint: Path) -> Manifest:
    """Raises OSError or msgspec.DecodeError when the folder is not a whole checkpoint."""
    return msgspec.json.decode((checkpoint / _MANIFEST).read_bytes(), type=Manifest)


def optimizer_folder(checkpoint: Path) -> Path:
    return checkpoint / "optimizer"


def set_aside(damaged: Path) -> Path:
    """Take a checkpoint that cannot be read out of the count, without deleting it; returns where it is now. Raises OSError."""
    name = damaged.name + _DAMAGED
    names = itertools.chain([name], (f"{name}.{number}" for number in itertools.count(2)))
    return damaged.rename(next(path for path in map(damaged.with_name, names) if not path.exists()))


def make_room(folder: Path, needed_bytes: int, field: str, *, elsewhere: bool = False) -> None:
    """Remove what a killed process left, and raise TrainingError when a checkpoint does not fit beside those that are there.

    ``elsewhere``: the folder does not lie in the run's own, which was made before and is not made anew when somebody deletes it.
    """
    folder.mkdir(parents=elsewhere, exist_ok=True)
    for left in folder.glob(f"*{_PARTIAL}"):
        shutil.rmtree(left)
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise TrainingError(
            f"{field} = {folder}: a checkpoint needs {disk_size(needed_bytes)}, and {disk_size(free_bytes)} are free",
            "Make room there, then resume it; older checkpoints may go. A new run can name a larger disk in `checkpoint.folder`.",
        )


def begin(folder: Path, step: int) -> Path:
    """The folder to write a checkpoint into, which is none yet."""
    partial = folder / f"step-{step:06d}{_PARTIAL}"
    partial.mkdir()
    optimizer_folder(partial).mkdir()
    return partial


def complete(partial: Path, manifest: Manifest) -> Path:
    """Make what all ranks have written a checkpoint, prove it readable, and only then remove those beyond ``checkpoint.keep``.

    Returns where it is. Raises OSError, msgspec.DecodeError or OffloadError; those before it are there still.
    """
    written = {str(path.relative_to(partial)): path.stat().st_size for path in sorted(partial.rglob("*")) if path.is_file()}
    checksums = {name: zlib.crc32((partial / name).read_bytes()) for name, size in written.items() if size <= _SMALL_BYTES}
    with (partial / _MANIFEST).open("wb") as file:
        file.write(msgspec.json.encode(msgspec.structs.replace(manifest, files=written, checksums=checksums)))
        file.flush()
        os.fsync(file.fileno())
    for path in (optimizer_folder(partial), partial):
        _sync(path)
    final = partial.with_name(partial.name.removesuffix(_PARTIAL))
    if final.exists():  # the same step again: this run went on from an older one
        set_aside(final)
    partial.rename(final)
    _sync(final.parent)
    verify(final)
    for old in _checkpoints(final.parent)[: -manifest.spec.checkpoint.keep]:
        shutil.rmtree(old.rename(old.with_name(old.name + _PARTIAL)))  # half removed, it is none
    return final


def _checkpoints(folder: Path) -> list[Path]:
    """Ascending by step. As of one moment: asked one by one, each could be gone and the newer one not have been there yet."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        found = [folder / entry.name for entry in entries if _NAME.fullmatch(entry.name) and entry.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def _sync(folder: Path) -> None:
    """Make names survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
