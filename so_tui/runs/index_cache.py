"""The reader's own indexes, for segments that have none beside them: those of older versions, and of runs that were killed.

They are kept in the user's cache folder, since a reader never writes into a run. An entry is named by a hash of what the segment was when
it was read (path, inode, size, times of change), so that one of another content is never found. Only this user can read or write the
folder, its size is limited, and its content may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import time
from pathlib import Path

import msgspec

from so_tui.folders import cache_home
from so_tui.runs.index import LARGEST_INDEX_BYTES, SegmentIndex
from so_tui.runs.segments import INDEX_SUFFIX
from so_tui.spec.files import write_atomic
from so_tui.trust.ownership import distrust_of_file, distrust_of_folder, private_folder

LIMIT_BYTES = 256 << 20
"""Indexes of about five million steps."""
MEMORY_BYTES = 128 << 20
"""Limit of the indexes of one reader that stay in memory."""
_STALE_S = 86_400.0
"""An entry is marked as used at most once in this time."""

_log = logging.getLogger(__name__)


def fingerprint(segment: Path) -> str:
    """Return a name for a segment in its present state. Raises OSError."""
    found = segment.stat()
    path = os.path.abspath(segment)  # noqa: PTH100 - Path.absolute keeps `..`
    what = (path, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return hashlib.sha256(repr(what).encode("utf-8", "surrogateescape")).hexdigest()[:40]


class IndexCache:
    """Keeps indexes of segments for one reader. Several processes may use one folder at the same time.

    What does not go into the folder stays in memory: an index that is too large, and all after those that fill half of the folder's limit.
    So no reader deletes its own indexes again, however long its run is.
    """

    def __init__(self, folder: Path | None = None, limit_bytes: int = LIMIT_BYTES) -> None:
        """Use a folder, by default the user's; it is made when an index is kept for the first time."""
        self._folder = folder or cache_home() / "metrics"
        self._limit_bytes = limit_bytes
        self._used_bytes: int | None = None
        self._kept_bytes = 0
        self._memory_bytes = 0

    def load(self, segment: Path) -> SegmentIndex | None:
        """Return the index of a segment in its present state, if it is kept."""
        try:
            path = self._folder / f"{fingerprint(segment)}{INDEX_SUFFIX}"
            if distrust_of_folder(self._folder) is not None or distrust_of_file(path) is not None:
                return None
            index = SegmentIndex(path)
            if time.time() - path.stat().st_mtime > _STALE_S:
                with contextlib.suppress(OSError):  # a cache that cannot be written serves as well
                    os.utime(path)
        except (OSError, msgspec.DecodeError) as error:
            _log.info("the index of %s is not used: %s", segment, error)
            return None
        return index

    def keep(self, segment: Path, name: str, content: bytes) -> SegmentIndex | None:
        """Keep an index, and return it. If it cannot be kept, it stays in memory; None if it is unfit, or too much is in memory already.

        Args:
            segment: The segment.
            name: Its fingerprint before it was read.
            content: The encoded index.
        """
        try:
            index = SegmentIndex.in_memory(content)
        except msgspec.DecodeError as error:
            _log.info("%s cannot be indexed: %s", segment, error)
            return None
        try:
            if (
                len(content) <= min(LARGEST_INDEX_BYTES, self._limit_bytes // 2 - self._kept_bytes)
                and fingerprint(segment) == name
            ):
                path = private_folder(self._folder) / f"{name}{INDEX_SUFFIX}"
                self._make_room(len(content))
                write_atomic(path, content)
                self._kept_bytes += len(content)
                return SegmentIndex(path)
        except (OSError, msgspec.DecodeError) as error:
            _log.info("the index of %s is not kept: %s", segment, error)
        if self._memory_bytes + len(content) > MEMORY_BYTES:
            _log.info(
                "the index of %s is not kept: others take %d bytes of memory",
                segment,
                self._memory_bytes,
            )
            return None
        self._memory_bytes += len(content)
        return index

    def _make_room(self, new_bytes: int) -> None:
        """Delete the entries that were used longest ago, where the folder would exceed its limit."""
        if self._used_bytes is not None and self._used_bytes + new_bytes <= self._limit_bytes:
            self._used_bytes += new_bytes
            return
        found = []
        for entry in os.scandir(self._folder):
            with contextlib.suppress(FileNotFoundError):  # another process deleted it
                about = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(about.st_mode):
                    found.append((about.st_mtime, about.st_size, entry.path))
        used = sum(size for _, size, _ in found) + new_bytes
        if used > self._limit_bytes:
            for _, size, path in sorted(found):
                Path(path).unlink(missing_ok=True)
                used -= size
                if used <= self._limit_bytes * 3 // 4:
                    break
        self._used_bytes = used
