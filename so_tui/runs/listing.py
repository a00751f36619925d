"""All the runs there are: creating one, listing them, finding one by what a user would type.

Runs live in the default folder or where ``--runs-dir`` says; folders other than the default are remembered in ``run-folders`` in the
XDG state folder, one path a line, so that ``so-tui runs`` shows those runs too.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from so_tui.runs.directory import RunDirectory
from so_tui.runs.liveness import state_with_truth
from so_tui.runs.records import FINAL_STATES, RunState
from so_tui.runs.state import write_spec, write_state
from so_tui.spec.errors import InputError, Problem, Refusal, Refused
from so_tui.spec.files import path_fault
from so_tui.spec.folders import state_home
from so_tui.spec.types import RunSpec

LATEST = "latest"


def default_runs_dir() -> Path:
    """``$SO_TUI_RUNS_DIR``, or ``runs`` in the XDG state folder."""
    override = os.environ.get("SO_TUI_RUNS_DIR", "")
    return Path(override).expanduser().absolute() if override else state_home() / "runs"


def probes_dir() -> Path:
    """Where ``plan --probe`` trains: such runs are nobody's latest and in no list, and one that failed is found by its path."""
    return state_home() / "probes"


def create_run(spec: RunSpec, runs_dir: Path | None = None, name: str | None = None) -> RunDirectory:
    """Makes a new run directory with ``spec.json`` and the state ``created``; two creators never get the same one.

    Without a name it is the spec's with a short suffix (``tiny-0412-a3``). Raises InputError when the folder cannot be written, when the
    disk is full or when the name is taken; nothing is left behind then.
    """
    folder = (runs_dir or default_runs_dir()).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        run = _claim(folder, name) if name else _claim_new(folder, spec.name)
    except FileExistsError as error:
        raise _unusable(folder, f"there is a run {name} already" if name else str(error), "Choose another name.") from error
    except OSError as error:
        raise _unusable(folder, f"cannot make a run here: {error.strerror}", "Choose another folder with --runs-dir.") from error
    try:
        for part in (run.attempts_dir, run.metrics_dir, run.control_dir):
            part.mkdir()
        write_state(run, RunState(name=run.name, state="created", started=time.time()))
        write_spec(run, spec)  # last: by its spec a run is found, and found it must be whole
    except OSError as error:
        with contextlib.suppress(OSError):
            _remove(run.path)
        remedy = "Free some space there, or choose another folder with --runs-dir."
        raise _unusable(folder, f"cannot write the run: {error.strerror}", remedy) from error
    if folder not in (default_runs_dir(), probes_dir()):
        _remember(folder)
    return run


def list_runs(runs_dir: Path | None = None) -> tuple[RunDirectory, ...]:
    """Every run, newest first: those of the given folder alone, or of the default folder and the remembered ones."""
    folders = (runs_dir.expanduser().absolute(),) if runs_dir else known_folders()
    found = {run.path: made for folder in folders for run, made in _runs_in(folder)}
    return tuple(RunDirectory(path) for path in sorted(found, key=lambda path: (found[path], path.name), reverse=True))


def find_run(run: str, runs_dir: Path | None = None) -> RunDirectory:
    """The run with this name or path, or the newest for ``latest``. Raises InputError, naming the nearest ones."""
    if "/" in run or run in (".", ".."):
        if fault := path_fault(run):
            raise _not_found(run, fault, "Give the folder of a run, or a name from `so-tui runs`.")
        directory = RunDirectory(Path(run).expanduser().absolute())
        if directory.spec_path.is_file():
            return directory
        raise _not_found(run, "no run lies there", "Give the folder that holds its spec.json, or a name from `so-tui runs`.")
    runs = list_runs(runs_dir)
    if run == LATEST and runs:
        return runs[0]
    named = [known for known in runs if known.name == run]
    if len(named) > 1:
        raise _not_found(run, "several runs have this name", "Give the path: " + ", ".join(str(known.path) for known in named) + ".")
    if named:
        return named[0]
    if not runs:
        raise _not_found(run, "there is no run yet", "Start one with `so-tui run PRESET`, or say where they are with --runs-dir.")
    import difflib  # only for the message

    near = difflib.get_close_matches(run, [known.name for known in runs], n=3, cutoff=0.4) or [known.name for known in runs[:3]]
    raise _not_found(run, "there is no such run", f"Did you mean {' or '.join(near)}? `so-tui runs` lists them all.")


def delete_run(run: RunDirectory) -> None:
    """Deletes a run that has ended, with the checkpoints in its folder (those kept elsewhere stay).

    Raises Refused while it lives, InputError when the folder is no run or cannot be deleted.
    """
    state = state_with_truth(run)
    if state.state not in FINAL_STATES and state.host:
        raise Refused([Refusal("run-is-live", f"{run.name} is {state.state} on {state.host}. Stop it first: so-tui stop {run.name}")])
    hidden = run.path.with_name(f".{run.name}.deleted")
    try:
        run.path.rename(hidden)  # gone at once for every reader, however long the rest takes
        _remove(hidden)
    except OSError as error:
        message = f"cannot be deleted: {error.strerror}"
        raise InputError([Problem(field="run", value=str(run.path), message=message, remedy="Check who owns its folder.")]) from error


def known_folders() -> tuple[Path, ...]:
    """The default folder and the remembered ones, each once."""
    try:
        remembered = _remembered_path().read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # nothing remembered, or not ours to read: the default folder is always there to look at
        remembered = []
    others = (Path(line) for line in remembered if line.startswith("/"))
    return tuple(dict.fromkeys((default_runs_dir(), *(folder for folder in others if folder != probes_dir()))))


def _remembered_path() -> Path:
    return state_home() / "run-folders"


def _remember(folder: Path) -> None:
    if folder in known_folders() or "\n" in str(folder):
        return
    # Without this note the run is only harder to find (by its path); a home that cannot be written is no reason to refuse it.
    with contextlib.suppress(OSError):
        path = _remembered_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{folder}\n")


def _runs_in(folder: Path) -> list[tuple[RunDirectory, int]]:
    """The runs of a folder with their time of creation (ns); none when the folder is missing or not ours to read."""
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError), os.scandir(folder) as entries:
        for entry in entries:
            run = RunDirectory(Path(entry.path))
            with contextlib.suppress(OSError):  # no spec.json: not a run, or not yet
                found.append((run, run.spec_path.stat().st_mtime_ns))
    return found


def _claim_new(folder: Path, stem: str) -> RunDirectory:
    day = time.strftime("%m%d")
    for attempt in range(20):
        with contextlib.suppress(FileExistsError):
            return _claim(folder, f"{stem}-{day}-{os.urandom(1 + attempt // 10).hex()}")
    raise FileExistsError(f"no free name for {stem}")


def _claim(folder: Path, name: str) -> RunDirectory:
    path = folder / name
    path.mkdir()  # fails when another creator was first
    return RunDirectory(path)


def _remove(path: Path) -> None:
    import shutil  # pulls in every compression module: not for those who only list runs

    shutil.rmtree(path)


def _unusable(folder: Path, message: str, remedy: str) -> InputError:
    return InputError([Problem(field="--runs-dir", value=str(folder), message=message, remedy=remedy)])


def _not_found(run: str, message: str, remedy: str) -> InputError:
    return InputError([Problem(field="run", value=run, message=message, remedy=remedy)])
