"""A walk by keyboard and one by mouse alone, in a terminal: from the first start to an export.

So-tui runs in tmux, to which keys and the mouse are written and whose rows are read.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from operator import ne
from pathlib import Path
from typing import TypeVar

import pytest
from rich.cells import cell_len
from safetensors.torch import load_file

from so_tui.machine import inspect_machine
from so_tui.runs import RunDirectory, alive, read_spec, read_state
from so_tui.runs.records import StepRecord
from tests.support.launching import log, of_kind
from tests.support.python_path import checkout_path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
    pytest.mark.skipif(
        bool(inspect_machine().gpus), reason="the walks begin on a machine without a GPU"
    ),
]
KEYBOARD_STEPS, MOUSE_STEPS = 6, 10
GIVE_UP_S = 300.0
"""How long to wait for something to appear; machines may be busy."""
LOOK_EVERY_S = 0.1
KEYS = {"enter": "Enter", "esc": "Escape"}
"""What tmux calls keys that so-tui names otherwise."""
LEFT, WHEEL_DOWN = 0, 65
"""Buttons in SGR mouse reports."""


class Terminal:
    """A tmux server with one pane, whose home and working folder lie in ``folder``."""

    def __init__(self, folder: Path, columns: int = 120, rows: int = 36) -> None:
        self.folder = folder
        self.home, self.work = folder / "home", folder / "work"
        sockets = folder / "tmux"
        for needed in (self.home, self.work, sockets):
            needed.mkdir(mode=0o700)
        self._size = ("-x", str(columns), "-y", str(rows))
        self._environment = {
            "HOME": str(self.home),
            "PATH": os.environ["PATH"],
            "PYTHONPATH": checkout_path(),
            "TERM": "tmux-256color",
            "COLORTERM": "truecolor",
            "LANG": "C.UTF-8",
        }
        for kind in ("config", "state", "data", "cache"):
            self._environment[f"XDG_{kind.upper()}_HOME"] = str(self.home / kind)
        own = {name: self._environment[name] for name in ("PATH", "LANG", "HOME")}
        self._server = own | {"TMUX_TMPDIR": str(sockets)}

    def run(self, *command: str) -> None:
        """Run a command in the pane. Its last screen stays when it has ended."""
        variables = [f"{name}={value}" for name, value in self._environment.items()]
        keep = ("start-server", ";", "set-option", "-g", "remain-on-exit", "on", ";")
        session = ("new-session", "-d", *self._size, "-c", str(self.work))
        self._tmux(*keep, *session, shlex.join(["env", "-i", *variables, *command]))

    def close(self) -> None:
        """End the tmux server and what runs in it."""
        with suppress(subprocess.CalledProcessError):  # it has ended
            self._tmux("kill-server")

    def rows(self) -> list[str]:
        """Return the rows of the screen."""
        return self._tmux("capture-pane", "-p").splitlines()

    def ended(self) -> None:
        """Wait for the command's exit status, which must be 0."""
        self.until(lambda _: self._status(), "the end of the command")
        assert self._status() == "0"

    def _status(self) -> str:
        """Return the command's exit status; nothing while it runs, and until tmux knows it."""
        asked = "#{pane_dead}:#{pid}:#{pane_dead_status}"
        dead, server, status = self._tmux("display-message", "-p", asked).strip().split(":")
        # Tmux 3.3 now and then misses that its child has ended, and looks only when it is told.
        if dead == "1" and not status:
            os.kill(int(server), signal.SIGCHLD)
        return status

    def until(self, happened: Callable[[list[str]], object], what: str) -> list[str]:
        """Wait until ``happened`` is true of the rows, and return them; name ``what``."""
        deadline = time.monotonic() + GIVE_UP_S
        while True:
            rows = self.rows()
            if happened(rows):
                return rows
            assert time.monotonic() < deadline, "\n".join([f"waited for {what}", *rows])
            time.sleep(LOOK_EVERY_S)

    def shown(self, text: str) -> list[str]:
        """Wait until the screen shows a text, and return its rows."""
        return self.until(lambda rows: text in "\n".join(rows), repr(text))

    def matched(self, pattern: str) -> re.Match[str]:
        """Wait until a row of the screen matches a regular expression, and return the match."""
        found = re.compile(pattern).search
        rows = self.until(lambda rows: any(map(found, rows)), f"a match of {pattern}")
        return next(filter(None, map(found, rows)))

    def _tmux(self, *arguments: str) -> str:
        command = ["tmux", "-f", "/dev/null", *arguments]
        return subprocess.run(
            command, env=self._server, capture_output=True, text=True, check=True
        ).stdout


class Keyboard(Terminal):
    """A user who has no mouse, and knows no key but those that are named before their eyes."""

    def press(self, key: str, named: str) -> None:
        """Press the key that ``named`` says (``Launch  y``), once that text is on the screen."""
        words = named.split()
        assert key in (*words, *words[0].split("/")), f"{named!r} does not name {key!r}"
        self.shown(named)
        self._tmux("send-keys", KEYS.get(key, key))

    def type(self, text: str) -> None:
        """Type a text in one burst, as a terminal pastes it."""
        self._tmux("send-keys", "-l", text)


class Mouse(Terminal):
    """A user who has a mouse only: presses, releases and the wheel, where a text stands."""

    def click(self, text: str) -> None:
        """Press and release the left button on a text, once it is on the screen."""
        x, y = self._cell_of(text)
        self._report(f"{LEFT};{x};{y}M")
        self._report(f"{LEFT};{x};{y}m")

    def scroll_to(self, text: str, over: str) -> None:
        """Turn the wheel down where ``over`` stands until a text is on the screen."""
        x, y = self._cell_of(over)
        rows = self.rows()
        while not any(text in row for row in rows):
            self._report(f"{WHEEL_DOWN};{x};{y}M")
            rows = self.until(partial(ne, rows), f"the wheel to move the screen to {text!r}")

    def _cell_of(self, text: str) -> tuple[int, int]:
        """Return column and row, counted from 1, of the middle of a text."""
        rows = self.shown(text)
        found = [(row, line) for row, line in enumerate(rows, 1) if text in line]
        assert len(found) == 1, "\n".join([f"{text!r} is on the screen {len(found)} times", *rows])
        row, line = found[0]
        assert line.count(text) == 1, "\n".join([f"{text!r} is in this row more than once", line])
        return cell_len(line[: line.index(text)]) + 1 + cell_len(text) // 2, row

    def _report(self, report: str) -> None:
        self._tmux("send-keys", "-l", f"\x1b[<{report}")


NewUser = TypeVar("NewUser", bound=Terminal)


def runs_of(user: Terminal) -> list[RunDirectory]:
    """Return the runs in the folder of a user's home where so-tui puts them."""
    return [RunDirectory(path) for path in user.home.glob("state/so-tui/runs/*") if path.is_dir()]


def losses_of(run: RunDirectory) -> list[float]:
    """Return the loss of every step that a run has recorded."""
    return [record.loss for record in of_kind(run, StepRecord)]


@contextmanager
def first_start(user: NewUser) -> Iterator[NewUser]:
    """Open so-tui for somebody who has never run it, until the test is over."""
    assert not any(user.home.iterdir())
    try:
        user.run(sys.executable, "-m", "so_tui")
        yield user
    finally:  # what a walk that failed leaves behind
        user.close()
        for state in map(read_state, runs_of(user)):
            for process in filter(None, (state.supervisor, *state.processes)):
                if alive(process):
                    with suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)


def watched_to_its_end(user: Terminal, steps: int) -> RunDirectory:
    """Follow the only run on the dashboard: what is shown of a step is what the run recorded."""
    shown = user.matched(rf"(\S+) +● training +step ([1-9]\d*) / {steps}\b")
    (run,) = runs_of(user)
    assert run.name == shown[1]
    assert 1 <= int(shown[2]) <= len(losses_of(run))
    user.matched(r"loss[ ─]+now \d+\.\d+")
    user.matched(rf"✓ finished +step {steps} / {steps}\b")
    losses = losses_of(run)
    assert len(losses) == steps, log(run)
    last = float(user.matched(r"loss[ ─]+last (\d+\.\d+)")[1])
    assert last == pytest.approx(losses[-1], abs=0.006)
    state, spec = read_state(run), read_spec(run)
    assert (state.state, spec.name, spec.model.weights) == ("finished", "tiny", "random")
    assert {state.step, state.saved_step, state.total_steps, spec.train.steps} == {steps}
    return run


def check_export(user: Terminal, run: RunDirectory) -> None:
    """Wait until the model has been exported where the user works, and load it."""
    user.matched(r"Wrote")
    (folder,) = user.work.iterdir()
    assert folder.name == f"{run.name}-model"
    weights = load_file(folder / "model.safetensors")
    assert "model.embed_tokens.weight" in weights
    assert all(weight.isfinite().all() and weight.any() for weight in weights.values())


def test_by_keyboard_alone(tmp_path: Path) -> None:
    with first_start(Keyboard(tmp_path)) as user:
        # The cursor stands on the model that this machine can train.
        user.press("enter", named="enter Configure")
        user.shown("tiny (embedded)   preset tiny")
        user.press("/", named="/ Find")
        user.type("train for")
        user.press("enter", named="enter Go there")
        user.type(str(KEYBOARD_STEPS))
        user.press("esc", named="esc Leave the field")
        user.press("l", named="l/F5 Launch")
        user.press("y", named="Launch  y")
        run = watched_to_its_end(user, KEYBOARD_STEPS)

        user.press("4", named="4 Runs")
        user.press("E", named="E Export")
        user.press("enter", named="Export  enter")
        check_export(user, run)
        user.press("q", named="q Quit")
        user.press("y", named="Quit  y")  # the number of steps was not saved as a preset
        user.ended()


def test_by_mouse_alone(tmp_path: Path) -> None:
    with first_start(Mouse(tmp_path)) as user:
        user.click("enter Configure")
        user.shown("tiny (embedded)   preset tiny")
        user.scroll_to("train for", over="Offload")
        user.click("train for")
        for steps in range(50, MOUSE_STEPS - 1, -10):  # the preset says 60
            user.click("−")
            user.matched(rf"train for +{steps} ")
        user.click("Launch  F5")
        user.click("Launch  y")
        run = watched_to_its_end(user, MOUSE_STEPS)

        user.click("4 Runs")
        user.click("E Export")
        user.click("the model, a folder")
        user.click("Export  enter")
        check_export(user, run)
        user.click("q Quit")
        user.click("Quit  y")  # the number of steps was not saved as a preset
        user.ended()
