"""Reading what a file system may fail to read for a moment. Such a failure says nothing of what is there."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from so_tui.trust.printable import brief_message
from so_tui.trust.reading import UnfitFileError
from so_tui_trainer.failures import TrainingError
from superoffload import OffloadError

T = TypeVar("T")
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0)
"""Between tries: a file server that restarts, or a path to it that changes, takes this long. The other ranks wait."""
_SAYS_WHAT_IS_THERE = frozenset(
    {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENXIO,
        errno.ENAMETOOLONG,
        errno.EBADMSG,  # with the next, how ext4 and XFS report that their own checksums differ
        errno.EUCLEAN,
    }
)


def read_with_retries(read: Callable[[Path], T], path: Path) -> T:
    """Return what a function reads, called again after pauses while the file system fails.

    Args:
        read: Reads a checkpoint, or the folder of checkpoints.
        path: What it is called with.

    Raises:
        TrainingError: The file system has failed for long (``checkpoint-read-failed``).
        OSError, OffloadError: What is there is not what was expected.
    """
    pauses_s = iter(_PAUSES_S)
    while True:
        try:
            return read(path)
        except (OSError, OffloadError) as error:
            if not _reading_failed(error):
                raise
            if (pause_s := next(pauses_s, None)) is None:
                reason = f"{path} cannot be read now ({brief_message(str(error))}), and may be whole. It is left as it is"
                suggestion = "Resume when its file system answers. Should that be never, move it away, and an older checkpoint is used."
                raise TrainingError("checkpoint-read-failed", reason, suggestion) from error
        time.sleep(pause_s)


def _reading_failed(error: OSError | OffloadError) -> bool:
    """Return whether reading failed, rather than what was read."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return (
        isinstance(cause, OSError)
        and not isinstance(cause, UnfitFileError)
        and cause.errno not in _SAYS_WHAT_IS_THERE
    )
