"""The lock that makes one process responsible for a run: its supervisor while it lives, and whoever deletes it.

It is flock(2), proven on this file system before it is trusted. Some mounts refuse it, and some grant it to everybody. There a file that
only one process can create, with a heartbeat, takes its part.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from so_tui.runs.directory import RunDirectory
from so_tui.runs.host import HostIdentity, sees_processes_of, this_host
from so_tui.runs.liveness import OLD_S, alive, identify, now_of
from so_tui.runs.records import Process
from so_tui.trust.decoding import decode_json
from so_tui.trust.reading import read_bounded

_TRIES = 5
_LARGEST_BYTES = 1 << 16


class Owner(Struct, frozen=True, kw_only=True):
    """Content of ``supervisor.owner``: the process that holds the lock."""

    host: HostIdentity
    process: Process


class RunLock:
    """A lock that is held. The holder must refresh it at least once a minute."""

    def __init__(self, owner_path: Path | None, content: bytes = b"") -> None:
        self._owner_path, self._content = owner_path, content

    def refresh(self) -> None:
        """Show that the holder lives.

        Raises:
            OSError: It cannot be shown, or another process has taken the lock over.
        """
        if self._owner_path is not None:
            if read_bounded(self._owner_path, _LARGEST_BYTES) != self._content:
                raise OSError(f"{self._owner_path} belongs to another process now")
            os.utime(self._owner_path)

    def release(self) -> None:
        """Remove the file that stands for the lock, unless another process has taken it over meanwhile. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            if self._owner_path is not None and read_bounded(self._owner_path, _LARGEST_BYTES) == self._content:
                self._owner_path.unlink()


@contextlib.contextmanager
def run_lock(run: RunDirectory) -> Iterator[RunLock | None]:
    """Yield the lock of a run, or None if another process has it.

    Raises:
        OSError: The run directory cannot be written.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(run.supervisor_lock_path, flags, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            excludes = _excludes_others(run.supervisor_lock_path)
        except BlockingIOError:
            yield None
            return
        except OSError:  # this file system has no locks
            excludes = False
        lock = RunLock(None) if excludes else _own(run)
        try:
            yield lock
        finally:
            if lock is not None:
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


def _own(run: RunDirectory) -> RunLock | None:
    """Create the file that stands for the lock, also in place of one whose process is gone; None if another process lives."""
    path = run.path / "supervisor.owner"
    process = identify(os.getpid(), "supervisor")
    assert process is not None, "this process has an entry in /proc"
    content = msgspec.json.encode(Owner(host=this_host(), process=process))
    draft = _aside(path)
    draft.write_bytes(content)
    try:
        for _ in range(_TRIES):
            try:
                os.link(draft, path)  # fails if it exists, and shows the whole content at once
            except FileExistsError:
                if not _remove_if_stale(run, path):
                    return None
            else:
                return RunLock(path, content)
    finally:
        draft.unlink(missing_ok=True)
    return None


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.urandom(4).hex()}")


def _remove_if_stale(run: RunDirectory, path: Path) -> bool:
    """Return whether the way is free for another try."""
    try:
        found = read_bounded(path, _LARGEST_BYTES)
        age_s = now_of(run) - path.stat().st_mtime
    except FileNotFoundError:
        return True
    if not _is_stale(found, age_s):
        return False
    aside = _aside(path)
    with contextlib.suppress(FileNotFoundError):  # another process removed it first
        path.rename(aside)
        is_stale = read_bounded(aside, _LARGEST_BYTES) == found
        if not is_stale:  # it was replaced in between
            with contextlib.suppress(FileExistsError):  # and so was the way free meanwhile: its holder notices when it refreshes
                os.link(aside, path)
        aside.unlink()
        return is_stale
    return True


def _is_stale(content: bytes, age_s: float) -> bool:
    try:
        owner = decode_json(content, Owner)
    except msgspec.DecodeError:  # being written, or by a process that was killed while it wrote
        return age_s > OLD_S
    if sees_processes_of(this_host(), owner.host):
        return not alive(owner.process)
    return age_s > OLD_S
