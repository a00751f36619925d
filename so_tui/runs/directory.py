"""Paths of all files of a run. A RunDirectory may be created for a folder that does not exist yet.

RUN/ run.json  spec.json  state.json  notes.json  answers.json
     attempts/001/ launch.json ds_config.json command.json output.<host>.log
                   node1.json launch.node1.json command.node1.json ... of the other nodes of a run
                       on several
     metrics/  samples.<host>/  control/  checkpoints/
"""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

import so_tui
from so_tui.runs.records import RunState
from so_tui.spec.check import write_atomic
from so_tui.spec.errors import Problem, Refusal, Refused
from so_tui.spec.run_spec import RunSpec
from so_tui.trust.decoding import decode_json, prepare
from so_tui.trust.files import (
    Distrust,
    NotOwnError,
    distrust_of_file,
    distrust_of_folder,
    names_in,
    read_bounded,
)
from so_tui.trust.folders import is_shared, make_run_folder, umask_of
from so_tui.trust.text import printable_line, quoted, so_tui_command
from so_tui.units import thousands

_SAMPLES = "samples."
_OUTPUT = "output."
_LOG = ".log"


class _Entry:
    """A file or folder with a fixed name in a run directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDirectory, _owner: type[RunDirectory]) -> Path:
        return run.path / self._name


class _OfAttempt:
    """A file in the folder of an attempt. Its name may have a number, or the number of a node
    after the first.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDirectory, _owner: type[RunDirectory]) -> Callable[..., Path]:
        def path(attempt: int, number: int = 0) -> Path:
            of_node = f".node{number}" if number else ""
            return run.attempt_dir(attempt) / self._name.format(number=number, of_node=of_node)

        return path


@dataclass(frozen=True)
class RunDirectory:
    """Paths of a run; reads nothing but folder listings."""

    path: Path

    manifest_path = _Entry("run.json")
    spec_path = _Entry("spec.json")
    state_path = _Entry("state.json")
    notes_path = _Entry("notes.json")
    """The owner's note and tags."""
    answers_path = _Entry("answers.json")
    """What the model answered to the prompts of the spec."""
    supervisor_lock_path = _Entry("supervisor.lock")
    """Locked (flock) by the supervisor, so that there is only one."""
    metrics_dir = _Entry("metrics")
    control_dir = _Entry("control")
    checkpoints_dir = _Entry("checkpoints")
    """Default folder of checkpoints; ``spec.checkpoint.folder`` overrides it."""
    attempts_dir = _Entry("attempts")
    plan_path = _OfAttempt("plan.json")
    """The plan of an attempt of 0.1.0. Later attempts have it in ``launch.json``."""
    ds_config_path = _OfAttempt("ds_config.json")
    submission_path = _OfAttempt("submission.json")
    """What was submitted, if a scheduler started the attempt."""
    job_script_path = _OfAttempt("job.sh")
    network_path = _OfAttempt("network.json")
    """How fast the network between the nodes was, as the ranks measured it."""
    launch_path = _OfAttempt("launch{of_node}.json")
    command_path = _OfAttempt("command{of_node}.json")
    node_path = _OfAttempt("node{number}.json")
    """The state of a node after the first, written by its supervisor."""
    hostfile_path = _OfAttempt("hostfile.node{number}")
    """The list of nodes that DeepSpeed's launcher reads on a node."""
    restart_path = _OfAttempt("restart.{number}.json")
    """Which attempt a job makes when the scheduler starts it again; the number counts the
    restarts.
    """

    def __init__(self, path: Path | str) -> None:
        object.__setattr__(self, "path", Path(path))

    @property
    def name(self) -> str:
        return self.path.name

    def samples_dir(self, host: str) -> Path:
        return self.path / f"{_SAMPLES}{_in_name(host)}"

    def attempt_dir(self, attempt: int) -> Path:
        return self.attempts_dir / f"{attempt:03d}"

    def log_path(self, attempt: int, host: str) -> Path:
        return self.attempt_dir(attempt) / f"{_OUTPUT}{_in_name(host)}{_LOG}"

    def attempts(self) -> tuple[int, ...]:
        """Return the numbers of all attempts, ascending."""
        names = names_in(self.attempts_dir)
        return tuple(sorted(int(name) for name in names if name.isascii() and name.isdigit()))

    def logs(self, attempt: int) -> dict[str, Path]:
        """Return the logs of an attempt by host."""
        folder = self.attempt_dir(attempt)
        return {
            name.removeprefix(_OUTPUT).removesuffix(_LOG): folder / name
            for name in sorted(names_in(folder))
            if name.startswith(_OUTPUT) and name.endswith(_LOG)
        }

    def sample_hosts(self) -> tuple[str, ...]:
        """Return the hosts that wrote samples."""
        names = sorted(names_in(self.path))
        return tuple(name.removeprefix(_SAMPLES) for name in names if name.startswith(_SAMPLES))


def new_attempt(run: RunDirectory) -> int:
    """Create the folder of the next attempt and return its number. No other process gets the same.
    Raises OSError.
    """
    attempt = max(run.attempts(), default=0) + 1
    shared = is_shared(run.path)
    with contextlib.suppress(FileExistsError):
        make_run_folder(run.attempts_dir, shared=shared)
    while True:
        try:
            make_run_folder(run.attempt_dir(attempt), shared=shared)
            return attempt
        except FileExistsError:
            attempt += 1


def deleted(run: RunDirectory) -> bool:
    """Return whether the folder contains no run any more. A folder that is only unreachable is not
    deleted.
    """
    try:
        run.spec_path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def _in_name(host: str) -> str:
    """Return a host's name as part of a file's name. A state that somebody else wrote may contain a
    path instead.
    """
    return host.replace("/", "_").replace("\0", "_")


# Where a run's checkpoints are, as far as names tell. The trainer verifies their content.
#
# Refusal codes: checkpoint-missing: The run saved checkpoints, and none of them is there.


_NAME = re.compile(r"step-\d{6,12}")


def checkpoints_folder(run: RunDirectory, spec: RunSpec) -> Path:
    """Return the folder of a run's checkpoints. A folder that the spec names may serve several
    runs, each with a folder in it.
    """
    return (
        Path(spec.checkpoint.folder).expanduser() / run.name
        if spec.checkpoint.folder
        else run.checkpoints_dir
    )


def checkpoint_folders(folder: Path) -> tuple[Path, ...]:
    """Return the folders that have a checkpoint's name, by step; none if the folder is missing or
    cannot be read.
    """
    try:
        return listed_checkpoints(folder)
    except OSError:
        return ()


def listed_checkpoints(folder: Path) -> tuple[Path, ...]:
    """Return the folders that have a checkpoint's name, by step; none if the folder is missing.
    Raises OSError if it cannot be read.
    """
    found = [folder / name for name in names_in(folder) if _NAME.fullmatch(name)]
    found = [path for path in found if path.is_dir() and not path.is_symlink()]
    return tuple(sorted(found, key=lambda path: step_of(path.name)))


def saved_on_disk(run: RunDirectory, spec: RunSpec | None, state: RunState) -> int | None:
    """Return the step of the newest checkpoint of a run that nobody records at the moment; None if
    it has none.
    """
    folders = checkpoint_folders(checkpoints_folder(run, spec)) if spec is not None else ()
    return step_of(folders[-1].name) if folders else state.saved_step


def step_of(name: str) -> int:
    """Return the step in a checkpoint's name."""
    return int(name.removeprefix("step-"))


def missing_checkpoints(run: RunDirectory, spec: RunSpec, state: RunState) -> Problem | None:
    """Return why a run cannot be resumed from what it saved: nothing of it is there, such as on a
    file system that is not mounted.
    """
    folder = checkpoints_folder(run, spec)
    if state.saved_step is None or checkpoint_folders(folder):
        return None
    command = so_tui_command("resume", run.name, "--start-over")
    return Problem(
        "checkpoint-missing",
        "run",
        run.name,
        f"the run saved step {thousands(state.saved_step)} in {folder}, and no checkpoint is there",
        f"Mount its file system, or train from step 0 again: {command}",
    )


# Write the small files of a run directory.


def write_run_file(run: RunDirectory, path: Path, content: bytes) -> None:
    """Replace a file of a run atomically. Others can read it only if the run is shared with the
    group.

    Raises:
        OSError: If writing fails; the old file is unchanged.
    """
    write_atomic(path, content, mode=0o666 & ~umask_of(run.path))


def write_run_json(run: RunDirectory, path: Path, value: object, *, indented: bool = False) -> None:
    """Replace a file of a run by a value as JSON, which people can read if it is ``indented``;
    otherwise as ``write_run_file``.
    """
    content = msgspec.json.encode(value)
    write_run_file(run, path, msgspec.json.format(content, indent=1) if indented else content)


# ``run.json``: what a run is. Written once when the run is created, and never changed.
#
# Runs of versions before this file have none, and so no identity.


_LARGEST_BYTES = 1 << 16


class _RunManifest(Struct, frozen=True, kw_only=True):
    """Content of ``run.json``."""

    v: int = 1
    id: str
    """UUID. Every checkpoint of the run carries it: a name can be used twice."""
    name: str
    created: float
    version: str
    """Version of so-tui that created the run."""


prepare(_RunManifest)


def write_manifest(run: RunDirectory) -> None:
    """Write ``run.json`` of a run that is being created, with a new identity. Raises OSError."""
    manifest = _RunManifest(
        id=str(uuid.uuid4()), name=run.name, created=time.time(), version=so_tui.__version__
    )
    write_run_json(run, run.manifest_path, manifest, indented=True)


def run_id(run: RunDirectory) -> str:
    """Return the identity of a run; empty for a run of an older version.

    Raises:
        OSError: ``run.json`` is there and cannot be read.
        msgspec.DecodeError: It is damaged.
    """
    try:
        return decode_json(read_bounded(run.manifest_path, _LARGEST_BYTES), _RunManifest).id
    except FileNotFoundError:
        return ""


# Whether a run is this user's own. What belongs to another user, or can be changed by one, is only
# read.
#
# Refusal codes: not-your-run: Another user owns the folder, or a file in it that decides what
# happens. others-can-write, wrong-kind, missing, unreadable: The run cannot be acted upon for the
# reason that ``Distrust`` names.


NOT_YOUR_RUN = "not-your-run"


def not_own(run: RunDirectory, attempt: int | None = None) -> NotOwnError | None:
    """Return why a run is not this user's own; None if it is.

    Args:
        run: The run.
        attempt: An attempt whose folder, with every file in it, must be this user's own as well.
    """
    return next(_not_own(run, attempt), None)


def refuse_unless_own(run: RunDirectory, attempt: int | None = None) -> None:
    """Refuse to start processes for a run that is not this user's own.

    Raises:
        Refused: With the code of the first reason.
    """
    if (found := not_own(run, attempt)) is not None:
        raise Refused([_refusal(run, found)])


def refuse_another_users(run: RunDirectory) -> None:
    """Refuse to ask anything of another user's run, or through a link.

    One's own run may be asked even if others can write to it: a request starts nothing.

    Raises:
        Refused: The folder, or its folder of requests, is another user's or a link.
    """
    for folder in (run.path, run.control_dir):
        distrust = distrust_of_folder(folder)
        if distrust in (Distrust.OTHER_OWNER, Distrust.WRONG_KIND):
            raise Refused([_refusal(run, NotOwnError(folder, distrust))])


def _not_own(run: RunDirectory, attempt: int | None) -> Iterator[NotOwnError]:
    for path, distrust_of, needed in (
        (run.path, distrust_of_folder, True),
        (run.attempts_dir, distrust_of_folder, True),
        (run.state_path, distrust_of_file, True),
        (run.spec_path, distrust_of_file, True),
        (run.control_dir, distrust_of_folder, False),
        (run.metrics_dir, distrust_of_folder, False),
        (run.manifest_path, distrust_of_file, False),
        (run.supervisor_lock_path, distrust_of_file, False),
    ):
        found = distrust_of(path)
        if found is not None and (needed or found is not Distrust.MISSING):
            yield NotOwnError(path, found)
    if attempt is not None:
        yield from _attempt_not_own(run.attempt_dir(attempt))


def _attempt_not_own(folder: Path) -> Iterator[NotOwnError]:
    if (distrust := distrust_of_folder(folder)) is not None:
        yield NotOwnError(folder, distrust)
        return
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        yield NotOwnError(folder, Distrust.UNREADABLE)
        return
    for entry in entries:
        is_folder = entry.is_dir() and not entry.is_symlink()
        found = distrust_of_folder(entry) if is_folder else distrust_of_file(entry)
        if found is not None and found is not Distrust.MISSING:  # which was a temporary file
            yield NotOwnError(entry, found)


def _refusal(run: RunDirectory, found: NotOwnError) -> Refusal:
    name, path = printable_line(run.name), printable_line(str(found.path))
    match found.distrust:
        case Distrust.OTHER_OWNER:
            return Refusal(
                NOT_YOUR_RUN,
                f"{name} is not your run: {path} belongs to another user. You can watch it and "
                "read its logs",
            )
        case Distrust.OTHERS_CAN_WRITE:
            remedy = (
                "Check what is in it, then take away the right: "
                f"`{quoted('chmod', '-R', 'go-w', str(run.path))}`"
            )
            message = (
                f"other users can write {path}, and with it decide what {name} does in your name. "
                f"{remedy}"
            )
        case Distrust.WRONG_KIND:
            message = (
                f"{path} is a link, or a file where a folder is expected. Name the folder of the "
                "run itself"
            )
        case Distrust.MISSING:
            message = f"{path} is missing, so the run cannot be continued. Start a new one"
        case Distrust.UNREADABLE:
            message = f"{path} cannot be read. Check the rights of its folder"
    return Refusal(found.distrust.value, message)
