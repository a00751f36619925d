"""Real shells in which TAB is pressed: what do they put on the command line?"""

from __future__ import annotations

import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_READY = b"READY> "
_INSERT_ALL, _SAVE = "\x1b*", "\x0f"  # Alt-*, Ctrl-O
_SCRIPTS = Path(__file__).parents[1] / "data" / "shells"


def install_command(folder: Path) -> None:
    """Write a ``so-tui`` that runs this code."""
    folder.mkdir()
    command = folder / "so-tui"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -m so_tui "$@"\n')
    command.chmod(0o755)


def offered(
    shell: str, lines: Sequence[str], folder: Path, cwd: Path, environment: Mapping[str, str]
) -> list[list[str]]:
    """Return the words that a shell offers in place of the last one of each line, as it would
    insert them.

    Args:
        shell: bash, zsh or fish.
        lines: What is typed before the words are asked for.
        folder: An empty folder for the shell's own files.
        cwd: Where the shell works.
        environment: Of the shell; its PATH has so-tui.
    """
    if shell == "fish":
        done = subprocess.run(
            ["fish", "--no-config", _SCRIPTS / "offered.fish", *lines],
            cwd=cwd,
            env={**environment},
            capture_output=True,
            text=True,
            errors="surrogateescape",
            check=True,
            timeout=60,
        )
        return [line.split() for line in done.stdout.splitlines()]
    left = _command_lines(shell, lines, folder, cwd, environment)
    return [
        after[len(before) - len(before.split(" ")[-1]) :].split()
        for before, after in zip(lines, left, strict=True)
    ]


def _command_lines(
    shell: str, lines: Sequence[str], folder: Path, cwd: Path, environment: Mapping[str, str]
) -> list[str]:
    """Return each line after the shell has inserted all words that it offers."""
    typed = folder / "typed"
    typed.touch()
    options = ["--rcfile", str(_SCRIPTS / "bashrc")] if shell == "bash" else ["--no-globalrcs"]
    argv = [shell, *options, "-i"]
    own = {"TERM": "dumb", "TYPED": str(typed), "ZDOTDIR": str(_SCRIPTS)}
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        os.execvpe(argv[0], argv, {**environment, **own})
    end, seen = time.monotonic() + 60, b""

    def read() -> bytes:
        assert time.monotonic() < end, seen
        return os.read(terminal, 65_536) if select.select([terminal], [], [], 0.05)[0] else b""

    try:
        while _READY not in seen:
            seen += read()
        os.write(terminal, "".join(f"{line}{_INSERT_ALL}{_SAVE}" for line in lines).encode())
        while len(left := typed.read_text(errors="surrogateescape").split("\0")[:-1]) < len(lines):
            seen += read()  # or the shell would wait for room to write
        return left
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)
