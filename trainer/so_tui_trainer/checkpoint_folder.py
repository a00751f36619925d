"""The folder of a run's checkpoints: finding, verifying, writing and removing them. Independent of
the engine and of other ranks.

run.json                whose checkpoints these are
step-000060             valid: renamed to this after all ranks had written it
step-000080.partial     being written or removed, or left behind by a process that was killed
step-000070.damaged     was not readable when the run was resumed, which continued from an older one
step-000060.superseded  of a training that the user started over, or written again

A folder belongs to one run. Checkpoints of another identity are neither read nor removed.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import stat
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeVar

import msgspec
from msgspec import Struct

import superoffload
from so_tui.runs import RunDirectory
from so_tui.runs.directory import (
    checkpoint_folders,
    checkpoints_folder,
    listed_checkpoints,
    run_id,
    step_of,
)
from so_tui.spec import RunSpec
from so_tui.spec.check import write_atomic
from so_tui.trust.decoding import decode_json
from so_tui.trust.files import (
    Distrust,
    NotOwnError,
    UnfitFileError,
    distrust_of_folder,
    read_bounded,
)
from so_tui.trust.folders import is_shared, make_run_folder, open_named
from so_tui.trust.text import brief_message, so_tui_command
from so_tui.units import disk_size
from so_tui_trainer.failures import TrainingError
from superoffload import OffloadError
from superoffload.checkpoint import sync

# Room on the disk for a checkpoint: whether there is enough, and removing checkpoints that are no
# longer needed.


PARTIAL = ".partial"
"""Ends the name of a checkpoint that is being written or removed."""
_FREED_BYTES = 1 << 30
"""How much of a file is freed at a time."""


def make_room(folder: Path, needed_bytes: int, field: str) -> None:
    """Remove partial checkpoints of killed processes, and check the free space.

    Args:
        folder: The folder of the run's checkpoints.
        needed_bytes: Size of a checkpoint.
        field: What the user sets to change the folder.

    Raises:
        TrainingError: A checkpoint does not fit beside the existing ones.
    """
    folder.mkdir(exist_ok=True)
    for left in folder.glob(f"*{PARTIAL}"):
        if left.is_dir() and not left.is_symlink():
            _retire(left)
        else:  # A link: what it points to is none of ours.
            left.unlink()
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise TrainingError(
            "disk-full",
            f"{field} = {folder}: a checkpoint needs {disk_size(needed_bytes)}, but only "
            f"{disk_size(free_bytes)} are free",
            "Free some space there, of older checkpoints say, then resume. A new run can set "
            "`checkpoint.folder` to a larger disk.",
        )


def _retire(checkpoint: Path) -> None:
    """Remove a checkpoint that is no longer needed, or say why not. A file that is open on a
    network file system stays, and training continues; the next checkpoint tries again.
    """
    try:
        if checkpoint.suffix != PARTIAL:  # renamed first: half removed, it is no checkpoint
            checkpoint = checkpoint.rename(checkpoint.with_name(checkpoint.name + PARTIAL))
        _remove(checkpoint)
    except OSError as error:
        print(f"{checkpoint} is no longer needed and cannot be removed: {error}", flush=True)


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint's folder, its large files a piece at a time.

    A file system that frees tens of GB at once keeps everyone waiting who writes to it meanwhile.
    Links, and files that have another name elsewhere, are only unlinked.
    """
    for _, _, names, folder in os.fwalk(checkpoint):
        for name in names:
            _empty(name, folder)
    shutil.rmtree(checkpoint)


def _empty(name: str, folder: int) -> None:
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1 or found.st_size <= _FREED_BYTES:
        return
    with suppress(PermissionError):  # it can be unlinked all the same
        descriptor = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        try:
            for size in range(found.st_size - _FREED_BYTES, 0, -_FREED_BYTES):
                os.ftruncate(descriptor, size)
        finally:
            os.close(descriptor)


# Reading what a file system may fail to read for a moment. Such a failure says nothing of what is
# there.


T = TypeVar("T")
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0)
"""Between tries: a file server that restarts, or a path to it that changes, takes this long. The
other ranks wait.
"""
_SAYS_WHAT_IS_THERE = frozenset(
    {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENXIO,
        errno.ENAMETOOLONG,
        errno.EBADMSG,  # with the next, how ext4 and XFS report that their own checksums differ
        errno.EUCLEAN,
    }
)


def _read_with_retries(read: Callable[[Path], T], path: Path) -> T:
    """Return what a function reads, called again after pauses while the file system fails.

    Args:
        read: Reads a checkpoint, or the folder of checkpoints.
        path: What it is called with.

    Raises:
        TrainingError: The file system has failed for long (``checkpoint-read-failed``).
        OSError, OffloadError: What is there is not what was expected.
    """
    pauses_s = iter(_PAUSES_S)
    while True:
        try:
            return read(path)
        except (OSError, OffloadError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            if (
                not isinstance(cause, OSError)
                or isinstance(cause, UnfitFileError | NotOwnError)
                or cause.errno in _SAYS_WHAT_IS_THERE
            ):
                raise  # Reading did not fail: what was read is wrong.
            if (pause_s := next(pauses_s, None)) is None:
                raise TrainingError(
                    "checkpoint-read-failed",
                    f"{path} cannot be read now ({brief_message(str(error))}), and may be whole. "
                    "It is left as it is",
                    "Resume when its file system answers. Should that be never, move it away: an "
                    "older checkpoint is used then, or `--start-over` trains from step 0 again.",
                ) from error
        time.sleep(pause_s)


SCHEMA = 2
_DAMAGED = ".damaged"
SUPERSEDED = ".superseded"
_MANIFEST = "checkpoint.json"
_MARK = "run.json"
_SMALL_BYTES = 64 << 20
"""Files up to this size are checked as a whole; only the optimizer states of real models are
larger.
"""


class Manifest(Struct, frozen=True, kw_only=True):
    """What a checkpoint belongs to. It is written last, so a folder without it is not a
    checkpoint.
    """

    schema: int = SCHEMA
    run: str = ""
    """Identity of the run (``run.json``); empty in checkpoints of runs without one."""
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
    """A checkpoint that cannot be used, and why."""

    path: Path
    code: str
    """``torn``, ``checksum``, ``unreadable``, or another code of OffloadError; ``other-run`` and
    ``misnamed`` if it is whole but not this run's, or not of the step in its name.
    """
    reason: str


class Found(NamedTuple):
    """A readable checkpoint."""

    path: Path
    manifest: Manifest
    damaged: tuple[Damage, ...]
    """Newer ones that cannot be used."""


def claim(run: RunDirectory, spec: RunSpec) -> Path:
    """Return the folder of a run's checkpoints, made and marked as this run's if it does not exist
    yet.

    Raises:
        TrainingError: Another run's checkpoints are there, or somebody else made the folder
            (``checkpoint-folder-taken``).
        OSError: It cannot be made.
    """
    folder = checkpoints_folder(run, spec)
    if folder.exists():
        _refuse_other_run(run, folder)
        return folder
    if spec.checkpoint.folder:
        folder.parent.mkdir(parents=True, exist_ok=True)
    # Marked before it has its name, so that no other run ever finds it unmarked.
    unnamed = folder.with_name(f".{folder.name}.{os.urandom(4).hex()}")
    make_run_folder(unnamed, shared=is_shared(run.path))
    try:
        if run.manifest_path.exists():
            mark = read_bounded(run.manifest_path, _SMALL_BYTES)
            write_atomic(unnamed / _MARK, mark, mode=0o666)
        unnamed.rename(folder)
    except OSError:
        shutil.rmtree(unnamed, ignore_errors=True)
        if not folder.exists():
            raise
        _refuse_other_run(run, folder)
    return folder


def _refuse_other_run(run: RunDirectory, folder: Path) -> None:
    """Refuse a folder that another run or another user made. What is inside the run directory is
    the run's, marked or not.
    """
    own = folder == run.checkpoints_dir
    if (distrust := distrust_of_folder(folder)) is not None:
        raise _taken(folder, f"is not a folder that only you can write ({distrust})")
    try:
        owner = run_id(RunDirectory(folder))
    except (OSError, msgspec.DecodeError) as error:
        raise _taken(folder, f"has a {_MARK} that cannot be read ({error})") from error
    if owner != run_id(run) and (owner or not own):
        raise _taken(folder, "has the checkpoints of another run")


def _taken(folder: Path, why: str) -> TrainingError:
    return TrainingError(
        "checkpoint-folder-taken",
        f"checkpoint.folder: {folder} {why}",
        "Move it away, or start a new run with another `checkpoint.folder`.",
    )


@contextmanager
def own_checkpoint(checkpoint: Path) -> Iterator[Path]:
    """Yield a path that leads to a checkpoint of this user in this process, whatever gets its name
    meanwhile. A link in it is damage, which those find who read it.

    Raises:
        TrainingError: Another user owns a part of it, or can write it (``checkpoint-not-own``).
        OSError: It cannot be opened.
    """
    with open_named(checkpoint) as folder:
        for part in folder.foreign():
            if part.distrust is not Distrust.WRONG_KIND:
                raise TrainingError(
                    "checkpoint-not-own",
                    str(part),
                    "Check what is in it, then take the right to write from others "
                    "(`chmod -R go-w`), or move it away.",
                )
        try:
            yield folder.at
        except OffloadError as error:
            error.args = (str(error).replace(str(folder.at), str(checkpoint)),)
            raise


def newest(folder: Path, run: str = "", name: str = "RUN", *, own: bool = False) -> Found | None:
    """Return the newest readable checkpoint of a run; None if it has no checkpoint at all.

    Args:
        folder: The folder of its checkpoints.
        run: Its identity; empty for a run of an older version.
        name: What it is called, for messages.
        own: Refuse a checkpoint that is not this user's own.

    Raises:
        TrainingError: There are checkpoints but none can be used (``checkpoints-unreadable``), one
            is not this user's own (``checkpoint-not-own``), or their file system does not let one
            be read (``checkpoint-read-failed``). Starting anew, or from an older one, would lose
            training.
    """
    damaged: list[Damage] = []

    def verify(path: Path) -> Manifest:
        with own_checkpoint(path) if own else nullcontext(path) as at:
            return _verify(at)

    for path in reversed(_read_with_retries(listed_checkpoints, folder)):
        try:
            manifest = _read_with_retries(verify, path)
        except (OSError, msgspec.DecodeError, OffloadError) as error:
            if not path.is_dir():  # Not damaged: a running attempt has replaced it by a newer one.
                return newest(folder, run, name, own=own)
            damaged.append(
                Damage(
                    path,
                    error.code if isinstance(error, OffloadError) else "unreadable",
                    brief_message(
                        f"{_MANIFEST}: {error}"
                        if isinstance(error, msgspec.DecodeError)
                        else str(error)
                    ),
                )
            )
            continue
        if (misplaced := _misplaced(path, manifest, run)) is None:
            return Found(path, manifest, tuple(damaged))
        damaged.append(misplaced)
    if damaged:
        reasons = "; ".join(f"{damage.path.name}: {damage.reason}" for damage in damaged)
        raise TrainingError(
            "checkpoints-unreadable",
            f"none of the checkpoints in {folder} can be used ({reasons})",
            "Another version of so-tui may have written them, and can read them. Otherwise "
            f"`{so_tui_command('resume', name, '--start-over')}` trains from step 0 again",
        )
    return None


def _misplaced(path: Path, manifest: Manifest, run: str) -> Damage | None:
    if manifest.run != run:
        return Damage(path, "other-run", "it belongs to another run")
    if manifest.step != step_of(path.name):
        return Damage(path, "misnamed", f"its manifest says step {manifest.step}")
    return None


def _verify(checkpoint: Path) -> Manifest:
    """Verify that a checkpoint is readable: every file with its size, and samples of the states
    with their checksums.

    Raises:
        OSError: A file cannot be read.
        msgspec.DecodeError: The manifest is damaged.
        OffloadError: A file is damaged.
    """
    manifest = read_manifest(checkpoint)
    for name, size in manifest.files.items():
        path = _file_of(checkpoint, name)
        if (found := path.stat().st_size) != size:
            raise OffloadError(
                f"{path} has {found} bytes, but the checkpoint says {size}: it is incomplete.",
                code="torn",
            )
    for name, checksum in manifest.checksums.items():
        path = _file_of(checkpoint, name)
        if zlib.crc32(read_bounded(path, _SMALL_BYTES)) != checksum:
            raise OffloadError(
                f"{path} is not what was written (its checksum differs).", code="checksum"
            )
    superoffload.verify_state(optimizer_folder(checkpoint))
    return manifest


def read_manifest(checkpoint: Path) -> Manifest:
    """Read a checkpoint's manifest.

    Raises:
        OSError: The folder is not a complete checkpoint.
        msgspec.DecodeError: The manifest is damaged.
    """
    if (checkpoint / _MANIFEST).is_symlink():
        raise OSError(errno.ELOOP, f"{_MANIFEST} is a link", str(checkpoint / _MANIFEST))
    return decode_json(read_bounded(checkpoint / _MANIFEST, _SMALL_BYTES), Manifest)


def optimizer_folder(checkpoint: Path) -> Path:
    """Return the folder of the optimizer states."""
    return checkpoint / "optimizer"


def set_aside(checkpoint: Path, suffix: str = _DAMAGED) -> Path:
    """Rename a checkpoint so that it is no longer considered.

    Args:
        checkpoint: Its folder.
        suffix: What its name says about it.

    Returns:
        Its new path.

    Raises:
        OSError: It cannot be renamed.
    """
    name = checkpoint.name + suffix
    names = itertools.chain([name], (f"{name}.{number}" for number in itertools.count(2)))
    return checkpoint.rename(
        next(path for path in map(checkpoint.with_name, names) if not path.exists())
    )


def set_all_aside(folder: Path, run: str) -> None:
    """Set the checkpoints of a run aside, so that its training starts over. None is deleted, and
    other runs' stay as they are.

    Args:
        folder: The folder of its checkpoints.
        run: Its identity; empty for a run of an older version.

    Raises:
        OSError: One cannot be renamed.
    """
    for checkpoint in checkpoint_folders(folder):
        if (manifest := _readable(checkpoint)) is None or manifest.run == run:
            set_aside(checkpoint, SUPERSEDED)


def _readable(checkpoint: Path) -> Manifest | None:
    """Return a checkpoint's manifest; None if it is damaged, which resuming reports."""
    try:
        return read_manifest(checkpoint)
    except (OSError, msgspec.DecodeError):
        return None


def begin(folder: Path, step: int) -> Path:
    """Create the partial folder of a new checkpoint."""
    partial = folder / f"step-{step:06d}{PARTIAL}"
    partial.mkdir()
    optimizer_folder(partial).mkdir()
    return partial


def complete(partial: Path, manifest: Manifest) -> Path:
    """Publish what all ranks have written, verify it, and only then remove checkpoints beyond
    ``checkpoint.keep``.

    Returns:
        The path of the checkpoint.

    Raises:
        OSError: It cannot be written or read back. Earlier checkpoints still exist.
        msgspec.DecodeError: The manifest is damaged.
        OffloadError: A file is damaged.
    """
    written = {
        str(path.relative_to(partial)): path.stat().st_size
        for path in sorted(partial.rglob("*"))
        if path.is_file()
    }
    checksums = {
        name: zlib.crc32(read_bounded(partial / name, _SMALL_BYTES))
        for name, size in written.items()
        if size <= _SMALL_BYTES
    }
    described = msgspec.structs.replace(manifest, files=written, checksums=checksums)
    (partial / _MANIFEST).write_bytes(msgspec.json.encode(described))
    for path in (partial / _MANIFEST, optimizer_folder(partial), partial):
        sync(path)
    final = partial.with_name(partial.name.removesuffix(PARTIAL))
    # The same step again, after resuming from an older checkpoint; or something that is none.
    if os.path.lexists(final):
        set_aside(final, SUPERSEDED)
    partial.rename(final)
    sync(final.parent)
    _verify(final)
    # What is not this run's own does not push any of its checkpoints out.
    own = [
        path
        for path in checkpoint_folders(final.parent)
        if (found := _readable(path)) and not _misplaced(path, found, manifest.run)
    ]
    for old in own[: -manifest.spec.checkpoint.keep]:
        _retire(old)
    return final


def _file_of(checkpoint: Path, name: str) -> Path:
    """Return the path of a file that a manifest names. Refuse one outside its checkpoint, below a
    link, or that is no regular file.
    """
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\0" in name:
        raise OffloadError(
            f"the manifest names {name[:200]!r}, which is not inside the checkpoint",
            code="unreadable",
        )
    path = checkpoint / name
    if not stat.S_ISREG(path.lstat().st_mode) or path.resolve() != checkpoint.resolve() / name:
        raise OffloadError(f"{path} is a link or not a regular file.", code="unreadable")
    return path
