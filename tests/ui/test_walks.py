"""A walk by keyboard alone, in a terminal: from the first start to an export.

So-tui runs in tmux, to which keys are written and whose rows are read.
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
from contextlib import closing, suppress
from pathlib import Path

import pytest
from safetensors.torch import load_file

from so_tui.machine import inspect_machine
from so_tui.runs import RunDirectory, alive, read_state
from so_tui.runs.records import StepRecord
from tests.support.launching import log, of_kind
from tests.support.make_run import write_run
from tests.support.python_path import checkout_path
from tests.support.records import change_state
from tests.support.waiting import wait_until

STEPS = 6
GIVE_UP_S = 300.0
"""How long to wait for something to appear; machines may be busy."""
KEYS = {"enter": "Enter", "esc": "Escape"}
"""What tmux calls keys that so-tui names otherwise."""


class Terminal:
    """A tmux server with one pane, whose home and working folder lie in ``folder``; its user has no
    mouse, and knows no key but those that are named before their eyes.

    Args:
        folder: An empty one.
        shell: Start so-tui from a shell, as its job.
    """

    def __init__(self, folder: Path, *, shell: bool = False) -> None:
        self.home, self.work, sockets = (folder / name for name in ("home", "work", "tmux"))
        for needed in (self.home, self.work, sockets):
            needed.mkdir(mode=0o700)
        same = {"HOME": str(self.home), "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
        self._server = same | {"TMUX_TMPDIR": str(sockets)}
        variables = same | {"PYTHONPATH": checkout_path(), "TERM": "tmux-256color"}
        variables |= {
            f"XDG_{kind}_HOME": str(self.home / kind.lower())
            for kind in ("CONFIG", "STATE", "DATA", "CACHE")
        }
        so_tui = ["env", "-i", *map("=".join, variables.items()), sys.executable, "-m", "so_tui"]
        # Its last screen stays when it has ended.
        keep = ("start-server", ";", "set-option", "-g", "remain-on-exit", "on", ";")
        session = ("new-session", "-d", "-x", "120", "-y", "36", "-c", str(self.work))
        # The shell that tmux starts knows the server.
        command = shlex.join(so_tui).replace("-i", '-i "TMUX=$TMUX"', 1)
        self.tmux(*keep, *session, "bash --norc -i" if shell else command)
        if shell:
            self.type(f"{command}\n")

    def close(self) -> None:
        with suppress(subprocess.CalledProcessError):  # it has ended
            self.tmux("kill-server")
        for state in map(read_state, self.runs()):
            for process in filter(None, (state.supervisor, *state.processes)):
                if alive(process):
                    with suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)

    def runs(self) -> list[RunDirectory]:
        found = self.home.glob("state/so-tui/runs/*")
        return [RunDirectory(path) for path in found if path.is_dir()]

    def status(self) -> str:
        """Return so-tui's exit status; nothing while it runs, and until tmux knows it."""
        asked = "#{pane_dead}:#{pid}:#{pane_dead_status}"
        dead, server, status = self.tmux("display-message", "-p", asked).strip().split(":")
        # Tmux 3.3 now and then misses that its child has ended, and looks only when it is told.
        if dead == "1" and not status:
            os.kill(int(server), signal.SIGCHLD)
        return status

    def matched(self, pattern: str) -> re.Match[str]:
        deadline = time.monotonic() + GIVE_UP_S
        while not (found := re.search(pattern, rows := self.tmux("capture-pane", "-p"))):
            assert time.monotonic() < deadline, f"waited for a match of {pattern}\n{rows}"
            time.sleep(0.1)
        return found

    def press(self, key: str, named: str) -> None:
        """Press the key that ``named`` says (``Launch  y``), once that text is on the screen."""
        words = named.split()
        assert key in (*words, *words[0].split("/")), f"{named!r} does not name {key!r}"
        self.matched(re.escape(named))
        self.tmux("send-keys", KEYS.get(key, key))

    def type(self, text: str) -> None:
        self.tmux("send-keys", "-l", text)

    def tmux(self, *arguments: str) -> str:
        command = ["tmux", "-f", "/dev/null", *arguments]
        return subprocess.run(
            command, env=self._server, capture_output=True, text=True, check=True
        ).stdout


def watched_to_its_end(user: Terminal) -> RunDirectory:
    """Follow the only run on the dashboard: what is shown of a step is what the run recorded."""
    shown = user.matched(rf"(\S+) +● training +step ([1-9]\d*) / {STEPS}\b")
    (run,) = user.runs()
    assert run.name == shown[1]
    assert 1 <= int(shown[2]) <= len(of_kind(run, StepRecord))
    user.matched(r"loss( 1/\d ▸)?[ ─]+now \d+\.\d+")
    user.matched(rf"✓ finished +step {STEPS} / {STEPS}\b")
    losses = [record.loss for record in of_kind(run, StepRecord)]
    assert len(losses) == STEPS, log(run)
    last = float(user.matched(r"loss(?: 1/\d ▸)?[ ─]+last (\d+\.\d+)")[1])
    assert last == pytest.approx(losses[-1], abs=0.006)
    state = read_state(run)
    assert (state.state, state.saved_step) == ("finished", STEPS)
    return run


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
@pytest.mark.skipif(bool(inspect_machine().gpus), reason="it begins on a machine without a GPU")
def test_by_keyboard_alone(tmp_path: Path) -> None:
    with closing(Terminal(tmp_path)) as user:
        # The cursor stands on the model that this machine can train.
        user.press("enter", named="enter Configure")
        user.matched(r"tiny \(embedded\)   preset tiny")
        user.press("/", named="/ Find")
        user.type("train for")
        user.press("enter", named="enter Go there")
        user.type(str(STEPS))
        user.press("esc", named="esc Leave the field")
        user.press("l", named="l/F5 Launch")
        user.press("y", named="Launch  y")
        run = watched_to_its_end(user)
        user.press("4", named="4 Runs")
        user.press("E", named="E Export")
        user.press("enter", named="Export  enter")
        user.matched("Wrote")
        (folder,) = user.work.iterdir()
        assert folder.name == f"{run.name}-model"
        weights = load_file(folder / "model.safetensors")
        assert "model.embed_tokens.weight" in weights
        assert all(weight.isfinite().all() and weight.any() for weight in weights.values())
        user.press("q", named="q Quit")
        user.press("y", named="Quit  y")  # the number of steps was not saved as a preset
        wait_until(user.status, limit_s=GIVE_UP_S)
        assert user.status() == "0"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
@pytest.mark.skipif(bool(inspect_machine().gpus), reason="it begins on a machine without a GPU")
def test_texts_are_copied_to_tmux_and_pasted_from_it(tmp_path: Path) -> None:
    with closing(Terminal(tmp_path)) as user:
        run = write_run(tmp_path / "home" / "state" / "so-tui" / "runs", steps=3)
        change_state(run, state="finished")
        user.press("enter", named="enter Configure")
        user.press("y", named="y Copy")
        user.matched("Copied")
        wait_until(lambda: "--bind_cores_to_rank" in user.tmux("show-buffer"))
        user.press("4", named="4 Runs")
        user.matched(run.name)
        # To Textual, the D and the y behind an escape are keys that delete a run.
        user.tmux("set-buffer", "hello \x1b[mDy\x1b[Dy")
        user.tmux("paste-buffer", "-p")
        user.press("3", named="3 Dashboard")
        user.matched(f"{run.name} +✓ finished")
        assert run.path.exists()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
@pytest.mark.skipif(bool(inspect_machine().gpus), reason="it begins on a machine without a GPU")
def test_it_is_suspended_and_resumed_as_other_programs_are(tmp_path: Path) -> None:
    with closing(Terminal(tmp_path, shell=True)) as user:
        user.matched("enter Configure")
        user.tmux("send-keys", "C-z")
        user.matched(r"\[1\]\+ +Stopped")
        user.type("fg\n")
        user.matched("5 Machine")
        user.press("enter", named="enter Configure")
        user.matched(r"tiny \(embedded\)   preset tiny")
