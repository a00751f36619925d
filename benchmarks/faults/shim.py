"""A library for processes that preload it: it fills the disk, makes locks useless and attributes
late, replaces files, sets the clock.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Literal, NamedTuple

_SOURCE = Path(__file__).with_name("shim.c")
_LAYOUT = struct.Struct("=qqq256s256s256s256s")
_LOCKS = {"as they are": 0, "fail": 1, "lock nothing": 2}

Locks = Literal["as they are", "fail", "lock nothing"]


def build(folder: Path) -> Path | None:
    """Compile the library into a folder, or return the one that is there; None without a C
    compiler.
    """
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        return None
    library = folder / f"shim-{hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]}.so"
    if not library.exists():
        made = library.with_suffix(f".{os.getpid()}")
        subprocess.run(
            [compiler, "-O2", "-shared", "-fPIC", "-o", made, _SOURCE, "-ldl", "-lpthread"],
            check=True,
        )
        made.rename(library)
    return library


class _Control(NamedTuple):
    """``struct control`` of shim.c."""

    clock_offset_s: int = 0
    locks: int = 0
    attributes_late_ms: int = 0
    full: bytes = b""
    unlocked: bytes = b""
    late: bytes = b""
    replaced: bytes = b""


class Shim:
    """What the processes of one fault meet. It changes in all of them at once."""

    def __init__(self, library: Path, control: Path) -> None:
        self._library, self._path = library, control
        self._path.write_bytes(_LAYOUT.pack(*_Control()))
        self._control = _Control()

    def environment(self) -> dict[str, str]:
        """Return the variables of processes that are to meet the faults."""
        return {"LD_PRELOAD": str(self._library), "SO_TUI_FAULT_CONTROL": str(self._path)}

    def fill(self, part: str) -> None:
        """Let writes to paths that contain ``part`` fail, after half of the first one; "" ends
        it.
        """
        self._set(self._control._replace(full=os.fsencode(part)))

    def lock(self, locks: Locks, part: str) -> None:
        """Let flock(2) fail or lock nothing for paths that contain ``part``."""
        self._set(self._control._replace(locks=_LOCKS[locks], unlocked=os.fsencode(part)))

    def set_clock(self, offset_s: int) -> None:
        """Set the wall clock forwards, or back."""
        self._set(self._control._replace(clock_offset_s=offset_s))

    def delay_attributes(self, seconds: float, part: str) -> None:
        """Let each process see sizes and times of paths that contain ``part`` as up to ``seconds``
        old.
        """
        self._set(
            self._control._replace(attributes_late_ms=round(seconds * 1000), late=os.fsencode(part))
        )

    def replace_while_read(self, part: str) -> None:
        """Let every other first read of paths that contain ``part`` fail as if another host had
        replaced the file.
        """
        self._set(self._control._replace(replaced=os.fsencode(part)))

    def _set(self, control: _Control) -> None:
        self._control = control
        with self._path.open("r+b") as file:  # in place, because processes have it mapped
            file.write(_LAYOUT.pack(*control))
