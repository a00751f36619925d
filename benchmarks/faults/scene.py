"""One run that meets a fault: its folders, its commands, and waiting for a moment of it."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from benchmarks.faults import processes
from benchmarks.faults.shim import Shim
from so_tui.runs import RunDirectory, read_state
from so_tui.runs.records import (
    FINAL_STATES,
    MetricRecord,
    Process,
    RunState,
    StepRecord,
    decode_metric,
)
from so_tui.spec import InputError

STEPS = 20
SAVE_EVERY = 3
SETTINGS = (
    f"train.steps={STEPS}",
    f"checkpoint.every_steps={SAVE_EVERY}",
    "checkpoint.keep=3",
    # so that every one is saved at its step; tests/trainer/test_background.py kills the others
    "checkpoint.background=false",
    "offload.mode=superoffload",
    "train.deterministic=true",
    "data.sequence_length=64",
    "train.micro_batch=1",
)
"""Of every run: small and short. Most of its time are the imports of its ranks."""
_OWN = ("CONFIG", "STATE", "DATA")
_CHECKOUT = (Path(__file__).parents[2], Path(__file__).parents[2] / "trainer")
_LIMIT_S = 240.0
"""No moment of such a run is later, on two busy cores."""
_POLL_S = 0.01

_TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], "
    "sys.argv[1:])"
)
"""Makes the terminal that of the new session, whose loss the kernel then tells by SIGHUP."""

Moment = Literal["starting", "loading", "training", "saving", "stopped"]
How = Literal["detached", "plain", "screen"]


class Done(NamedTuple):
    """A command that has ended."""

    exit_code: int
    codes: tuple[str, ...]
    """Of what it refused."""
    out: str
    err: str


class NeverCameError(Exception):
    """What a fault waits for did not happen."""


class Scene:
    """A folder, the run in it, and every process that was started for it."""

    def __init__(self, folder: Path, shim: Shim | None) -> None:
        self.folder, self.mark, self.shim = folder, f"{folder}/", shim
        self.runs_dir = folder / "runs"
        self.runs_dir.mkdir(parents=True, exist_ok=True)
        self.transcript: list[Done] = []
        self.noted: list[str] = []
        """Codes of what a fault found wrong by itself."""
        self.starter: subprocess.Popen[bytes] | None = None
        self.terminal: int | None = None
        self._roles: processes.Roles | None = None
        self._hung_up = threading.Event()
        self._drainer: threading.Thread | None = None
        self._runtime = Path(tempfile.mkdtemp(prefix="so-tui-fault-"))

    @property
    def run(self) -> RunDirectory:
        """The run. Raises NeverCameError if there is none yet."""
        found = [path.parent for path in self.runs_dir.glob("[!.]*/attempts")]
        if len(found) != 1:
            raise NeverCameError(f"{len(found)} runs in {self.runs_dir}")
        return RunDirectory(found[0])

    @property
    def roles(self) -> processes.Roles:
        """The processes of the run."""
        if self._roles is None:
            self._roles = processes.Roles(self.run)
        return self._roles

    def environment(self) -> dict[str, str]:
        """Return the environment of its commands: folders of its own, no GPU, the shim if it has
        one.
        """
        own = {f"XDG_{name}_HOME": str(self.folder / name.lower()) for name in _OWN}
        run = {
            "XDG_RUNTIME_DIR": str(self._runtime),
            processes.MARK: self.mark,
            "PYTHONPATH": os.pathsep.join(
                filter(None, [*map(str, _CHECKOUT), os.environ.get("PYTHONPATH")])
            ),
            "CUDA_VISIBLE_DEVICES": "",
        }
        given = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SO_TUI_", "SLURM_"))
        }
        return {**given, **own, **run, **(self.shim.environment() if self.shim else {})}

    def start(self, how: How) -> None:
        """Start the run: in the background, followed by lines of progress, or on a screen in a
        terminal of its own.
        """
        arguments = ["run", "tiny", "--no-preflight", "--runs-dir", str(self.runs_dir)]
        arguments += [word for setting in SETTINGS for word in ("--set", setting)]
        if how == "detached":
            done = self.so_tui(*arguments, "--detach")
            if done.exit_code:
                raise NeverCameError(f"the start failed with {done.exit_code}: {done.err[-500:]}")
            return
        argv = [sys.executable, "-P", "-m", "so_tui", *arguments]
        if how == "plain":
            with (self.folder / "plain.log").open("wb") as log:
                self.starter = subprocess.Popen(
                    [*argv, "--plain"],
                    env=self.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
        else:
            self.terminal, terminal = pty.openpty()
            environment = self.environment() | {
                "TERM": "xterm-256color",
                "LINES": "40",
                "COLUMNS": "120",
            }
            in_terminal = [sys.executable, "-I", "-c", _TAKE_TERMINAL, *argv]
            self.starter = subprocess.Popen(
                in_terminal,
                env=environment,
                stdin=terminal,
                stdout=terminal,
                stderr=terminal,
                start_new_session=True,
            )
            os.close(terminal)
            self._drainer = threading.Thread(
                target=_drain, args=(self.terminal, self._hung_up), daemon=True
            )
            self._drainer.start()
        self.wait(lambda: any(self.runs_dir.glob("*/state.json")), "the run's folder")

    def so_tui(self, *arguments: str, limit_s: float = _LIMIT_S) -> Done:
        """Run a command to its end."""
        return self.begin(*arguments)(limit_s)

    def begin(self, *arguments: str) -> Callable[[float], Done]:
        """Start a command, and return a function that waits for its end, at most so many
        seconds.
        """
        codes = Path(tempfile.mkstemp(dir=self.folder, suffix=".codes")[1])
        argv = [sys.executable, "-P", "-m", "benchmarks.faults.command", str(codes), *arguments]
        out, err = codes.with_suffix(".out"), codes.with_suffix(".err")
        with (
            out.open("wb") as to_out,
            err.open("wb") as to_err,
        ):  # files, because a pipe would stay open in the supervisor
            process = subprocess.Popen(
                argv, env=self.environment(), stdin=subprocess.DEVNULL, stdout=to_out, stderr=to_err
            )

        def finish(limit_s: float) -> Done:
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                code = -signal.SIGKILL
            refused = tuple(json.loads(codes.read_text() or "[]"))
            done = Done(
                code, refused, out.read_text(errors="replace"), err.read_text(errors="replace")
            )
            self.transcript.append(done)
            return done

        return finish

    def stop(self, *arguments: str) -> Done:
        """Ask the run to stop with a checkpoint, and wait for its end."""
        return self.so_tui("stop", str(self.run.path), *arguments)

    def resume(self, *arguments: str) -> Done:
        """Start another attempt, and follow it to its end."""
        return self.so_tui("resume", str(self.run.path), "--plain", *arguments)

    def reported(self) -> dict[str, object]:
        """Return what ``runs --json`` says of the run; empty if it does not list it."""
        done = self.so_tui("runs", "--json", "--runs-dir", str(self.runs_dir), limit_s=60)
        listed = json.loads(done.out or '{"runs": []}')["runs"]
        return dict(listed[0]) if listed else {}

    def state(self) -> RunState | None:
        """Return the recorded state; None if it cannot be read."""
        with contextlib.suppress(InputError):
            return read_state(self.run)
        return None

    def settle(self, limit_s: float = _LIMIT_S) -> str:
        """Wait for the end of the attempt, and return the state. Where no supervisor is left,
        ``runs`` is asked, as a user would.
        """
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            state = self.state()
            if state is not None and state.state in FINAL_STATES:
                return state.state
            if (state is None or processes.supervisor_of(self.run) is None) and (
                said := self.reported().get("state")
            ) in FINAL_STATES:
                return str(said)
            self.roles.scan()
            time.sleep(0.1)
        raise NeverCameError(
            f"the run has not ended after {limit_s:.0f} s: {state.state if state else 'no state'}"
        )

    def wait(self, condition: Callable[[], bool], what: str, limit_s: float = _LIMIT_S) -> None:
        """Wait for a condition. Raises NeverCameError."""
        deadline = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline:
                raise NeverCameError(f"{what} did not come within {limit_s:.0f} s")
            time.sleep(_POLL_S)

    def wait_for(self, moment: Moment, step: int = 2) -> None:
        """Wait until the run starts, loads, has trained a step, or writes a checkpoint after it."""
        match moment:
            case "starting":
                self.wait(
                    lambda: (state := self.state()) is not None and state.supervisor is not None,
                    "a supervisor",
                )
            case "loading":
                self.wait(lambda: "rank1" in self.roles.scan(), "a second rank")
            case "training":
                self.wait(lambda: self.trained() >= step, f"step {step}")
            case "saving":
                saved = step // SAVE_EVERY * SAVE_EVERY
                self.wait(lambda: self.trained() >= saved, f"step {saved}")
                self.wait(
                    lambda: (
                        self.trained() > saved or any(self.run.checkpoints_dir.glob("*.partial"))
                    ),
                    "a checkpoint",
                )
            case "stopped":
                self.settle()

    def trained(self) -> int:
        """Return the last recorded step."""
        return max(
            (record.step for record in readable(self.run) if isinstance(record, StepRecord)),
            default=0,
        )

    def process(self, role: str) -> Process:
        """Return a process by its role, once it is there. Raises NeverCameError."""
        if role in ("screen", "plain"):
            assert self.starter is not None
            return Process(pid=self.starter.pid, start_time=0)
        found: dict[str, Process] = {}

        def seen() -> bool:
            found.update(self.roles.scan())
            return role in found

        self.wait(seen, role, 60)
        return found[role]

    def hang_up(self) -> None:
        """Close the terminal, as a lost connection does."""
        if self.terminal is not None and self._drainer is not None:
            self._hung_up.set()
            self._drainer.join()
            os.close(self.terminal)
            self.terminal = None

    def set_aside(self, path: Path) -> None:
        """Keep a copy of a file or folder of the run, so that a user can put it back."""
        kept = self.folder / "aside" / path.relative_to(self.run.path)
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(path, kept) if path.is_dir() else shutil.copy2(path, kept)

    def put_back(self) -> None:
        """Put back everything that was set aside."""
        shutil.copytree(self.folder / "aside", self.run.path, dirs_exist_ok=True)

    def close(self) -> None:
        """End every process and remove what is outside of the folder."""
        processes.end(self.mark)
        self.hang_up()
        if self.starter is not None:
            self.starter.wait()
        shutil.rmtree(self._runtime, ignore_errors=True)

    def held_locks(self) -> tuple[str, ...]:
        """Return the locks that are held, of the run and of its host."""
        return processes.held_locks(self.folder) + processes.held_locks(self._runtime)


def readable(run: RunDirectory) -> list[MetricRecord]:
    """Return the records that can be read, in the order in which they were written."""
    lines = (
        line
        for path in sorted(run.metrics_dir.glob("*.jsonl"))
        for line in path.read_bytes().split(b"\n")
    )
    return [record for line in lines if (record := decode_metric(line)) is not None]


def _drain(terminal: int, hung_up: threading.Event) -> None:
    """Read what a screen draws, as a terminal does."""
    with contextlib.suppress(OSError):  # how its end shows itself
        while not hung_up.is_set():
            if select.select([terminal], [], [], 0.1)[0] and not os.read(terminal, 1 << 16):
                return
