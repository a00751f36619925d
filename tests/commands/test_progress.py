"""Following a run without a screen, signals to the follower, and stopping and resuming a run whose
host cannot be asked.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from so_tui.commands import follow
from so_tui.launch import lifecycle
from so_tui.runs import RunDirectory, RunReader, create_run, read_state, state
from so_tui.runs.lock import ended_state
from so_tui.runs.records import CheckpointRecord
from so_tui.spec import find_preset
from so_tui.units import duration
from tests.support.commands import Call, problems_of
from tests.support.records import append_records, change_state, step_record
from tests.support.waiting import LIMIT_S, wait_until

FOLLOW = (
    # whatever started the tests (nohup) ignores it
    "import signal, sys; from pathlib import Path; signal.signal(signal.SIGHUP, signal.SIG_DFL);"
    " from so_tui.commands.follow import follow; from so_tui.runs import RunDirectory;"
    " sys.exit(follow(RunDirectory(Path(sys.argv[1])), owner=sys.argv[2] == 'owner'))"
)


@pytest.fixture
def elsewhere() -> RunDirectory:
    """A run that trains on another host: it does not count as lost here."""
    run = create_run(find_preset("tiny").spec)
    change_state(run, state="training", attempt=1, host="another", boot_id="another")
    return run


class Follower:
    """A process that follows a run, and has begun to."""

    def __init__(self, run: RunDirectory, who: str) -> None:
        command = [sys.executable, "-c", FOLLOW, str(run.path), who]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert run.name in next(self.lines())

    def lines(self) -> Iterator[str]:
        """Yield what it prints; not communicate(), which misses what came with the first line."""
        assert self.process.stdout is not None
        return iter(self.process.stdout.readline, "")

    def status(self) -> int:
        return self.process.wait(timeout=LIMIT_S)


def test_a_step_is_printed_before_later_records(elsewhere: RunDirectory) -> None:
    # the third step comes too soon after the first to be printed immediately
    steps = [step_record(number, time=1e9 + number / 100) for number in (1, 2, 3)]
    saved = CheckpointRecord(attempt=1, time=1e9 + 1, step=3, bytes=10, seconds=90.0, path="there")
    append_records(elsewhere, *steps, replace(saved, paused_s=2.0, due_step=2))
    change_state(elsewhere, state="stopped")
    follower = Follower(elsewhere, "watcher")
    before, _, after = "".join(follower.lines()).partition("checkpoint of step 3")
    assert follower.status() == 4
    assert "step 3/" in before
    assert "left" not in after
    assert all(duration(seconds) in after for seconds in (90.0, 2.0))
    assert "due since step 2" in after


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_containers_signal_stops_the_run(elsewhere: RunDirectory, signum: signal.Signals) -> None:
    """And it is followed to its end, also if it cannot be passed on at first."""
    elsewhere.control_dir.rmdir()
    elsewhere.control_dir.write_text("in the way")
    follower = Follower(elsewhere, "owner")
    follower.process.send_signal(signum)
    assert any("asked to stop" in line for line in follower.lines())
    elsewhere.control_dir.unlink()
    wait_until(lambda: state.details(elsewhere, "stop"))
    asked = state.details(elsewhere, "stop")
    assert asked is not None
    assert asked.reason == f"so-tui received {signum.name}"
    assert follower.process.poll() is None
    change_state(elsewhere, state="stopped")
    assert follower.status() == 4


@pytest.mark.parametrize(("who", "signum"), [("owner", signal.SIGHUP), ("watcher", signal.SIGTERM)])
def test_lost_terminal_or_watcher_does_not_affect_the_run(
    elsewhere: RunDirectory, who: str, signum: signal.Signals
) -> None:
    follower = Follower(elsewhere, who)
    follower.process.send_signal(signum)
    assert follower.status() == -signum
    assert not state.pending(elsewhere)


def test_lost_output_does_not_end_the_follower(elsewhere: RunDirectory) -> None:
    """In a batch script, that would end the run."""
    called = "from so_tui.trust.streams import guard_output; guard_output();"
    command = [sys.executable, "-c", called + FOLLOW, str(elsewhere.path), "owner"]
    with Path("/dev/full").open("w") as full:
        process = subprocess.Popen(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert f"{elsewhere.name} continues" in process.stderr.readline()
    assert process.poll() is None
    change_state(elsewhere, state="stopped")
    assert process.wait(timeout=LIMIT_S) == 4


def test_follower_outlives_a_file_system_that_is_away(
    elsewhere: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a container or a batch script, what it ends with it is the run."""
    polls, poll = iter(range(1, 100)), RunReader.poll

    def away_at_times(reader: RunReader, **limits: Any) -> Any:
        number = next(polls)
        if number in (2, 3):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(elsewhere.metrics_dir))
        if number == 4:
            change_state(elsewhere, state="finished")
        return poll(reader, **limits)

    monkeypatch.setattr(RunReader, "poll", away_at_times)
    monkeypatch.setattr(follow, "POLL_S", 0.01)
    assert follow.follow(elsewhere, owner=False) == 0
    assert capsys.readouterr().out.count(os.strerror(errno.ESTALE)) == 1


def test_unreadable_run_is_not_followed(
    elsewhere: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_: object, **_limits: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(elsewhere.metrics_dir))

    monkeypatch.setattr(RunReader, "poll", closed)
    with pytest.raises(PermissionError):
        follow.follow(elsewhere, owner=False)


def test_stop_waits_and_says_it_cannot_know(
    elsewhere: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lifecycle, "_AFTER_KILL_S", 0.5)
    told = [("run-may-be-live", "run", elsewhere.name)]
    assert problems_of("stop", elsewhere.name, "--grace", "0") == told
    assert "another" in capsys.readouterr().out
    assert (elsewhere.control_dir / "stop").exists()
    assert read_state(elsewhere).state == "training"
    assert problems_of("resume", elsewhere.name, "--detach") == told


@pytest.mark.parametrize(("options", "code"), [("", 1), ("--assume-dead", 0)])
def test_run_is_lost_if_its_host_is_silent_or_the_user_says_so(
    options: str, code: int, elsewhere: RunDirectory, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    if not options:
        monkeypatch.setattr("so_tui.runs.liveness.STALE_S", 0.3)
    assert call(f"stop {options}", elsewhere.name).code == code
    assert read_state(elsewhere).state == ended_state(elsewhere).state == "lost"
