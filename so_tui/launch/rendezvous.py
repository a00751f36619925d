"""Where the ranks of one host meet: a file in a folder that only this user can open.

A store that listens on a port could be joined by anybody who reaches it, and torch's listens on every network, whatever its address.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from so_tui.trust.ownership import NotOwnError, distrust_of_folder, private_folder


def make_rendezvous(folder: Path, run: Path, attempt: int) -> Path:
    """Make the folder in which the ranks of an attempt meet, and remove those of the run's earlier attempts.

    Args:
        folder: A folder on this host, on a file system with working locks.
        run: The run directory.
        attempt: The attempt's number.

    Returns:
        The new folder.

    Raises:
        NotOwnError: Somebody else made one of these, or a link of such a name.
        OSError: It cannot be made.
    """
    for left in folder.glob(f"{_prefix(run)}*"):
        if (distrust := distrust_of_folder(left)) is not None:
            raise NotOwnError(left, distrust)
        shutil.rmtree(left)
    return private_folder(rendezvous_path(folder, run, attempt))


def rendezvous_path(folder: Path, run: Path, attempt: int) -> Path:
    """Return the folder in which the ranks of an attempt meet; arguments as for ``make_rendezvous``."""
    return folder / f"{_prefix(run)}{attempt}"


def init_method(meeting: Path) -> str:
    """Return the address of a rendezvous as torch's ``init_process_group`` takes it."""
    return f"file://{meeting / 'store'}"


def remove_rendezvous(meeting: Path) -> None:
    """Remove a rendezvous after its ranks have ended; one that is gone already is no error."""
    shutil.rmtree(meeting, ignore_errors=True)


def _prefix(run: Path) -> str:
    return f"rendezvous-{hashlib.sha256(bytes(run)).hexdigest()[:16]}-"
