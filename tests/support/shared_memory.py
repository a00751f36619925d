"""What processes have in /dev/shm, where others have files at the same time."""

from __future__ import annotations

import re
import tempfile
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def files_in_shared_memory(pid: int) -> set[str]:
    """Return the files of /dev/shm that a process has open or mapped, but for semaphores."""
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            links.append(str(link.readlink()))
    maps = [line.partition("/")[2] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    paths = {*links, *(f"/{path}" for path in maps)}
    return {
        path
        for path in paths
        if path.startswith(f"{SHARED_MEMORY}/")
        and not path.startswith(f"{tempfile.gettempdir()}/")  # which may be in memory, too
        and not Path(path).name.startswith("sem.")
    }


def named_after(*numbers: int) -> set[str]:
    """Return the files of /dev/shm with a number, of a process or a port, in their names."""
    wanted = {str(number) for number in numbers}
    return {
        path.name for path in SHARED_MEMORY.iterdir() if wanted & set(re.findall(r"\d+", path.name))
    }
