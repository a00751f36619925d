"""The folder of a run's checkpoints: finding, verifying, writing and removing them. Independent of the engine and of other ranks.

step-000060             valid: renamed to this after all ranks had written it
step-000080.partial     being written or removed, or left behind by a process that was killed
step-000070.damaged     was not readable when the run was resumed, which continued from an older one
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
"""Files up to this size are checked as a whole; only the optimizer states of real models are larger."""


class Manifest(Struct, frozen=True, kw_only=True):
    """What a checkpoint belongs to. It is written last, so a folder without it is not a checkpoint."""

    schema: int = SCHEMA
    step: int
    total_steps: int
    ranks: int
    consumed_sequences: int
    """Position in the data, independent of the number of ranks and of batch sizes."""
    useful_tokens: int
    """Of all steps so far."""
    trained_tokens: int
    """Of all steps so far."""
    data: str
    """Fingerprint of the trained documents."""
    last_loss: float | None
    spec: RunSpec
    files: dict[str, int] = {}
    """Bytes of every other file."""
    checksums: dict[str, int] = {}
    """CRC-32 of the small files. Files of states have checksums of samples themselves."""


class Damage(NamedTuple):
    """A checkpoint that cannot be read, and why."""

    path: Path
    code: str
    """``torn``, ``checksum``, ``unreadable``, or another code of OffloadError."""
    reason: str


class Found(NamedTuple):
    """A readable checkpoint."""

    path: Path
    manifest: Manifest
    damaged: tuple[Damage, ...]
    """Newer checkpoints that cannot be read."""


def folder_of(run: RunDirectory, spec: RunSpec) -> Path:
    """Return the folder of a run's checkpoints. A folder that the spec names may serve several runs."""
    return Path(spec.checkpoint.folder).expanduser() / run.name if spec.checkpoint.folder else run.checkpoints_dir


def newest(folder: Path) -> Found | None:
    """Return the newest readable checkpoint; None if there is no checkpoint at all.

    Raises:
        TrainingError: There are checkpoints but none can be read. Starting anew would lose their training.
    """
    damaged: list[Damage] = []
    for path in reversed(_checkpoints(folder)):
        try:
            return Found(path, verify(path), tuple(damaged))
        except (OSError, msgspec.DecodeError, superoffload.OffloadError) as error:
            if not path.is_dir():  # Not damaged: a running attempt has replaced it by a newer one.
                return newest(folder)
            code = error.code if isinstance(error, superoffload.OffloadError) else "unreadable"
            damaged.append(Damage(path, code, f"{_MANIFEST}: {error}" if isinstance(error, msgspec.DecodeError) else str(error)))
    if damaged:
        reasons = "; ".join(f"{damage.path.name}: {damage.reason}" for damage in damaged)
        reason = f"none of the checkpoints in {folder} can be read ({reasons})"
        suggestion = "Another version of so-tui may have written them. Move them elsewhere to start anew."
        raise TrainingError("checkpoints-unreadable", reason, suggestion)
    return None


def verify(checkpoint: Path) -> Manifest:
    """Verify that a checkpoint is readable: every file with its size, and samples of the states with their checksums.

    Raises:
        OSError: A file cannot be read.
        msgspec.DecodeError: The manifest is damaged.
        OffloadError: A file is damaged.
    """
    manifest = read_manifest(checkpoint)
    for name, size in manifest.files.items():
        if (found := (checkpoint / name).stat().st_size) != size:
            message = f"{checkpoint / name} has {found} bytes, but the checkpoint says {size}: it is incomplete."
            raise superoffload.OffloadError(message, code="torn")
    for name, checksum in manifest.checksums.items():
        if zlib.crc32((checkpoint / name).read_bytes()) != checksum:
            raise superoffload.OffloadError(f"{checkpoint / name} is not what was written (its checksum differs).", code="checksum")
    superoffload.verify_state(optimizer_folder(checkpoint))
    return manifest


def read_manifest(checkpoint: Path) -> Manifest:
    """Read a checkpoint's manifest.

    Raises:
        OSError: The folder is not a complete checkpoint.
        msgspec.DecodeError: The manifest is damaged.
    """
    return msgspec.json.decode((checkpoint / _MANIFEST).read_bytes(), type=Manifest)


def optimizer_folder(checkpoint: Path) -> Path:
    """Return the folder of the optimizer states."""
    return checkpoint / "optimizer"


def set_aside(damaged: Path) -> Path:
    """Rename an unreadable checkpoint so that it is no longer considered.

    Returns:
        Its new path.

    Raises:
        OSError: It cannot be renamed.
    """
    name = damaged.name + _DAMAGED
    names = itertools.chain([name], (f"{name}.{number}" for number in itertools.count(2)))
    return damaged.rename(next(path for path in map(damaged.with_name, names) if not path.exists()))


def make_room(folder: Path, needed_bytes: int, field: str, *, elsewhere: bool = False) -> None:
    """Remove partial checkpoints of killed processes, and check the free space.

    Args:
        folder: The folder of the run's checkpoints.
        needed_bytes: Size of a checkpoint.
        field: What the user sets to change the folder.
        elsewhere: The folder is outside of the run's own folder, so its parents may be created.

    Raises:
        TrainingError: A checkpoint does not fit beside the existing ones.
    """
    folder.mkdir(parents=elsewhere, exist_ok=True)
    for left in folder.glob(f"*{_PARTIAL}"):
        shutil.rmtree(left)
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise TrainingError(
            "disk-full",
            f"{field} = {folder}: a checkpoint needs {disk_size(needed_bytes)}, but only {disk_size(free_bytes)} are free",
            "Free some space there, of older checkpoints say, then resume. A new run can set `checkpoint.folder` to a larger disk.",
        )


def begin(folder: Path, step: int) -> Path:
    """Create the partial folder of a new checkpoint."""
    partial = folder / f"step-{step:06d}{_PARTIAL}"
    partial.mkdir()
    optimizer_folder(partial).mkdir()
    return partial


def complete(partial: Path, manifest: Manifest) -> Path:
    """Publish what all ranks have written, verify it, and only then remove checkpoints beyond ``checkpoint.keep``.

    Returns:
        The path of the checkpoint.

    Raises:
        OSError: It cannot be written or read back. Earlier checkpoints still exist.
        msgspec.DecodeError: The manifest is damaged.
        OffloadError: A file is damaged.
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
    if final.exists():  # The same step again, after resuming from an older checkpoint.
        set_aside(final)
    partial.rename(final)
    _sync(final.parent)
    verify(final)
    for old in _checkpoints(final.parent)[: -manifest.spec.checkpoint.keep]:
        shutil.rmtree(old.rename(old.with_name(old.name + _PARTIAL)))  # Renamed first: half removed, it is no checkpoint.
    return final


def _checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints by step, as of one moment: a listing that takes long could miss a replaced and the replacing one."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        found = [folder / entry.name for entry in entries if _NAME.fullmatch(entry.name) and entry.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def _sync(folder: Path) -> None:
    """Sync a folder, so that the names in it survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
