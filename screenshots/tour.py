"""Record the tour of the README: a real session in a real terminal, from a plan for a GH200 to an
exported model.

    make tour

tmux is the terminal: this program types into it, reads its screen, and writes what changed to
``tour.cast`` (asciicast v2). svg-term-cli makes ``tour.svg`` of that. Waiting is shortened; nothing
else is. The session has a home, a host name and paths of its own, so that the recording does not
show where it was made. The host name needs a UTS namespace, which most Linux machines let users
create.
"""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
CAST = FOLDER / "tour.cast"
COLUMNS, ROWS = 120, 36
HOST_NAME = "laptop"
HOME = Path("/tmp/tour")
SVG_TERM = "svg-term-cli@2.1.1"

READ_EVERY_S = 0.05
SHORTEST_FRAME_S = 0.3
"""Of playing time. Each frame is a whole screen in the SVG, which these keep small."""
GIVE_UP_S = 600.0
STYLE = re.compile(r"\x1b\[[0-9;:]*m|[\x0e\x0f]")

Event = tuple[float, str, str]
"""When, what (``o``: output), and the text."""


@dataclass
class Terminal:
    """A tmux server with one pane, its recording, and the time of the recording so far."""

    socket: str = f"so-tui-tour-{os.getpid()}"
    events: list[Event] = field(default_factory=list)
    drawn: list[str] = field(default_factory=lambda: [""] * ROWS)
    cursor: str = ""
    played_s: float = 0.0
    pace: float = 1.0
    """Seconds of the session for each second of the recording."""
    looked_at: float = field(default_factory=time.monotonic)

    def tmux(self, *arguments: str) -> str:
        """Run a tmux command and return what it printed."""
        done = subprocess.run(
            ["tmux", "-L", self.socket, "-f", "/dev/null", *arguments],
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    def open(self, environment: dict[str, str]) -> None:
        """Start a shell on a machine with our host name."""
        shell = [
            "env",
            "-i",
            *(f"{name}={value}" for name, value in environment.items()),
            "bash",
            "--noprofile",
            "--norc",
            "-i",
        ]
        namespace = [
            "unshare",
            "--map-root-user",
            "--uts",
            "sh",
            "-c",
            f'hostname {HOST_NAME} && exec "$@"',
            "sh",
        ]
        self.tmux(
            "new-session",
            "-d",
            "-x",
            str(COLUMNS),
            "-y",
            str(ROWS),
            "-c",
            str(HOME),
            *namespace,
            *shell,
        )

    def screen(self) -> tuple[list[str], str]:
        """Return the rows of the screen, each with all its styles, and where the cursor is."""
        # A capture of many rows states a style once, where it starts, even if that is rows above.
        rows = (
            ("capture-pane", "-epN", "-S", str(row), "-E", str(row), ";") for row in range(ROWS)
        )
        cursor = ("display-message", "-p", "#{cursor_flag} #{cursor_x} #{cursor_y}")
        *lines, where = self.tmux(
            *(word for command in rows for word in command), *cursor
        ).splitlines()
        return lines, where

    def text(self) -> list[str]:
        """Return the rows of the screen as last read, without styles."""
        return [STYLE.sub("", row).rstrip() for row in self.drawn]

    def look(self) -> None:
        """Read the screen, and record what has changed since the last frame."""
        now = time.monotonic()
        self.played_s += (now - self.looked_at) / self.pace
        self.looked_at = now
        if self.events and self.played_s - self.events[-1][0] < SHORTEST_FRAME_S:
            return
        rows, cursor = self.screen()
        changed = [index for index in range(ROWS) if rows[index] != self.drawn[index]]
        if changed or cursor != self.cursor:
            shown, x, y = map(int, cursor.split())
            lines = "".join(f"\x1b[{index + 1};1H\x1b[0m\x1b[2K{rows[index]}" for index in changed)
            self.events.append(
                (
                    self.played_s,
                    "o",
                    f"{lines}\x1b[0m\x1b[{y + 1};{x + 1}H\x1b[?25{'h' if shown else 'l'}",
                )
            )
            self.drawn, self.cursor = rows, cursor

    def pause(self, seconds: float) -> None:
        """Let the recording play on for ``seconds``."""
        end = self.played_s + seconds
        while self.played_s < end:
            time.sleep(READ_EVERY_S)
            self.look()

    def wait(self, pattern: str) -> None:
        """Wait until a row of the screen matches ``pattern``, a regular expression."""
        since = time.monotonic()
        while not any(re.search(pattern, row) for row in self.text()):
            if time.monotonic() - since > GIVE_UP_S:
                sys.exit("\n".join([*self.text(), f"waited {GIVE_UP_S:.0f} s for {pattern!r}"]))
            time.sleep(READ_EVERY_S)
            self.look()

    @contextmanager
    def faster(self, pace: float) -> Iterator[None]:
        """Shorten what happens meanwhile in the recording."""
        self.look()
        self.pace = pace
        yield
        self.look()
        self.pace = 1.0

    def press(self, *keys: str, then: float = 0.8) -> None:
        """Press keys, by their names in tmux, and let the effect be seen."""
        self.tmux("send-keys", *keys)
        self.pause(then)

    def confirm(self, key: str, question: str) -> None:
        """Press a key that asks a question, let it be read, and answer yes."""
        self.press(key, then=0.3)
        self.wait(question)
        self.pause(1.5)
        self.press("y", then=0.8)

    def focus(self, label: str, key: str) -> None:
        """Go to the field with this label, which sets ``key``, by looking for it."""
        self.press("/", then=0.5)
        self.wait("a field's name")
        self.tmux("send-keys", "-l", label)
        self.wait(rf"^ *{label} *│")
        self.press("Enter", then=0.5)
        self.wait(rf"^ *{re.escape(key)}  ")

    def replace(self, text: str) -> None:
        """Type ``text`` in place of what stands in the field with the focus."""
        self.press("End", "C-u", text, then=1.5)

    def command(self, line: str, *, until: str) -> None:
        """Type a command at the prompt and wait for a row of its output that matches ``until``."""
        self.tmux("send-keys", "-l", line)
        self.pause(1.0)
        self.press("Enter", then=0.3)
        with self.faster(4.0):
            self.wait(until)

    def close(self) -> None:
        """End the tmux server, and so the session."""
        subprocess.run(["tmux", "-L", self.socket, "kill-server"], capture_output=True, check=False)


def session(terminal: Terminal) -> None:
    """Show what so-tui does, from the first plan to the exported model."""
    t = terminal
    t.wait(r"^\$$")
    t.pause(0.5)
    t.command(
        "so-tui plan --machine gh200-480      # a machine that is not here",
        until="^speeds are predictions",
    )
    t.pause(4.0)
    t.command("clear; so-tui --machine gh200-480", until=r"step  .*\d s ")
    t.pause(4.0)

    # A batch that does not fit, and the remedy that the plan names.
    t.press("Enter", then=2.5)
    t.focus("micro batch", "train.micro_batch")
    t.replace("16")
    t.wait("does not fit")
    t.pause(3.0)
    t.replace("4")
    t.wait("✓ fits")
    t.pause(1.0)
    t.press("Escape", then=0.3)

    # Training here: the tiny model on two ranks.
    t.press("o", then=1.5)
    t.press("C-u", "Enter", then=0.5)
    t.wait(f"so-tui  {HOST_NAME}")
    t.press("1", then=0.5)
    t.press("End", then=1.5)
    t.press("Enter", then=1.5)
    t.focus("train for", "train.length")
    t.replace("30")
    t.press("Escape", then=0.5)
    t.confirm("l", "Launch tiny")
    with t.faster(12.0):
        t.wait("● training .* step 1[2-9] ")  # frames may miss a step

    # Stop it, which saves a checkpoint, and continue from there.
    t.confirm("s", "Stop tiny")
    with t.faster(6.0):
        t.wait("■ stopped")
    t.pause(2.0)
    t.confirm("r", "Resume tiny")
    with t.faster(12.0):
        t.wait("finished .* step 30 ")
    t.pause(2.5)
    t.press("4", then=2.5)
    t.confirm("q", "Quit and lose")
    t.wait(r"^\$$")
    t.command("so-tui export --to tiny-model", until="^wrote tiny-model")
    t.command("ls tiny-model", until="safetensors")
    t.pause(4.0)


def record(
    session: Callable[[Terminal], None], environment: Mapping[str, str] | None = None
) -> list[Event]:
    """Record a session in a home of its own, which is deleted when all went well. ``environment``:
    more variables of its shell.
    """
    HOME.mkdir(mode=0o700)  # fails where anything of this name exists
    terminal = Terminal()
    try:
        (HOME / "venv").symlink_to(sys.prefix)
        (HOME / "so-tui").symlink_to(ROOT)
        (HOME / "bin").mkdir()
        program = HOME / "bin" / "so-tui"
        program.write_text(f'#!/bin/sh\nexec {HOME}/venv/bin/python -m so_tui "$@"\n')
        program.chmod(0o700)
        terminal.open(
            {
                "HOME": str(HOME),
                "PATH": f"{HOME}/bin:{HOME}/venv/bin:/usr/lib/ccache:/usr/local/bin:/usr/bin:/bin",
                "PYTHONPATH": f"{HOME}/so-tui:{HOME}/so-tui/trainer",
                "TERM": "tmux-256color",
                "COLORTERM": "truecolor",
                "LANG": "C.UTF-8",
                "PS1": "$ ",
                "HISTFILE": "",
                **(environment or {}),
            }
        )
        session(terminal)
    finally:
        terminal.close()
    shutil.rmtree(HOME)  # not after a failure, which its logs explain
    return terminal.events


def draw(cast: Path) -> Path:
    """Make the picture of a recording."""
    # Not optimised by svg-term-cli, which would collapse the spaces within texts.
    command = ["npx", "--yes", SVG_TERM, "--in", str(cast), "--window", "--no-optimize"]
    picture = cast.with_suffix(".svg")
    picture.write_text(
        smaller(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    )
    return picture


def smaller(svg: str) -> str:
    """Return an SVG of svg-term-cli without blank texts and needless digits of positions, which are
    a third of it.
    """
    svg = re.sub(r" +</text>", "</text>", svg)
    svg = re.sub(r"<text[^>]*></text>", "", svg)
    svg = re.sub(r'(?<= [xy]=")\d+\.\d{3,}', lambda number: f"{float(number[0]):.2f}", svg)
    svg = re.sub(r"></(?:rect|use)>", "/>", svg)
    return svg.replace("<svg ", '<svg xml:space="preserve" ', 1)


def write(cast: Path, title: str, events: list[Event]) -> None:
    """Write the recording and the picture, unless they show where they were made."""
    header = {"version": 2, "width": COLUMNS, "height": ROWS, "title": title}
    lines = [header, *([round(at, 3), kind, text] for at, kind, text in events)]
    recording = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    ours = {platform.node(), getpass.getuser(), str(ROOT), sys.prefix, str(Path.home())}
    if shown := sorted(
        word for word in ours if re.search(rf"(?<![\w/]){re.escape(word)}\b", recording)
    ):
        sys.exit(f"not written, because it would show {', '.join(shown)}")
    cast.write_text(recording)
    picture = draw(cast)
    print(
        f"{len(events)} frames, {events[-1][0]:.0f} s; {cast.stat().st_size:,} bytes; "
        f"{picture.stat().st_size:,} bytes"
    )


def check_tools() -> None:
    """Exit if a program is missing that recording needs."""
    if missing := [tool for tool in ("tmux", "unshare", "npx") if shutil.which(tool) is None]:
        sys.exit(f"{', '.join(missing)} must be installed")


if __name__ == "__main__":
    check_tools()
    write(CAST, "so-tui: plan, configure, train, stop, resume, export", record(session))
