"""The attacker's processes: ``python -m benchmarks.attacks.attacker WHAT ARGUMENT...``.

Each waits for the victim to reach some point, changes something right then, and prints it.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

FORBIDDEN = "the kernel forbids it"
"""Printed where an attack ends because other users cannot write there."""
_LIMIT_S = 180.0
_LOOKS_INTO = 0x20 | 0x10 | 0x1
"""inotify: opened, closed after reading, read."""


def _command_lines() -> Iterator[str]:
    for name in os.listdir("/proc"):  # noqa: PTH208 (names, not paths, hundreds of times a second)
        if name.isdigit():
            try:
                yield Path("/proc", name, "cmdline").read_text(errors="replace")
            except OSError:
                continue


def _seen(pattern: str) -> re.Match[str]:
    """Wait until some command line matches, and return the match."""
    deadline = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline:
        for line in _command_lines():
            if found := re.search(pattern, line):
                return found
    raise TimeoutError(f"no command line has {pattern}")


def _events(path: Path, mask: int) -> Iterator[None]:
    """Yield once for each read of events of a file or folder."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(os.O_CLOEXEC)
    if libc.inotify_add_watch(descriptor, os.fsencode(path), mask) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    print("ready", flush=True)
    while os.read(descriptor, 1 << 16):
        yield


def _open_to_all(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o777)


def bait(runs: str, changes: str) -> None:
    """Make a run whose launch differs in what it says of the model."""
    from so_tui.launch.launch import prepare, write_launch
    from so_tui.machine.inspect import inspect_machine
    from so_tui.runs import create_run, new_attempt
    from so_tui.spec import find_preset, with_values

    spec = with_values(find_preset("tiny").spec, {"offload.mode": "superoffload"})
    run = create_run(spec, Path(runs))
    for _ in range(3):
        launch = prepare(spec, inspect_machine())
        write_launch(run, attempt := new_attempt(run), launch)
        path = run.launch_path(attempt)
        tree: Any = json.loads(path.read_text())
        tree["plan"]["spec"]["model"].update(json.loads(changes))
        tree["start_over"] = True
        path.write_text(json.dumps(tree))
    _open_to_all(run.path)
    print(run.path)


def exchange(pattern: str, instead: str, folder: str = "", lock: str = "") -> None:
    """Put a folder in the place of another one when a command line matches.

    Args:
        pattern: A regular expression for the command line, whose group is the folder's path if
            none is given.
        instead: The folder to put there.
        folder: The folder to exchange.
        lock: A file to keep in it for a while: torch waits for that, and then loads a library
            without compiling it.
    """
    found = _seen(pattern)
    place = Path(folder or found[1])
    while folder and not os.path.lexists(place):
        time.sleep(0.001)
    try:
        place.rename(place.with_name(f"{place.name}.taken"))
    except PermissionError:  # perhaps a folder above can be renamed
        above = place.parent
        above.rename(above.with_name(f"{above.name}.taken"))
        above.mkdir()
        above.chmod(0o777)
    Path(instead).rename(place)
    print(f"exchanged {place}", flush=True)
    held = place / lock
    while lock and not any(held.parent.glob("*.lock")):  # which a rank makes before it loads
        held.touch()
        time.sleep(0.01)
    until = time.monotonic() + 15
    while lock and time.monotonic() < until:
        held.touch()
        time.sleep(0.0005)
    if lock:
        held.unlink()


def turn(watched: str, link: str, target: str) -> None:
    """Point a link to a different target as soon as the watched file is read."""
    ready = Path(f"{link}.new")
    ready.symlink_to(target)
    for _ in _events(Path(watched), _LOOKS_INTO):
        ready.rename(link)
        print("turned", flush=True)
        return


def rewrite(old: str, new: str, *files: str) -> None:
    """Change a word in files as soon as the first one has been read."""
    changed = {Path(file): Path(file).read_text().replace(old, new) for file in files}
    for _ in _events(Path(files[0]), _LOOKS_INTO):
        for path, text in changed.items():
            path.write_text(text)
        print("rewritten", flush=True)
        return


def storm(first: str, second: str) -> None:
    """Exchange two names all the time."""
    exchange_flag, here = 2, -100
    libc = ctypes.CDLL(None, use_errno=True)
    names = (os.fsencode(first), os.fsencode(second))
    while libc.renameat2(here, names[0], here, names[1], exchange_flag) == 0:
        print("ready", flush=True)
        time.sleep(random.random() / 500)
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), first)


def squat(path: str) -> None:
    """Take a name all the time: by a folder that everybody can write, and by a link to one."""
    place, elsewhere = Path(path), Path(f"{path}.elsewhere")
    elsewhere.mkdir()
    elsewhere.chmod(0o777)
    for turn_of_link in itertools.cycle((False, True)):
        with suppress(FileExistsError):  # the victim was first
            if turn_of_link:
                place.symlink_to(elsewhere)
            else:
                place.mkdir()
                place.chmod(0o777)
        print("ready", flush=True)
        time.sleep(random.random() / 500)
        with suppress(OSError):
            if turn_of_link:
                place.unlink()
            else:
                place.rmdir()


_PARTS: dict[str, Callable[..., None]] = {
    part.__name__: part for part in (bait, exchange, turn, rewrite, storm, squat)
}

if __name__ == "__main__":
    try:
        _PARTS[sys.argv[1]](*sys.argv[2:])
    except PermissionError as denied:
        print(f"{FORBIDDEN}: {denied}", flush=True)
