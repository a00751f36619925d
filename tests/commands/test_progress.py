"""Following a run without a screen, and the effect of signals to the follower."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from so_tui.commands import follow
from so_tui.runs import (
    MetricsWriter,
    RunDirectory,
    RunReader,
    create_run,
    read_state,
    state,
    write_state,
)
from so_tui.runs.records import CheckpointRecord, RunState
from so_tui.spec import find_preset
from so_tui.units import duration
from tests.support.records import step_record
from tests.support.waiting import LIMIT_S, wait_until

FOLLOW = (
    # whatever started the tests (nohup) ignores it
    "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL);"
    " from so_tui.commands.follow import follow; from so_tui.runs import RunDirectory;"
    " sys.exit(follow(RunDirectory(sys.argv[1]), owner=sys.argv[2] == 'owner'))"
)


def recorded(run: RunDirectory, state: Any) -> None:
    """Record that the run is in a state on another host, so that it does not count as lost here."""
    begun = read_state(run).started
    write_state(run, RunState(name=run.name, state=state, host="another", started=begun, attempt=1))


@pytest.fixture
def elsewhere(tmp_path: Path) -> RunDirectory:
    """A run that trains on another host."""
    run = create_run(find_preset("tiny").spec, tmp_path / "runs")
    recorded(run, "training")
    return run


def followed(run: RunDirectory, who: str) -> subprocess.Popen[str]:
    follower = subprocess.Popen(
        [sys.executable, "-c", FOLLOW, str(run.path), who], stdout=subprocess.PIPE, text=True
    )
    assert follower.stdout is not None
    assert run.name in follower.stdout.readline()
    return follower


def test_a_step_is_printed_before_later_records(elsewhere: RunDirectory) -> None:
    writer = MetricsWriter(elsewhere, 1)
    for number in (1, 2, 3):  # the third comes too soon after the first to be printed immediately
        writer.append(step_record(number, time=1e9 + number / 100))
    saved = CheckpointRecord(attempt=1, time=1e9 + 1, step=3, bytes=10, seconds=90.0, path="there")
    writer.append(replace(saved, paused_s=2.0, due_step=2))
    writer.close()
    recorded(elsewhere, "stopped")
    follower = followed(elsewhere, "watcher")
    assert follower.stdout is not None
    told = follower.stdout.read()  # not communicate(): it would miss what came with the first line
    assert follower.wait(timeout=LIMIT_S) == 4
    assert told.index("step 3/") < told.index("checkpoint of step 3")
    assert "left" not in told[told.index("checkpoint of step 3") :]
    assert all(duration(seconds) in told for seconds in (90.0, 2.0))
    assert "due since step 2" in told


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_containers_signal_stops_the_run(elsewhere: RunDirectory, signum: signal.Signals) -> None:
    """And it is followed to its end."""
    follower = followed(elsewhere, "owner")
    follower.send_signal(signum)
    wait_until(lambda: state.details(elsewhere, "stop"))
    asked = state.details(elsewhere, "stop")
    assert asked is not None
    assert asked.reason == f"so-tui received {signum.name}"
    assert follower.poll() is None
    recorded(elsewhere, "stopped")
    assert follower.wait(timeout=LIMIT_S) == 4


@pytest.mark.parametrize(("who", "signum"), [("owner", signal.SIGHUP), ("watcher", signal.SIGTERM)])
def test_lost_terminal_or_watcher_does_not_affect_the_run(
    elsewhere: RunDirectory, who: str, signum: signal.Signals
) -> None:
    follower = followed(elsewhere, who)
    follower.send_signal(signum)
    assert follower.wait(timeout=LIMIT_S) == -signum
    assert not state.pending(elsewhere)


def test_signal_is_passed_on_later(elsewhere: RunDirectory) -> None:
    elsewhere.control_dir.rmdir()
    elsewhere.control_dir.write_text("in the way")
    follower = followed(elsewhere, "owner")
    assert follower.stdout is not None
    follower.send_signal(signal.SIGUSR1)
    while "asked to stop" not in (line := follower.stdout.readline()):
        assert line, "it has ended"
    elsewhere.control_dir.unlink()
    wait_until(lambda: state.pending(elsewhere) == {"stop"})
    write_state(elsewhere, replace(read_state(elsewhere), state="stopped"))
    assert follower.wait(timeout=LIMIT_S) == 4


def test_follower_outlives_a_file_system_that_is_away(
    elsewhere: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a container or a batch script, what it ends with it is the run."""
    polls, poll = 0, RunReader.poll

    def away_at_times(reader: RunReader, **limits: Any) -> Any:
        nonlocal polls
        polls += 1
        if polls in (2, 3):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(elsewhere.metrics_dir))
        if polls == 4:
            write_state(elsewhere, replace(read_state(elsewhere), state="finished"))
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
