"""A run folder with pipes and devices: opening waits for a writer, reading may never end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from so_tui.runs import RunDirectory, create_run, new_attempt, write_state
from so_tui.runs.records import Process, RunState
from so_tui.spec import find_preset
from tests.support.waiting import LIMIT_S


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run whose processes are gone, so that its records say how it ended."""
    made = create_run(find_preset("tiny").spec, tmp_path / "runs")
    attempt = new_attempt(made)
    made.log_path(attempt, "here").write_text("a line\n")
    (made.metrics_dir / "000001.jsonl").touch()
    gone = Process(pid=os.getpid(), start_time=1)
    write_state(
        made,
        RunState(
            name=made.name,
            state="training",
            attempt=attempt,
            host=socket.gethostname(),
            processes=(gone,),
        ),
    )
    return made


STATE = ("state.json",)
RECORDS = ("metrics/000001.jsonl", "attempts/001/output.here.log")
"""What is read only if the state could be."""


@pytest.mark.parametrize("kind", ["pipe", "device", "huge"])
@pytest.mark.parametrize("names", [STATE, RECORDS], ids=["state", "records"])
def test_no_file_makes_commands_hang(run: RunDirectory, names: tuple[str, ...], kind: str) -> None:
    for name in names:
        path = run.path / name
        path.unlink(missing_ok=True)
        match kind:
            case "pipe":
                os.mkfifo(path)
            case "device":
                path.symlink_to("/dev/zero")
            case _:
                with path.open("wb") as file:
                    file.truncate(8 << 30)
    for command in (("runs", "--runs-dir", str(run.path.parent)), ("logs", str(run.path))):
        limited = ["/bin/sh", "-c", 'ulimit -v 2000000; exec "$@"', "sh"]
        limited += [sys.executable, "-m", "so_tui", *command]
        done = subprocess.run(limited, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert "Traceback" not in done.stderr
        assert done.returncode in (0, 2)


def test_odd_names_are_no_attempts_or_segments(run: RunDirectory) -> None:
    for name in ("²", "٣", "-1", "1" * 200):
        (run.attempts_dir / name).mkdir()
        (run.metrics_dir / f"{name}.jsonl").touch()
    done = subprocess.run(
        [sys.executable, "-m", "so_tui", "runs", "--runs-dir", str(run.path.parent)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
