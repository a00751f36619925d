"""Where the ranks of a run meet: a file in a folder that only this user can open.

torch's server for this, ``TCPStore``, listens on every interface, whatever address it is given, and asks nobody who they are: any other
user of the host or its network could change what ranks tell each other. The file lies beside the locks, because file systems of networks
may not lock it.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from so_tui.launch import locks
from so_tui.runs.directory import RunDirectory
from so_tui.trust.ownership import private_folder


def make(run: RunDirectory) -> Path:
    """Return the path of the file for a run's next processes. What earlier ones left would mislead them, so it is removed.

    Raises:
        OSError: The folder cannot be made, or belongs to another user.
    """
    remove(run)
    return private_folder(_folder(run)) / "store"


def remove(run: RunDirectory) -> None:
    """Remove the file, if there is one. Call it when the run's processes have ended.

    Raises:
        OSError: It cannot be removed.
    """
    folder = _folder(run)
    if folder.exists():
        shutil.rmtree(folder)


def _folder(run: RunDirectory) -> Path:
    """Return the run's folder, which all its attempts use in turn, so that at most one is ever left behind."""
    return locks.lock_folder() / f"rendezvous-{hashlib.sha256(str(run.path).encode()).hexdigest()[:16]}"
