"""Paths of all files of a run. A RunDirectory may be created for a folder that does not exist yet.

RUN/ run.json  spec.json  state.json  notes.json  answers.json
     attempts/001/ launch.json ds_config.json command.json output.<host>.log
                   node1.json launch.node1.json command.node1.json ... of the other nodes of a run
                       on several
     metrics/  samples.<host>/  control/  checkpoints/
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec import Struct

import so_tui
from so_tui.runs.records import RunState
from so_tui.spec.check import write_atomic
from so_tui.spec.errors import Problem, Refused, refuse, reject
from so_tui.spec.run_spec import RunSpec
from so_tui.trust.decoding import decode_json, prepare, readable_json
from so_tui.trust.files import (
    Distrust,
    NotOwnError,
    names_in,
    read_bounded,
    read_own,
)
from so_tui.trust.folders import (
    Folder,
    close_to_group,
    is_shared,
    make_run_folder,
    open_named,
    umask_of,
)
from so_tui.trust.text import printable_line, quoted, so_tui_command
from so_tui.units import thousands

_SAMPLES = "samples."
_OUTPUT = "output."
_LOG = ".log"


@dataclass(frozen=True)
class _Entry:
    """A file or folder with a fixed name in a run directory."""

    name: str

    def __get__(self, run: RunDirectory, _owner: type[RunDirectory]) -> Path:
        return run.at / self.name


@dataclass(frozen=True)
class _OfAttempt:
    """A file in the folder of an attempt. Its name may have a number, or the number of a node
    after the first.
    """

    name: str

    def __get__(self, run: RunDirectory, _owner: type[RunDirectory]) -> Callable[..., Path]:
        def path(attempt: int, number: int = 0) -> Path:
            of_node = f".node{number}" if number else ""
            return run.attempt_dir(attempt) / self.name.format(number=number, of_node=of_node)

        return path


@dataclass(frozen=True)
class RunDirectory:
    """Paths of a run; reads nothing but folder listings."""

    path: Path
    """Its name, for people and other processes."""
    folder: Folder | None = field(default=None, compare=False, repr=False)
    """Its folder, if it is kept open (see ``own_run``)."""

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

    @property
    def at(self) -> Path:
        """Where this process finds its files: by its name, or in the open folder whatever has the
        name meanwhile.
        """
        return self.folder.at if self.folder else self.path

    @property
    def name(self) -> str:
        return self.path.name

    def samples_dir(self, host: str) -> Path:
        return self.at / f"{_SAMPLES}{_in_name(host)}"

    def named(self, path: Path) -> Path:
        """Return the path of one of its files as people and other processes name it."""
        return self.path / path.relative_to(self.at)

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
        names = sorted(names_in(self.at))
        return tuple(name.removeprefix(_SAMPLES) for name in names if name.startswith(_SAMPLES))


def new_attempt(run: RunDirectory) -> int:
    """Create the folder of the next attempt and return its number. No other process gets the same.
    Raises OSError.
    """
    attempt = max(run.attempts(), default=0) + 1
    shared = is_shared(run.at)
    while True:
        try:
            make_run_folder(run.attempt_dir(attempt), shared=shared)
            return attempt
        except FileExistsError:
            attempt += 1


def deleted(run: RunDirectory) -> bool:
    """Return whether the folder of its name contains no run any more. A folder that is only
    unreachable is not deleted.
    """
    try:
        RunDirectory(run.path).spec_path.stat()
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
_LISTINGS = 100
"""How often a folder is listed, at most, whose checkpoints are gone when they are looked at."""


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
    for _ in range(_LISTINGS):
        named = [folder / name for name in names_in(folder) if _NAME.fullmatch(name)]
        found = [path for path in named if path.is_dir() and not path.is_symlink()]
        # A run that keeps one checkpoint may have replaced it since its name was read.
        if found or all(os.path.lexists(path) for path in named):
            break
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
    named = checkpoints_folder(RunDirectory(run.path), spec)
    command = so_tui_command("resume", run.name, "--start-over")
    return Problem(
        "checkpoint-missing",
        "run",
        run.name,
        f"the run saved step {thousands(state.saved_step)} in {named}, and no checkpoint is there",
        f"Mount its file system, or train from step 0 again: {command}",
    )


# Write the small files of a run directory.


def write_run_file(run: RunDirectory, path: Path, content: bytes) -> None:
    """Replace a file of a run atomically. Others can read it only if the run is shared with the
    group.

    Raises:
        OSError: If writing fails; the old file is unchanged.
    """
    write_atomic(path, content, mode=0o666 & ~umask_of(run.at))


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


def known_id(run: RunDirectory) -> str:
    """Return the run's id; empty for a run of an older version, and for one whose ``run.json`` is
    damaged.
    """
    found = readable_json(run.manifest_path, _RunManifest, limit_bytes=_LARGEST_BYTES)
    return found.id if found else ""


# What names a launch between those who start something and those who are started: a hash that
# nobody can make another launch for, nor the same launch of another run.
#
# Problem codes: launch-exchanged: The launch is not the one that was prepared.


LAUNCH_VARIABLE = "SO_TUI_LAUNCH"
"""Holds the hash in the environment of a supervisor, a job and the ranks."""


def launch_digest(run: RunDirectory, content: bytes) -> str:
    """Return the hash of a run's id and of the content of a launch's file."""
    return hashlib.sha256(b"%s\n%s" % (known_id(run).encode(), content)).hexdigest()


def own_launch(run: RunDirectory, attempt: int, node: int = 0, digest: str | None = None) -> bytes:
    """Return the content of a launch's file, which is this user's own.

    Args:
        run: The run.
        attempt: The attempt.
        node: The number of the node, of a run on several.
        digest: What the launch must have; not compared if None.

    Raises:
        InputError: It is not the launch that was prepared (code ``launch-exchanged``).
        OSError: It is missing, cannot be read, or is not this user's own.
    """
    content = read_own(run.launch_path(attempt, node))
    if digest is not None and launch_digest(run, content) != digest:
        raise reject(
            "launch-exchanged",
            "run",
            str(run.path),
            f"its attempt {attempt} is not the one that was prepared: the folder, or the file, was "
            "exchanged",
            "Keep the folder of runs where nobody else can rename folders, then resume.",
        )
    return content


# Whether a run is this user's own. What belongs to another user, or can be changed by one, is only
# read.
#
# Refusal codes: not-your-run: Another user owns the folder, or a file in it that decides what
# happens. others-can-write, wrong-kind, missing, unreadable: The run cannot be acted upon for the
# reason that ``Distrust`` names.


NOT_YOUR_RUN = "not-your-run"
_NEEDED = ("attempts", "state.json", "spec.json")
_PARTS = {
    "attempts": stat.S_IFDIR,
    "state.json": stat.S_IFREG,
    "spec.json": stat.S_IFREG,
    "run.json": stat.S_IFREG,
    "supervisor.lock": stat.S_IFREG,
    "control": stat.S_IFDIR,
    "metrics": stat.S_IFDIR,
    "checkpoints": stat.S_IFDIR,
}
"""What supervisors and ranks read of a run."""
_WHY = {errno.ENOENT: Distrust.MISSING, errno.ENOTDIR: Distrust.WRONG_KIND}


@contextlib.contextmanager
def own_run(run: RunDirectory) -> Iterator[RunDirectory]:
    """Open the folder of a run, and check that it is this user's own, with everything in it that
    supervisors and ranks read.

    The yielded run reads and writes in this folder, whatever has its name meanwhile.

    Raises:
        Refused: With the code of the first reason why it is not.
    """
    with contextlib.ExitStack() as opened:
        try:
            if run.folder is None:
                close_to_group(run.path)
                run = RunDirectory(run.path, opened.enter_context(open_named(run.path)))
            assert run.folder is not None
            found = next(_foreign(run, run.folder), None)
        except OSError as error:
            why = _WHY.get(error.errno or 0, Distrust.UNREADABLE)
            found = NotOwnError(Path(error.filename or run.path), why)
        if found is not None:
            raise _refused(run, found)
        with _errors_name(run):
            yield run


def exchanged(run: RunDirectory, known: str) -> bool:
    """Return whether the name of an open run leads to another folder by now: not this user's own,
    or another run's. One that is gone, or cannot be reached, is not exchanged.

    A file server that has failed over may show the same folder with other numbers. It is opened
    anew.

    Args:
        run: The run, which ``own_run`` has opened.
        known: Its id.
    """
    if run.folder is None:
        return False
    opened = run.folder.descriptor
    try:
        with contextlib.suppress(OSError):  # the file server may have forgotten the open folder
            if os.path.samestat(run.path.stat(), os.fstat(opened)):
                return False
        with open_named(run.path) as named:
            if named.distrust is not None or known_id(RunDirectory(run.path, named)) != known:
                return True
            os.dup2(named.descriptor, opened, inheritable=False)
    except OSError as error:
        return error.errno == errno.ENOTDIR
    return False


@contextlib.contextmanager
def asked_run(run: RunDirectory) -> Iterator[RunDirectory]:
    """Open the folder of a run of which something is asked, and refuse another user's, or a link.

    One's own run may be asked even if others can write to it: a request starts nothing. The yielded
    run reads and writes in this folder, whatever has its name meanwhile.

    Raises:
        Refused: The folder, or its folder of requests, is another user's or a link.
        OSError: There is no such folder.
    """
    try:
        # Through a link that has taken the name of an open run, nothing is asked, either.
        folder = None if run.folder and not run.path.is_symlink() else open_named(run.path)
    except NotADirectoryError:
        raise _refused(run, NotOwnError(run.path, Distrust.WRONG_KIND)) from None
    with folder or contextlib.nullcontext():
        opened = RunDirectory(run.path, run.folder or folder)
        assert opened.folder is not None
        parts = [
            (part.path, part.distrust) for part in opened.folder.foreign("control", stat.S_IFDIR)
        ]
        for path, distrust in ((run.path, opened.folder.distrust), *parts):
            if distrust in (Distrust.OTHER_OWNER, Distrust.WRONG_KIND):
                raise _refused(run, NotOwnError(path, distrust))
        with _errors_name(opened):
            yield opened


@contextlib.contextmanager
def _errors_name(run: RunDirectory) -> Iterator[None]:
    """Let errors of files in an open run name them as people know them."""
    try:
        yield
    except OSError as error:
        if isinstance(error.filename, str):
            error.filename = error.filename.replace(str(run.at), str(run.path), 1)
        raise


def _foreign(run: RunDirectory, folder: Folder) -> Iterator[NotOwnError]:
    """Yield what is not this user's own of what is read. Raises OSError."""
    if (distrust := folder.distrust) is not None:
        yield NotOwnError(run.path, distrust)
    for name, kind in _PARTS.items():
        yield from (part for part in folder.foreign(name, kind) if not _decides_nothing(part))
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
        spec = decode_json(read_own(run.spec_path), RunSpec)
        if spec.checkpoint.folder:
            with open_named(checkpoints_folder(run, spec)) as elsewhere:
                yield from (part for part in elsewhere.foreign() if not _decides_nothing(part))


def _decides_nothing(part: NotOwnError) -> bool:
    """Return whether it does no harm that a part of a run is not this user's own: not all parts are
    needed, Slurm makes logs with the user's umask, and a checkpoint with a link in it counts as
    damaged.
    """
    if part.distrust is Distrust.MISSING:
        return part.path.name not in _NEEDED
    if part.distrust is Distrust.OTHERS_CAN_WRITE:
        return part.path.suffix == _LOG
    return part.distrust is Distrust.WRONG_KIND and any(
        _NAME.match(folder.name) for folder in part.path.parents
    )


_REASONS = {
    Distrust.OTHERS_CAN_WRITE: (
        "other users can write {path}, and with it decide what {name} does in your name. Check "
        "what is in it, then take away the right: `{close}`"
    ),
    Distrust.WRONG_KIND: (
        "{path} is a link, or a file where a folder is expected. Name the folder of the run itself"
    ),
    Distrust.MISSING: "{path} is missing, so the run cannot be continued. Start a new one",
    Distrust.UNREADABLE: "{path} cannot be read. Check the rights of its folder",
}


def _refused(run: RunDirectory, found: NotOwnError) -> Refused:
    name, path = printable_line(run.name), printable_line(str(found.path))
    if found.distrust is Distrust.OTHER_OWNER:
        return refuse(
            NOT_YOUR_RUN,
            f"{name} is not your run: {path} belongs to another user. You can watch it and "
            "read its logs",
        )
    close = quoted("chmod", "-R", "go-w", str(run.path))
    message = _REASONS[found.distrust].format(name=name, path=path, close=close)
    return refuse(found.distrust.value, message)
