"""Create runs, list them, and find one by the text that a user types.

Runs are stored in the default folder or in that of ``--runs-dir``. Other folders than the default are recorded in ``run-folders`` in the
XDG state folder, one path per line, so that ``so-tui runs`` lists their runs as well.

Problem codes:
    name-taken: A run of this name exists.
    invalid-run-name: The text cannot be what a run is called.
    runs-dir-not-writable: The run directory cannot be created or written.
    unknown-run, ambiguous-run, no-runs: No run has this name, several have it, or there are none at all.
    not-a-run: The path is not a run directory.
    run-not-readable: The path is in a folder that this user may not open, such as another user's run.
    invalid-path: The text cannot be a path.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

from so_tui.folders import default_runs_dir, known_runs_dirs, probes_dir, run_folders_record
from so_tui.runs.directory import RunDirectory
from so_tui.runs.manifest import new_manifest, write_manifest
from so_tui.runs.records import RunState
from so_tui.runs.state import write_spec, write_state
from so_tui.spec.errors import InputError, Problem
from so_tui.spec.files import path_fault
from so_tui.spec.types import RunSpec
from so_tui.spec.wording import shown
from so_tui.trust.sharing import GROUP, VARIABLE, is_shared, make_run_folder, wanted

LATEST = "latest"
LONGEST_NAME = 48
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{LONGEST_NAME - 1}}}")
"""What a run is called becomes the name of folders and of a job."""
DELETED = ".deleted"
"""Ends the hidden name of a run's folder while it is being deleted, or if a part of it could not be."""
_SUFFIX_BYTES = 3
"""Random bytes at the end of a run's name: people share folders of checkpoints, where two runs of one name would meet."""


def checked_name(text: str) -> str:
    """Return what a user calls a run.

    Raises:
        InputError: It cannot begin the name of a folder.
    """
    if not _NAME.fullmatch(text):
        message = "is not a name for a run"
        remedy = f"Use up to {LONGEST_NAME} letters, digits, '.', '_' and '-', starting with a letter or digit."
        raise InputError(
            [
                Problem(
                    code="invalid-run-name",
                    field="name",
                    value=shown(text),
                    message=message,
                    remedy=remedy,
                )
            ]
        )
    return text


def create_run(
    spec: RunSpec, runs_dir: Path | None = None, name: str | None = None, *, called: str = ""
) -> RunDirectory:
    """Create a run directory with ``spec.json`` and the state ``created``. Two processes never get the same directory.

    Args:
        spec: What the run trains.
        runs_dir: Folder of the run; the default folder if absent.
        name: Name of the run; by default what it is called with a short suffix (``tiny-0412-a3f09c``).
        called: What the user calls it; by default the name of the spec.

    Raises:
        InputError: If the folder cannot be written, the disk is full, the name is taken, or it cannot be called so. Nothing is left behind.
    """
    stem = checked_name(called) if called else spec.name
    folder = (runs_dir or default_runs_dir()).expanduser().absolute()
    try:
        folder.mkdir(
            parents=True, exist_ok=True
        )  # with the user's umask: others may keep their runs in the same folder
        run = _claim(folder, name) if name else _claim_new(folder, stem)
    except FileExistsError as error:
        message = f"a run named {name} exists already" if name else str(error)
        raise _unusable("name-taken", folder, message, "Choose another name.") from error
    except OSError as error:
        message = f"a run cannot be created here: {error.strerror}"
        raise _unusable(
            "runs-dir-not-writable", folder, message, "Choose another folder with --runs-dir."
        ) from error
    try:
        for part in (run.attempts_dir, run.metrics_dir, run.control_dir):
            make_run_folder(part, shared=is_shared(run.path))
        write_manifest(run, new_manifest(run))
        write_state(run, RunState(name=run.name, state="created", started=time.time()))
        write_spec(run, spec)  # last: a folder with a spec is listed as a run and must be complete
    except OSError as error:
        with contextlib.suppress(OSError):
            _remove(run.path)
        remedy = "Free some space there, or choose another folder with --runs-dir."
        raise _unusable(
            "runs-dir-not-writable", folder, f"the run cannot be written: {error.strerror}", remedy
        ) from error
    if folder not in (default_runs_dir(), probes_dir()):
        _record_folder(folder)
    return run


def list_runs(runs_dir: Path | None = None) -> tuple[RunDirectory, ...]:
    """Return all runs of one folder, or of the default folder and the recorded ones, newest first."""
    folders = (runs_dir.expanduser().absolute(),) if runs_dir else known_runs_dirs()
    found = {run.path: made for folder in folders for run, made in _runs_in(folder)}
    return tuple(
        RunDirectory(path)
        for path in sorted(found, key=lambda path: (found[path], path.name), reverse=True)
    )


def find_run(run: str, runs_dir: Path | None = None) -> RunDirectory:
    """Return the run with this name or path, or the newest for ``latest``. Raises InputError with similar names if there is none."""
    if "/" in run or run in (".", ".."):
        if fault := path_fault(run):
            raise _not_found(
                "invalid-path",
                run,
                fault,
                "Give the folder of a run, or a name from `so-tui runs`.",
            )
        directory = RunDirectory(Path(run).expanduser().absolute())
        try:
            if directory.spec_path.is_file():
                return directory
        except PermissionError:
            remedy = f"Ask its owner, who can share new runs with the group: {VARIABLE}={GROUP}."
            raise _not_found(
                "run-not-readable", run, "you may not read this folder", remedy
            ) from None
        except OSError as error:
            remedy = "Check that its file system is mounted and answers, then try again."
            raise _not_found(
                "run-not-readable", run, f"its folder cannot be read: {error.strerror}", remedy
            ) from error
        remedy = "Give the folder that contains its spec.json, or a name from `so-tui runs`."
        raise _not_found("not-a-run", run, "there is no run", remedy)
    runs = list_runs(runs_dir)
    if run == LATEST and runs:
        return runs[0]
    named = [known for known in runs if known.name == run]
    if len(named) > 1:
        paths = ", ".join(str(known.path) for known in named)
        raise _not_found(
            "ambiguous-run", run, "several runs have this name", f"Give the path: {paths}."
        )
    if named:
        return named[0]
    if not runs:
        remedy = "Start one with `so-tui run PRESET`, or give their folder with --runs-dir."
        raise _not_found("no-runs", run, "there are no runs yet", remedy)
    import difflib  # only for the message

    near = difflib.get_close_matches(run, [known.name for known in runs], n=3, cutoff=0.6)
    near += [known.name for known in runs if run and run in known.name and known.name not in near]
    remedy = (
        f"Did you mean {' or '.join(near[:3])}? `so-tui runs` lists them all."
        if near
        else "`so-tui runs` lists them all."
    )
    raise _not_found("unknown-run", run, "there is no such run", remedy)


def _record_folder(folder: Path) -> None:
    if folder in known_runs_dirs() or "\n" in str(folder):
        return
    # Without this record the run can still be found by its path, so a read-only home is no reason to refuse it.
    with contextlib.suppress(OSError):
        path = run_folders_record()
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "a", encoding="utf-8") as file:
            file.write(f"{folder}\n")


def _runs_in(folder: Path) -> list[tuple[RunDirectory, int]]:
    """Return the runs of a folder with their creation time (ns); empty if the folder is missing or not readable."""
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
            except OSError:  # a stale handle or a broken disk: it may be a run, which is listed last, as unreadable
                found.append((run, 0))
    return found


def _claim_new(folder: Path, stem: str) -> RunDirectory:
    day = time.strftime("%m%d")
    for _ in range(20):
        with contextlib.suppress(FileExistsError):
            return _claim(folder, f"{stem}-{day}-{os.urandom(_SUFFIX_BYTES).hex()}")
    raise FileExistsError(f"no free name for {stem}")


def _claim(folder: Path, name: str) -> RunDirectory:
    path = folder / name
    make_run_folder(path, shared=wanted(os.environ))  # fails if another process was first
    return RunDirectory(path)


def _remove(path: Path) -> None:
    import shutil  # imports every compression module, which listing runs does not need

    shutil.rmtree(path)


def _unusable(code: str, folder: Path, message: str, remedy: str) -> InputError:
    return InputError(
        [Problem(code=code, field="--runs-dir", value=str(folder), message=message, remedy=remedy)]
    )


def _not_found(code: str, run: str, message: str, remedy: str) -> InputError:
    return InputError([Problem(code=code, field="run", value=run, message=message, remedy=remedy)])
