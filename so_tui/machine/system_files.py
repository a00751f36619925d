"""Read small files of /sys and /proc, of this machine or of a copy taken from another one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from so_tui.machine.types import Network
from so_tui.spec.check import exists
from so_tui.trust.files import read_bounded
from so_tui.units import KIB

_MOST_BYTES = 1 << 24
"""Of one file; /proc/cpuinfo of the largest machines has a few MiB."""
_NO_NUMBER = re.compile(r"[0-9]{21,}")
"""More digits than 64 bits have. Python converts no text of thousands of them."""
_MEMINFO_LINE = re.compile(r"^(?:Node \d+ )?([^:\n]+): +([0-9]+) kB", re.MULTILINE)


class SystemFiles:
    """The system files below a root folder. A file that is absent or unreadable reads as empty.

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

    def text(self, name: str) -> str:
        """Return the content of a regular file without its trailing newline, and without numbers
        beyond 64 bits; empty if it cannot be read.
        """
        try:
            # Lenient on purpose: a stray byte in a vendor string must not hide the rest of the
            # file.
            text = read_bounded(self.path(name), _MOST_BYTES).decode(errors="replace")
            return _NO_NUMBER.sub("", text).rstrip("\n")
        except OSError:
            return ""

    def integer(self, name: str) -> int | None:
        """Return the whole content of a file as a number (decimal, or hexadecimal with 0x);
        None if it is none, or one of more than 64 bits.
        """
        try:
            number = int(self.text(name).strip(), 0)
        except ValueError:
            return None
        return number if abs(number) < 1 << 64 else None

    def names(self, folder: str) -> tuple[str, ...]:
        """Return the sorted entries of a folder; empty if there is none."""
        try:
            return tuple(sorted(entry.name for entry in self.path(folder).iterdir()))
        except OSError:
            return ()

    def exists(self, name: str) -> bool:
        """Return whether a file or folder exists and is visible to this user."""
        return exists(self.path(name))


def meminfo(text: str) -> dict[str, int]:
    """Return the sizes of ``/proc/meminfo`` or of a node's ``meminfo`` in bytes, by name."""
    return {name: int(kib) * KIB for name, kib in _MEMINFO_LINE.findall(text)}


# Read the adapters of the network that joins the nodes of a cluster: InfiniBand, and the high-
# speed interfaces of Slingshot.


_INFINIBAND = "/sys/class/infiniband"
_INTERFACES = "/sys/class/net"
_RATE = re.compile(r"(\d{1,5}(?:\.\d+)?) Gb/sec")
_SLINGSHOT = re.compile(r"hsn\d+")


def read_network(files: SystemFiles) -> Network | None:
    """Return the adapters whose link is up, as far as they belong to a cluster's network; None if
    there are none.

    Ethernet is left out: that it would be used cannot be seen.
    """
    found = dict(_infiniband(files)) or dict(_slingshot(files))
    return Network(gbit_per_s=sum(found.values()), source=", ".join(found)) if found else None


def _infiniband(files: SystemFiles) -> Iterator[tuple[str, float]]:
    for adapter in files.names(_INFINIBAND):
        for port in files.names(f"{_INFINIBAND}/{adapter}/ports"):
            folder = f"{_INFINIBAND}/{adapter}/ports/{port}"
            rate = _RATE.match(files.text(f"{folder}/rate"))
            if (
                rate
                and "ACTIVE" in files.text(f"{folder}/state")
                and files.text(f"{folder}/link_layer") == "InfiniBand"
            ):
                yield f"{adapter}:{port}", float(rate[1])


def _slingshot(files: SystemFiles) -> Iterator[tuple[str, float]]:
    for name in files.names(_INTERFACES):
        mbit_per_s = (
            files.integer(f"{_INTERFACES}/{name}/speed") if _SLINGSHOT.fullmatch(name) else None
        )
        if mbit_per_s is not None and mbit_per_s > 0:  # -1 where the link is down
            yield name, mbit_per_s / 1000
