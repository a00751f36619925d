"""Read small files of /sys and /proc, of this machine or of a copy taken from another one."""

from __future__ import annotations

import re
from pathlib import Path

from so_tui.trust.reading import read_bounded

KIB = 1024
_MOST_BYTES = 1 << 24
"""Of one file; /proc/cpuinfo of the largest machines has a few MiB."""
_MEMINFO_LINE = re.compile(r"^(?:Node \d+ )?([^:\n]+): +(\d+) kB", re.MULTILINE)


class SystemFiles:
    """The system files below a root folder. A file that is absent or unreadable reads as None.

    Attributes:
        root: Folder that contains ``sys`` and ``proc``.
        live: Whether the root is this machine's own ``/``.
    """

    def __init__(self, root: Path | None = None) -> None:
        """Read below ``root``, or on this machine if absent."""
        self.live = root is None
        self.root = Path("/") if root is None else root

    def path(self, name: str) -> Path:
        """Return the real path of a file."""
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str | None:
        """Return the content of a regular file without its trailing newline."""
        try:
            # Lenient on purpose: a stray byte in a vendor string must not hide the rest of the file.
            return read_bounded(self.path(name), _MOST_BYTES).decode(errors="replace").rstrip("\n")
        except OSError:
            return None

    def integer(self, name: str) -> int | None:
        """Return the whole content of a file as a number (decimal, or hexadecimal with 0x)."""
        text = self.text(name)
        try:
            return None if text is None else int(text.strip(), 0)
        except ValueError:
            return None

    def names(self, folder: str) -> tuple[str, ...]:
        """Return the sorted entries of a folder; empty if there is none."""
        try:
            return tuple(sorted(entry.name for entry in self.path(folder).iterdir()))
        except OSError:
            return ()

    def exists(self, name: str) -> bool:
        """Return whether a file or folder exists and is visible to this user."""
        try:
            return self.path(name).exists()
        except OSError:
            return False


def meminfo(text: str | None) -> dict[str, int]:
    """Return the sizes of ``/proc/meminfo`` or of a node's ``meminfo`` in bytes, by name."""
    return {name: int(kib) * KIB for name, kib in _MEMINFO_LINE.findall(text or "")}
