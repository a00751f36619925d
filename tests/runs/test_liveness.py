"""The truth about runs whose processes were killed, and what users ask of runs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import msgspec
import pytest

from so_tui.runs import (
    MetricsWriter,
    RunDirectory,
    alive,
    state_with_truth,
    write_state,
)
from so_tui.runs import state as control
from so_tui.runs.liveness import _parse_stat, concluded, identify, supervised
from so_tui.runs.records import EndRecord, OutcomeCode, Process, RunState, StepRecord

Sleeper = subprocess.Popen[bytes]


@pytest.fixture
def sleeper() -> Iterator[Sleeper]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def known(pid: int) -> Process:
    process = identify(pid)
    assert process is not None
    return process


def recorded(run: RunDirectory, **others: object) -> RunState:
    values: dict[str, object] = {
        "state": "training",
        "attempt": 1,
        "host": socket.gethostname(),
        "step": 7,
    }
    state = RunState(name=run.name, **(values | others))  # type: ignore[arg-type]
    write_state(run, state)
    return state


def test_a_process_is_known_by_its_start_time(sleeper: Sleeper) -> None:
    process = known(sleeper.pid)
    assert alive(process)
    assert not alive(msgspec.structs.replace(process, start_time=process.start_time - 1))
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
    assert not alive(process)
    assert identify(sleeper.pid) is None
    sleeper.wait()
    assert not alive(process)


def test_a_name_with_brackets_does_not_confuse(sleeper: Sleeper) -> None:
    named = subprocess.Popen(
        ["/bin/sh", "-c", "printf ') R (' > /proc/self/comm; read x"], stdin=subprocess.PIPE
    )
    try:
        assert alive(known(named.pid))
    finally:
        named.kill()
        named.wait()


def test_a_run_lives_while_any_of_its_processes_does(run: RunDirectory, sleeper: Sleeper) -> None:
    dead = Process(pid=sleeper.pid, start_time=1, role="supervisor")
    state = recorded(run, supervisor=dead, processes=(dead, known(sleeper.pid)))
    assert state_with_truth(run) == state
    assert not supervised(state)
    assert [process for process in state.processes if alive(process)] == [known(sleeper.pid)]
    sleeper.kill()
    sleeper.wait()
    truth = state_with_truth(run)
    assert truth.state == "lost"
    assert truth.exit_code == 1
    assert state.host in truth.reason
    assert "so-tui resume" in truth.suggestion


def test_a_supervisor_by_itself_keeps_a_run_alive(run: RunDirectory, sleeper: Sleeper) -> None:
    state = recorded(run, state="starting", supervisor=known(sleeper.pid))
    assert supervised(state)
    assert state_with_truth(run) == state


def test_a_run_without_a_supervisor_yet_is_not_lost(run: RunDirectory) -> None:
    assert state_with_truth(run).state == "created"


@pytest.mark.parametrize(("ended", "code"), [("finished", 0), ("stopped", 4), ("failed", 1)])
def test_end_record_counts_without_a_supervisor(
    run: RunDirectory, step: Callable[..., StepRecord], ended: str, code: int
) -> None:
    recorded(run)
    writer = MetricsWriter(run, 1)
    writer.append(step(8))
    writer.append(EndRecord(attempt=1, time=5.0, state=ended, step=8, reason="because"))  # type: ignore[arg-type]
    writer.close()
    truth = state_with_truth(run)
    assert (truth.state, truth.exit_code, truth.step, truth.reason, truth.ended) == (
        ended,
        code,
        8,
        "because",
        5.0,
    )
    assert concluded(run, recorded(run, attempt=2)).code is OutcomeCode.UNOBSERVED


def test_a_final_state_is_not_corrected(run: RunDirectory) -> None:
    state = recorded(run, state="finished", exit_code=0)
    assert state_with_truth(run) == state


def test_requests_stay_until_they_are_carried_out(run: RunDirectory) -> None:
    assert control.pending(run) == frozenset()
    control.request(run, "stop", reason="time limit")
    control.request(run, "checkpoint")
    assert control.pending(run) == {"stop", "checkpoint"}
    asked = control.details(run, "stop")
    assert asked is not None
    assert asked.reason == "time limit"
    assert str(os.getpid()) in asked.by
    control.clear(run, "stop")
    control.clear(run, "stop")
    assert control.pending(run) == {"checkpoint"}
    assert control.details(run, "stop") is None
    assert [path.name for path in run.control_dir.iterdir()] == ["checkpoint"]


def test_a_stat_file_without_its_last_fields_is_read() -> None:
    """An emulator's end after 44 fields, and the state is missing."""
    short = _parse_stat(b"2120 (a (b) c) 0 2116" + b" 0" * 17 + b" 187768" + b" 0" * 22)
    assert short.alive
    assert (short.parent, short.start_time, short.wait_status) == (2116, 187768, 0)
    whole = _parse_stat(b"7 (sh) Z 1" + b" 0" * 17 + b" 5" + b" 0" * 29 + b" 256")
    assert not whole.alive
    assert (whole.start_time, whole.wait_status) == (5, 256)
