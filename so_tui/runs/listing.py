"""Create runs, list them, and find one by the text that a user types.

Runs are stored in the default folder or in that of ``--runs-dir``. Other folders than the default
are recorded in ``run-folders`` in the XDG state folder, one path per line, so that ``so-tui runs``
lists their runs as well.

Problem codes:
    name-taken: A run of this name exists.
    invalid-run-name: The text cannot be what a run is called.
    runs-dir-not-writable: The run directory cannot be created or written.
    unknown-run, ambiguous-run, no-runs: No run has this name, several have it, or there are none at
    all.
    not-a-run: The path is not a run directory.
    run-not-readable: The path is in a folder that this user may not open, such as another user's
        run.
    invalid-path: The text cannot be a path.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from so_tui.folders import (
    default_runs_dir,
    known_runs_dirs,
    probes_dir,
    run_folders_record,
    state_home,
)
from so_tui.runs.directory import (
    RunDirectory,
    asked_run,
    write_manifest,
    write_run_json,
)
from so_tui.runs.lock import ended_state, lock_held, run_lock
from so_tui.runs.records import RunState
from so_tui.runs.state import read_state, write_spec, write_state
from so_tui.spec.check import path_fault
from so_tui.spec.errors import reject, shown
from so_tui.spec.run_spec import RunSpec
from so_tui.trust.decoding import prepare, readable_json
from so_tui.trust.files import Distrust, distrust_of_folder
from so_tui.trust.folders import (
    SHARE_VARIABLE,
    WITH_GROUP,
    close_to_group,
    make_folders,
    make_run_folder,
)
from so_tui.trust.text import printable_line

LATEST = "latest"
LONGEST_NAME = 48
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{LONGEST_NAME - 1}}}")
"""What a run is called becomes the name of folders and of a job."""
DELETED = ".deleted"
"""Ends the hidden name of a run's folder while it is being deleted, or if a part of it could not
be.
"""
_SUFFIX_BYTES = 3
"""Random bytes at the end of a run's name: people share folders of checkpoints, where two runs of
one name would meet.
"""


def checked_name(text: str) -> str:
    """Return what a user calls a run.

    Raises:
        InputError: It cannot begin the name of a folder.
    """
    if not _NAME.fullmatch(text):
        raise reject(
            "invalid-run-name",
            "name",
            shown(text),
            "is not a name for a run",
            f"Use up to {LONGEST_NAME} letters, digits, '.', '_' and '-', starting with a letter "
            "or digit.",
        )
    return text


def create_run(spec: RunSpec, runs_dir: Path | None = None, *, called: str = "") -> RunDirectory:
    """Create a run directory with ``spec.json`` and the state ``created``. Two processes never get
    the same directory.

    Args:
        spec: What the run trains.
        runs_dir: Folder of the run; the default folder if absent.
        called: What the user calls it; by default the name of the spec. A short suffix makes it the
            name of the run (``tiny-0412-a3f09c``).

    Raises:
        InputError: If the folder cannot be written, the disk is full, the name is taken, or it
            cannot be called so. Nothing is left behind.
    """
    stem = checked_name(called) if called else spec.name
    folder = (runs_dir or default_runs_dir()).expanduser().absolute()
    try:
        shared = os.environ.get(SHARE_VARIABLE) == WITH_GROUP
        make_folders(folder, shared=shared)
        for made in (state_home(), folder) if state_home() in folder.parents else ():
            close_to_group(made)
        suffix = f"{time.strftime('%m%d')}-{os.urandom(_SUFFIX_BYTES).hex()}"
        run = RunDirectory(folder / f"{stem}-{suffix}")
        make_run_folder(run.path, shared=shared)  # fails if another process was first
        _fill(run, spec, shared=shared)
    except FileExistsError as error:
        raise reject(
            "name-taken", "--runs-dir", str(folder), str(error), "Choose another name."
        ) from error
    except OSError as error:
        raise reject(
            "runs-dir-not-writable",
            "--runs-dir",
            str(folder),
            f"a run cannot be created here: {error.strerror}",
            "Free some space there, or choose another folder with --runs-dir.",
        ) from error
    if folder not in (default_runs_dir(), probes_dir()):
        _record_folder(folder)
    return run


def _fill(run: RunDirectory, spec: RunSpec, *, shared: bool) -> None:
    """Write what a new run has, or remove its folder. Raises OSError."""
    try:
        for part in (run.attempts_dir, run.metrics_dir, run.control_dir):
            make_run_folder(part, shared=shared)
        write_manifest(run)
        write_state(run, RunState(name=run.name, state="created", started=time.time()))
        write_spec(run, spec)  # last: a folder with a spec is listed as a run and must be complete
    except OSError:
        import shutil  # imports every compression module, which listing runs does not need

        shutil.rmtree(run.path, ignore_errors=True)
        raise


def list_runs(runs_dir: Path | None = None) -> tuple[RunDirectory, ...]:
    """Return all runs of one folder, or of the default folder and the recorded ones, newest
    first.
    """
    folders = (runs_dir.expanduser().absolute(),) if runs_dir else known_runs_dirs()
    found = {run.path: made for folder in folders for run, made in _runs_in(folder)}
    return tuple(
        RunDirectory(path)
        for path in sorted(found, key=lambda path: (found[path], path.name), reverse=True)
    )


def find_run(run: str, runs_dir: Path | None = None) -> RunDirectory:
    """Return the run with this name or path. ``latest`` is the newest of this user, whatever others
    put into the same folder, or the newest if this user has none. Raises InputError with similar
    names if there is none.
    """
    if "/" in run or run in (".", ".."):
        if fault := path_fault(run):
            raise reject(
                "invalid-path",
                "run",
                run,
                fault,
                "Give the folder of a run, or a name from `so-tui runs`.",
            )
        directory = RunDirectory(Path(run).expanduser().absolute())
        try:
            if directory.spec_path.is_file():
                return directory
        except OSError as error:
            remedy = (
                "Ask its owner, who can share new runs with the group: "
                f"{SHARE_VARIABLE}={WITH_GROUP}."
                if isinstance(error, PermissionError)
                else "Check that its file system is mounted and answers, then try again."
            )
            message = f"its folder cannot be read: {error.strerror}"
            raise reject("run-not-readable", "run", run, message, remedy) from error
        raise reject(
            "not-a-run",
            "run",
            run,
            "there is no run",
            "Give the folder that contains its spec.json, or a name from `so-tui runs`.",
        )
    runs = list_runs(runs_dir)
    if run == LATEST and runs:
        mine = (
            known for known in runs if distrust_of_folder(known.path) is not Distrust.OTHER_OWNER
        )
        return next(mine, runs[0])
    named = [known for known in runs if known.name == run]
    if len(named) > 1:
        paths = ", ".join(str(known.path) for known in named)
        raise reject(
            "ambiguous-run", "run", run, "several runs have this name", f"Give the path: {paths}."
        )
    if named:
        return named[0]
    if not runs:
        raise reject(
            "no-runs",
            "run",
            run,
            "there are no runs yet",
            "Start one with `so-tui run PRESET`, or give their folder with --runs-dir.",
        )
    import difflib  # only for the message

    names = [known.name for known in runs]
    near = difflib.get_close_matches(run, names, n=3, cutoff=0.6)
    near += [name for name in names if run and run in name and name not in near]
    meant = f"Did you mean {' or '.join(near[:3])}? " if near else ""
    remedy = f"{meant}`so-tui runs` lists them all."
    raise reject("unknown-run", "run", run, "there is no such run", remedy)


def _record_folder(folder: Path) -> None:
    if folder in known_runs_dirs() or "\n" in str(folder):
        return
    # Without this record the run can still be found by its path, so a read-only home is no reason
    # to refuse it.
    with contextlib.suppress(OSError):
        path = run_folders_record()
        make_folders(path.parent)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "a", encoding="utf-8") as file:
            file.write(f"{folder}\n")


def _runs_in(folder: Path) -> list[tuple[RunDirectory, int]]:
    """Return the runs of a folder with their creation time (ns); empty if the folder is missing or
    not readable.
    """
    found = []
    with (
        contextlib.suppress(OSError),
        os.scandir(folder) as entries,
    ):  # also a file system that is away: what it told so far remains
        for entry in entries:
            if entry.name.startswith(".") and entry.name.endswith(DELETED):
                continue
            run = RunDirectory(Path(entry.path))
            try:
                found.append((run, run.spec_path.stat().st_mtime_ns))
            except (FileNotFoundError, NotADirectoryError, PermissionError):
                continue  # no spec.json: not a run, one that is being created, or another user's
            except OSError:
                # a stale handle or a broken disk: it may be a run, which is listed last, as
                # unreadable
                found.append((run, 0))
    return found


# Delete runs.
#
# Problem and refusal codes: run-is-live, run-may-be-live, not-your-run: see ``ended`` and ``own``.
# not-deletable: The run directory, or a part of it, cannot be deleted.


def delete_run(run: RunDirectory, *, assume_dead: bool = False) -> None:
    """Delete a run that has ended, with the checkpoints in its folder. Checkpoints in other folders
    stay.

    The supervisor's lock is held meanwhile, so no attempt can begin between the check and the
    deletion.

    Args:
        run: The run.
        assume_dead: Take the user's word that it has ended, where its processes cannot be seen from
            here.

    Raises:
        Refused: It is another user's.
        InputError: It is live or may be, its folder is not a run, or it cannot be deleted.
    """
    try:
        with asked_run(run) as own:
            _ended(own, assume_dead)
            with run_lock(own, assume_dead=assume_dead) as lock:
                if lock is None:
                    raise lock_held(own, assume_dead=assume_dead)
                _ended(own, assume_dead)
                _remove_run(own)
    except OSError as error:
        raise reject(
            "not-deletable",
            "run",
            str(run.path),
            f"cannot be deleted: {error.strerror}",
            "Check the owner of its folder.",
        ) from error


def _ended(run: RunDirectory, assume_dead: bool) -> RunState:
    """Return the final state of a run, or that of one of which nothing was ever started. Raises
    InputError if it lives or is queued.
    """
    state = read_state(run)
    return state if state.state == "created" else ended_state(run, assume_dead=assume_dead)


def _remove_run(run: RunDirectory) -> None:
    import shutil  # imports every compression module, which listing runs does not need

    hidden = run.path.with_name(f".{run.name}{DELETED}")
    run.path.rename(hidden)  # hides the run from readers immediately; deleting may take long
    if not os.path.samestat(hidden.lstat(), run.at.stat()):
        hidden.rename(run.path)
        raise OSError(errno.ESTALE, "its folder was exchanged meanwhile")
    try:
        for path in run.at.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        hidden.rmdir()
    except OSError as error:
        raise reject(
            "not-deletable",
            "run",
            str(hidden),
            f"is what is left of the run {printable_line(run.name)}, which is no longer listed: "
            f"{error.strerror}",
            "Remove this folder once nobody uses a file in it.",
        ) from error


# A user's own words about a run: ``notes.json`` in its folder, written by its owner, replaced
# atomically.
#
# Problem codes: invalid-tag, too-many-tags, note-too-long: A note or tag is none that is kept.
# notes-not-writable: The file cannot be written.


_LARGEST_BYTES = 1 << 14
LONGEST_NOTE = 2000
MOST_TAGS = 16
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")


class RunNotes(Struct, frozen=True, kw_only=True):
    """Content of ``notes.json``."""

    v: int = 1
    note: str = ""
    tags: tuple[str, ...] = ()


prepare(RunNotes)


def read_notes(run: RunDirectory) -> RunNotes:
    """Return the notes of a run; none if there is no such file, or it is damaged. Tags are checked,
    the note is any text.
    """
    found = readable_json(run.notes_path, RunNotes, limit_bytes=_LARGEST_BYTES) or RunNotes()
    return RunNotes(
        note=found.note[:LONGEST_NOTE],
        tags=tuple(tag for tag in found.tags[:MOST_TAGS] if _TAG.fullmatch(tag)),
    )


def write_notes(run: RunDirectory, notes: RunNotes) -> None:
    """Replace the notes of a run of this user.

    Raises:
        Refused: It is another user's run.
        InputError: The note or a tag cannot be kept, or the file cannot be written.
    """
    if len(notes.note) > LONGEST_NOTE:
        raise reject(
            "note-too-long", "note", "", f"has more than {LONGEST_NOTE} characters", "Shorten it."
        )
    if len(notes.tags) > MOST_TAGS:
        raise reject("too-many-tags", "tags", "", f"are more than {MOST_TAGS}", "Remove some.")
    for tag in notes.tags:
        if not _TAG.fullmatch(tag):
            raise reject(
                "invalid-tag",
                "tag",
                shown(tag),
                "is not a tag",
                "Use up to 32 letters, digits, '.', '_' and '-', starting with a letter or digit.",
            )
    try:
        with asked_run(run) as own:
            write_run_json(own, own.notes_path, notes)
    except OSError as error:
        raise reject(
            "notes-not-writable",
            "notes",
            str(run.path),
            f"cannot be written: {error.strerror}",
            "Check the disk and the rights of the run's folder.",
        ) from None


def changed_tags(notes: RunNotes, add: Iterable[str] = (), remove: Iterable[str] = ()) -> RunNotes:
    """Return notes with tags added and removed, each once, in their order."""
    gone = set(remove)
    return replace(
        notes, tags=tuple(dict.fromkeys(tag for tag in (*notes.tags, *add) if tag not in gone))
    )
