"""What makes a process the supervisor of a run: it is the only one, and the run's orphans come to it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator

from so_tui.runs.directory import RunDirectory


@contextlib.contextmanager
def only_one(run: RunDirectory) -> Iterator[bool]:
    """Whether this process is now the run's only supervisor. Where the file system cannot lock, the recorded one's liveness must do."""
    with run.supervisor_lock_path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            print(f"no lock on {run.supervisor_lock_path}: {error}", file=sys.stderr)
        yield True


def become_subreaper() -> None:
    """Make orphans of the run our children instead of init's (prctl(2), PR_SET_CHILD_SUBREAPER), so that none is lost sight of."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(36, 1, 0, 0, 0) != 0:
        print(f"not a subreaper: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
