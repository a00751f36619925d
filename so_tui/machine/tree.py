"""Reading small files of /sys and /proc below a root that is a parameter, so that another machine's tree can be read too."""

from __future__ import annotations

import re
from pathlib import Path

KIB = 1024
_MEMINFO_LINE = re.compile(r"^(?:Node \d+ )?([^:\n]+): +(\d+) kB", re.MULTILINE)


class Tree:
    """The files below ``root``; ``live`` where that is this machine's own ``/``. A file that is absent or unreadable reads as None."""

    def __init__(self, root: Path | None = None) -> None:
        self.live = root is None
        self.root = Path("/") if root is None else root

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str | None:
        """The file's text with its trailing newline removed."""
        try:
            # Lenient on purpose: a stray byte in a vendor string must not hide the rest of the file.
            return self.path(name).read_text(encoding="utf-8", errors="replace").rstrip("\n")
        except OSError:
            return None

    def integer(self, name: str) -> int | None:
        """The file's whole content as a number (decimal, or hexadecimal with 0x)."""
        text = self.text(name)
        try:
            return None if text is None else int(text.strip(), 0)
        except ValueError:
            return None

    def names(self, folder: str) -> tuple[str, ...]:
        """Entries of a folder in byte order; empty where there is none."""
        try:
            return tuple(sorted(entry.name for entry in self.path(folder).iterdir()))
        except OSError:
            return ()

    def exists(self, name: str) -> bool:
        try:
            return self.path(name).exists()
        except OSError:
            return False


def meminfo(text: str | None) -> dict[str, int]:
    """``/proc/meminfo`` or a node's ``meminfo`` as bytes by name."""
    return {name: int(kib) * KIB for name, kib in _MEMINFO_LINE.findall(text or "")}
