"""The lock that makes one process responsible for a run: its supervisor while it lives, and whoever
deletes it.

It is flock(2), proven on this file system before it is trusted. Some mounts refuse it, some grant
it to everybody, and some file servers hold it for a host that is gone until that host starts again.
There files that only one process can create, with a heartbeat, take its part: from the first such
file of a run on, they alone decide.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from so_tui.runs.directory import RunDirectory, asked_run
from so_tui.runs.liveness import (
    FRESH_S,
    OLD_S,
    STALE_S,
    HostIdentity,
    Sighting,
    alive,
    concluded,
    identify,
    sees_processes_of,
    sighting,
    state_with_truth,
    this_host,
)
from so_tui.runs.records import FINAL_STATES, Process, RunState
from so_tui.runs.state import read_state, write_even_if_full, write_state_even_if_full
from so_tui.spec.errors import InputError, reject
from so_tui.trust.decoding import decode_json
from so_tui.trust.files import read_bounded
from so_tui.trust.text import printable_line, so_tui_command
from so_tui.units import duration

_LARGEST_BYTES = 1 << 16


class _Owner(Struct, frozen=True, kw_only=True):
    """Content of ``supervisor.owner`` and of the files that follow it: the process that holds the
    lock.
    """

    host: HostIdentity
    process: Process
    released: bool = False


class RunLock:
    """The lock of a run. Who holds it must refresh it at least once a minute.

    Files may stand for flock(2): ``supervisor.owner``, ``supervisor.owner.2`` and so on, of which
    the last names the owner. A process takes the lock from one that is gone by creating the next
    file, which only one process can. No file is ever removed or renamed: between two such steps of
    one process, a second one could take what it had not seen.
    """

    def __init__(self, run: RunDirectory, *, assume_dead: bool = False) -> None:
        """Prepare to take or hold the lock; ``assume_dead`` as for ``run_lock``."""
        self._run, self._assume_dead = run, assume_dead
        process = identify(os.getpid(), "supervisor")
        assert process is not None, "this process has an entry in /proc"
        self._owner = _Owner(host=this_host(), process=process)
        self._number = 0
        """The number of the file that this process holds, from 1; with 0 only flock(2)."""

    def path(self, number: int) -> Path:
        """Return the path of a file; the first has the number 1."""
        return self._run.at / ("supervisor.owner" if number == 1 else f"supervisor.owner.{number}")

    def take(self) -> bool:
        """Take the lock by a file, unless its owner lives or another process is faster."""
        number = next(number for number in itertools.count(1) if not self.path(number).exists())
        if number > 1 and not self._is_free(self.path(number - 1)):
            return False
        draft = self._run.at / f".supervisor.owner.{os.urandom(4).hex()}"
        try:
            draft.write_bytes(msgspec.json.encode(self._owner))
            # Linking fails if the file exists, and never shows part of the content.
            os.link(draft, self.path(number))
        except FileExistsError:
            return False
        finally:
            draft.unlink(missing_ok=True)
        self._number = number
        return True

    def refresh(self) -> None:
        """Show that the holder lives.

        Raises:
            OSError: It cannot be shown, or another process has taken the lock over.
        """
        following = self.path(self._number + 1)
        if following.exists():
            raise OSError(f"{following} shows that another process has taken over")
        if self._number:
            os.utime(self.path(self._number))

    def release(self) -> None:
        """Let other processes have the lock, if the run still exists: on a full disk its file is
        marked in place, where no space is needed. Raises OSError.
        """
        if self._number:
            with contextlib.suppress(FileNotFoundError):
                owner = replace(self._owner, released=True)
                write_even_if_full(self._run, self.path(self._number), owner)

    def silent(self, path: Path) -> bool:
        """Return whether a file that shows a living owner is so old that the owner counts as gone.
        Raises OSError.
        """
        return time.time() - path.stat().st_mtime > (STALE_S if self._assume_dead else OLD_S)

    def _is_free(self, path: Path) -> bool:
        try:
            owner = decode_json(read_bounded(path, _LARGEST_BYTES), _Owner)
        except msgspec.DecodeError:  # damaged
            return self.silent(path)
        if owner.released:
            return True
        if sees_processes_of(owner.host):
            return not alive(owner.process)
        return self.silent(path)


@contextlib.contextmanager
def run_lock(run: RunDirectory, *, assume_dead: bool = False) -> Iterator[RunLock | None]:
    """Yield the lock of a run, or None if another process has it.

    Args:
        run: The run.
        assume_dead: Take the user's word that a holder on another host is gone, if a minute has
            passed since its last sign of life.

    Raises:
        OSError: The run directory cannot be written.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(run.supervisor_lock_path, flags, 0o600)
    try:
        lock, refused, excludes = RunLock(run, assume_dead=assume_dead), False, False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            excludes = _excludes_others(run.supervisor_lock_path)
        except BlockingIOError:
            refused = True
        except OSError:  # this file system has no locks
            pass
        if (
            lock.path(1).exists()
            or not (excludes or refused)
            or (refused and assume_dead and lock.silent(run.state_path))
        ):
            held = lock.take()
        else:
            held = excludes
        try:
            yield lock if held else None
        finally:
            if held:
                lock.release()
    finally:
        os.close(descriptor)


def _excludes_others(path: Path) -> bool:
    """Return whether a second descriptor is refused the lock that the first has."""
    second = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(second)
    return False


# What may be done only to a run that has ended: resuming and deleting it.
#
# Problem codes: run-is-live: It still runs, as its processes show. run-may-be-live: Its host
# cannot be asked, and its last sign of life is not old enough, or its lock is still held. The user
# may say that it has ended.


def ended_state(run: RunDirectory, *, assume_dead: bool = False) -> RunState:
    """Return the final state of a run.

    Args:
        run: The run.
        assume_dead: Take the user's word that it has ended, where its processes cannot be seen from
            here.

    Raises:
        InputError: It is live, or may be (codes of this module).
    """
    state = state_with_truth(run)
    if state.state in FINAL_STATES:
        return state
    seen = sighting(run, state)
    if seen.by_processes:
        raise reject(
            "run-is-live",
            "run",
            run.name,
            f"is still running ({state.state})",
            f"Watch it with `{so_tui_command('watch', run.name)}`, or stop it first with "
            f"`{so_tui_command('stop', run.name)}`.",
        )
    if assume_dead:
        return concluded(run, state)
    scheduled = run.job_script_path(state.attempt).exists()
    sooner = "once the scheduler says that its job has ended, or " if scheduled else ""
    raise reject(
        "run-may-be-live",
        "run",
        run.name,
        evidence(state, seen),
        f"It counts as lost {sooner}{duration(OLD_S)} after its last sign of life. If you know "
        "that it has ended, add --assume-dead.",
    )


def record_end(run: RunDirectory) -> RunState:
    """Record that a run has ended, by the user's word, and return its final state. From then on it
    is final on every host.

    Raises:
        Refused: It is another user's.
        InputError: It is live here, or has a living supervisor elsewhere (code ``run-is-live``).
        OSError: Its folder cannot be written.
    """
    with asked_run(run) as own:
        # before the lock is taken from a supervisor that lives here and has only been silent
        ended_state(own, assume_dead=True)
        with run_lock(own, assume_dead=True) as lock:
            if lock is None:
                raise lock_held(own, assume_dead=True)
            state = ended_state(own, assume_dead=True)
            write_state_even_if_full(own, state)
    return state


def lock_held(run: RunDirectory, *, assume_dead: bool) -> InputError:
    """Return the refusal of a run whose lock another process holds; ``assume_dead`` if the user's
    word was not enough.
    """
    state = read_state(run)
    seen = sighting(run, state)
    if seen.by_processes:
        return reject(
            "run-is-live",
            "run",
            run.name,
            "has a living supervisor",
            f"Stop it first: `{so_tui_command('stop', run.name)}`.",
        )
    message = f"{evidence(state, seen)}; its supervisor's lock is held"
    if assume_dead:
        return reject(
            "run-is-live",
            "run",
            run.name,
            message,
            f"If it has ended, it can be taken over {duration(STALE_S)} after its last sign of "
            "life. Try again then.",
        )
    return reject(
        "run-may-be-live",
        "run",
        run.name,
        message,
        "If you know that it has ended, add --assume-dead.",
    )


def evidence(state: RunState, seen: Sighting) -> str:
    """Return what was seen of a run whose processes cannot be examined from here, as a clause."""
    host, age_s, age = printable_line(state.host), seen.heartbeat_age_s, ""
    if age_s is not None and age_s < -FRESH_S:
        age = (
            f", and its last sign of life is dated {duration(-age_s)} ahead of this file system's "
            "clock"
        )
    elif age_s is not None:
        age = f", and its last sign of life was {duration(max(0.0, age_s))} ago"
    if seen.restarted:
        return f"was {state.state} on {host} before that host restarted{age}"
    return f"is {state.state} on {host}, whose processes cannot be seen from here{age}"
