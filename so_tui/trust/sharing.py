"""Who may read what a run writes: its owner alone, or the owner's group with ``SO_TUI_SHARE=group``. Only the owner may write.

The mode of the run folder records the choice for later attempts and other processes.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "SO_TUI_SHARE"
GROUP = "group"
_SHARED_FOLDER = 0o750


def wanted(environment: Mapping[str, str]) -> bool:
    """Return whether the user shares new runs with the group."""
    return environment.get(VARIABLE, "") == GROUP


def is_shared(folder: Path) -> bool:
    """Return whether a run folder is shared with its owner's group.

    Raises:
        OSError: There is no such folder.
    """
    # Exactly this mode: folders of older versions have whatever the umask of their time gave.
    return stat.S_IMODE(folder.stat().st_mode) == _SHARED_FOLDER


def make_run_folder(folder: Path, *, shared: bool) -> None:
    """Create a run folder with the modes that were chosen, whatever the umask is.

    Raises:
        FileExistsError: Another process was first.
        OSError: It cannot be made.
    """
    folder.mkdir(mode=0o700)
    if shared:
        folder.chmod(_SHARED_FOLDER)


def close_to_others(folder: Path) -> None:
    """Remove the rights of others on a run folder of an older version. A shared folder stays shared with its group.

    Raises:
        OSError: The folder belongs to somebody else, or is gone.
    """
    if not is_shared(folder):
        folder.chmod(0o700)


def umask_of(folder: Path) -> int:
    """Return the umask of the processes that write into a run folder.

    Raises:
        OSError: There is no such folder.
    """
    return 0o027 if is_shared(folder) else 0o077


def file_mode_of(folder: Path) -> int:
    """Return the mode of a new file in a run folder, or in a folder below it.

    Raises:
        OSError: There is no such folder.
    """
    return 0o640 if is_shared(folder) else 0o600
