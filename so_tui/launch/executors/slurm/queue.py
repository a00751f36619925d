"""This user's jobs in a file of the cache folder, which all screens and commands share, so that Slurm is asked once in an interval.

A scheduler serves thousands of users, and sites limit how often it may be asked. Whoever finds the file older than the interval, and gets
its lock, asks; everybody else reads what is there.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from so_tui.folders import cache_home
from so_tui.launch.executors.slurm import commands
from so_tui.launch.executors.slurm.commands import SlurmError
from so_tui.launch.executors.slurm.job import Job
from so_tui.spec.files import write_atomic
from so_tui.trust.decoding import decode_json
from so_tui.trust.ownership import private_folder, read_own

_WAIT_S = 2.0
"""How long a caller waits for an answer that it has asked for. Later it finds the answer in the file."""


class Queue(Struct, frozen=True, kw_only=True):
    """What Slurm said."""

    v: int = 1
    asked: float
    """In seconds since the epoch, by the clock of the host that asked."""
    jobs: tuple[Job, ...] = ()
    error: str = ""
    """Why Slurm did not answer; the jobs are those of the answer before."""

    def lists(self, job_id: str) -> bool:
        """Return whether a job has this number."""
        return any(job.id == job_id for job in self.jobs)


def queue(cluster: str, interval_s: float) -> Queue | None:
    """Return the newest answer of this cluster, after asking again if it is older than ``interval_s``. None if there was none yet."""
    path = _path(cluster)
    if not _is_fresh(_found(path), interval_s):
        asking = threading.Thread(target=_ask, args=(path, interval_s), name="squeue", daemon=True)
        asking.start()
        asking.join(_WAIT_S)
    return _found(path)


_asking = threading.Lock()
_answers: dict[Path, Queue] = {}
"""What this process was answered: where no file can be written, Slurm must not be asked more often."""


def _ask(path: Path, interval_s: float) -> None:
    with _alone(path) as alone:
        before = _found(path)
        if not alone or _is_fresh(before, interval_s):
            return
        asked = time.time()
        try:
            answer = Queue(asked=asked, jobs=commands.own_jobs())
        except SlurmError as error:
            answer = Queue(asked=asked, jobs=before.jobs if before else (), error=str(error))
        _answers[path] = answer
        with contextlib.suppress(OSError):
            write_atomic(path, msgspec.json.encode(answer))


def _is_fresh(answer: Queue | None, interval_s: float) -> bool:
    return (
        answer is not None and abs(time.time() - answer.asked) < interval_s
    )  # another host's clock may be ahead


def _found(path: Path) -> Queue | None:
    """Return the newest answer that this process or another one got."""
    answers = [answer for answer in (_answers.get(path), _read(path)) if answer is not None]
    return min(answers, key=lambda answer: abs(time.time() - answer.asked), default=None)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Yield whether no other thread asks now, and no other process either, where files can be locked."""
    if not _asking.acquire(blocking=False):
        yield False
        return
    try:
        with contextlib.ExitStack() as stack:
            try:
                private_folder(path.parent)
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                lock = stack.enter_context(
                    os.fdopen(os.open(path.with_suffix(".lock"), flags, 0o600), "r+b")
                )
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            except OSError:  # no locks here, or nothing can be written
                pass
            yield True
    finally:
        _asking.release()


def _read(path: Path) -> Queue | None:
    try:
        return decode_json(read_own(path), Queue)
    except (OSError, msgspec.DecodeError):
        return None


def _path(cluster: str) -> Path:
    """Return the file of a cluster: one home may serve several."""
    return (
        cache_home() / "slurm" / f"queue.{hashlib.sha256(cluster.encode()).hexdigest()[:12]}.json"
    )
