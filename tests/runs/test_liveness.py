"""Whether a run lives, how it ended, and what may be done if its host cannot be asked."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from so_tui.runs import HeartbeatWatch, RunDirectory, alive, read_state, state_with_truth
from so_tui.runs import state as control
from so_tui.runs.listing import delete_run
from so_tui.runs.liveness import (
    OLD_S,
    STALE_S,
    _parse_stat,
    concluded,
    identify,
    sighting,
    supervised,
    this_host,
)
from so_tui.runs.lock import ended_state, evidence, record_end, run_lock
from so_tui.runs.records import EndRecord, OutcomeCode, Process, RunState
from so_tui.runs.state import _overwrite, write_state
from so_tui.spec import InputError
from tests.support.problems import refusal
from tests.support.records import append_records, step_record

Sleeper = subprocess.Popen[bytes]
HERE = this_host()
DEAD = Process(pid=1 << 21, start_time=1, role="supervisor")
PLACES: dict[str, dict[str, object]] = {
    "here": {},
    "restarted": {"boot_id": "another"},
    "container": {"pid_namespace": 1},
    "elsewhere": {"host": "elsewhere", "boot_id": "another"},
}
ABROAD = ["restarted", "container", "elsewhere"]
AGES = {"fresh": 0.0, "between": (STALE_S + OLD_S) / 2, "old": OLD_S + 60}
HOUR = 3600.0


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


def recorded(
    run: RunDirectory, where: str = "here", age_s: float = 0.0, **others: object
) -> RunState:
    """Record that a run trains somewhere, under a supervisor that is gone."""
    values: dict[str, object] = {
        "state": "training",
        "attempt": 1,
        "host": HERE.name,
        "boot_id": HERE.boot_id,
        "pid_namespace": HERE.pid_namespace,
        "supervisor": DEAD,
    }
    state = RunState(name=run.name, **(values | PLACES[where] | others))  # type: ignore[arg-type]
    write_state(run, state)
    os.utime(run.state_path, (time.time() - age_s,) * 2)
    return state


def code_of(action: Callable[[], object]) -> str:
    return refusal(action).code


@pytest.mark.parametrize(
    ("times", "took_s"),
    [
        ({}, None),
        ({"started": 100.0, "attempt_started": 100.0}, None),
        ({"started": 100.0, "attempt_started": 100.0, "ended": 160.0}, 60.0),
        ({"started": 100.0, "attempt_started": 9000.0, "earlier_s": 60.0, "ended": 9030.0}, 90.0),
        ({"started": 100.0, "attempt_started": 100.0, "ended": 99.0}, 0.0),
        ({"started": 100.0, "ended": 160.0}, 60.0),  # as written before attempts were counted
    ],
)
def test_run_took_the_time_of_attempts(times: dict[str, float], took_s: float | None) -> None:
    assert RunState(name="r", state="finished", **times).took_s == took_s  # type: ignore[arg-type]


def test_overwritten_state_is_read(run: RunDirectory) -> None:
    recorded(run, detail="x" * 200)
    for reason in ("full", "full" * 200):
        last = RunState(name="r", state="failed", reason=reason)
        _overwrite(run.state_path, msgspec.json.encode(last))
        assert read_state(run) == last


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


def test_stat_file_is_read_without_its_last_fields() -> None:
    """An emulator's end after 44 fields, and the state is missing. A name may have brackets."""
    short = _parse_stat(b"2120 () R () 0 2116" + b" 0" * 17 + b" 187768" + b" 0" * 22)
    assert (short.name, short.alive) == (") R (", True)
    assert (short.parent, short.start_time, short.wait_status) == (2116, 187768, 0)
    whole = _parse_stat(b"7 (sh) Z 1" + b" 0" * 17 + b" 5" + b" 0" * 29 + b" 256")
    assert (whole.alive, whole.start_time, whole.wait_status) == (False, 5, 256)


def test_states_before_and_after_a_run_stay(run: RunDirectory) -> None:
    assert state_with_truth(run).state == "created"
    state = recorded(run, state="failed", exit_code=1)
    assert state_with_truth(run) == state


def test_a_run_lives_while_any_of_its_processes_does(run: RunDirectory, sleeper: Sleeper) -> None:
    living = known(sleeper.pid)
    assert supervised(recorded(run, supervisor=living))
    assert state_with_truth(run) == read_state(run)
    state = recorded(run, processes=(DEAD, living))
    assert not supervised(state)
    assert state_with_truth(run) == state
    sleeper.kill()
    sleeper.wait()
    truth = state_with_truth(run)
    assert (truth.state, truth.exit_code) == ("lost", 1)
    assert state.host in truth.reason
    assert "so-tui resume" in truth.suggestion


@pytest.mark.parametrize(("ended", "code"), [("finished", 0), ("stopped", 4), ("failed", 1)])
def test_end_record_counts_without_a_supervisor(run: RunDirectory, ended: str, code: int) -> None:
    recorded(run)
    end = EndRecord(attempt=1, time=5.0, state=ended, step=8, reason="because")  # type: ignore[arg-type]
    append_records(run, step_record(8), end)
    truth = state_with_truth(run)
    assert (truth.state, truth.exit_code, truth.step) == (ended, code, 8)
    assert (truth.reason, truth.ended) == ("because", 5.0)
    assert concluded(run, recorded(run, attempt=2)).code is OutcomeCode.UNOBSERVED


def test_requests_stay_until_they_are_carried_out(run: RunDirectory) -> None:
    assert control.pending(run) == frozenset()
    control.request(run, "stop", reason="time limit")
    control.request(run, "checkpoint")
    assert control.pending(run) == {"stop", "checkpoint"}
    asked = control.details(run, "stop")
    assert asked is not None
    assert (asked.reason, str(os.getpid()) in asked.by) == ("time limit", True)
    for _ in range(2):
        control.clear(run, "stop")
    assert control.details(run, "stop") is None
    assert [path.name for path in run.control_dir.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(
    ("heartbeat", "expected"),
    [("fresh", True), ("between", None), ("old", False)],
)
def test_processes_decide_here_and_the_heartbeat_elsewhere(
    where: str, heartbeat: str, expected: bool | None, run: RunDirectory
) -> None:
    """A pid elsewhere that a process here has proves nothing."""
    supervisor = DEAD if where == "here" else known(os.getpid())
    state = recorded(run, where, AGES[heartbeat], supervisor=supervisor)
    seen = sighting(run, state)
    assert seen.by_processes == (where == "here")
    assert seen.alive is (False if where == "here" else expected)
    assert seen.restarted == (where == "restarted")
    if seen.alive is False:
        assert state_with_truth(run).state == "lost"
        delete_run(run)
        assert not run.path.exists()


@pytest.mark.parametrize("error_s", [-HOUR, HOUR])
@pytest.mark.parametrize("where", ABROAD)
def test_wrong_clock_ends_no_moving_run(where: str, error_s: float, run: RunDirectory) -> None:
    now = [0.0]
    watch = HeartbeatWatch(clock=lambda: now[0])
    sighting(run, recorded(run, where, error_s, heartbeat=1), watch)
    for beat in range(2, 5):
        now[0] += STALE_S - 1
        state = recorded(run, where, error_s, heartbeat=beat)
        assert sighting(run, state, watch).alive is not False
        assert sighting(run, state, watch).alive is True
    now[0] += STALE_S + 1
    assert sighting(run, read_state(run), watch).alive is False


@pytest.mark.parametrize("heartbeat", ["fresh", "between"])
def test_run_elsewhere_ends_by_the_users_word(heartbeat: str, run: RunDirectory) -> None:
    recorded(run, "elsewhere", AGES[heartbeat])
    assert code_of(lambda: ended_state(run)) == "run-may-be-live"
    assert code_of(lambda: delete_run(run)) == "run-may-be-live"
    assert ended_state(run, assume_dead=True).code == OutcomeCode.UNOBSERVED
    assert read_state(run).state == "training"
    assert record_end(run).state == "lost"
    assert (read_state(run).state, ended_state(run).state) == ("lost", "lost")
    delete_run(run)
    assert not run.path.exists()


@pytest.mark.parametrize("age_s", [0.0, OLD_S])
def test_the_users_word_does_not_end_a_run_that_lives_here(age_s: float, run: RunDirectory) -> None:
    """However silent its supervisor is."""
    recorded(run, "here", age_s, supervisor=identify(os.getpid()))
    assert code_of(lambda: record_end(run)) == "run-is-live"
    assert code_of(lambda: ended_state(run, assume_dead=True)) == "run-is-live"
    assert code_of(lambda: delete_run(run, assume_dead=True)) == "run-is-live"
    with run_lock(run) as held:
        assert held is not None
        assert code_of(lambda: record_end(run)) == "run-is-live"
        held.refresh()
    assert read_state(run).state == "training"


def test_living_supervisor_keeps_its_run(run: RunDirectory) -> None:
    """On a file system whose locks work between hosts, the lock shows that the supervisor lives."""
    recorded(run, "elsewhere", STALE_S - 10)
    with run_lock(run) as held:
        assert held is not None
        assert code_of(lambda: record_end(run)) == "run-is-live"
        assert code_of(lambda: delete_run(run, assume_dead=True)) == "run-is-live"
    assert read_state(run).state == "training"


@pytest.mark.parametrize("heartbeat", ["between", "old"])
def test_lock_of_a_gone_host_keeps_no_run(heartbeat: str, run: RunDirectory) -> None:
    """Some servers hold it until that host starts again. A minute of silence is enough."""
    recorded(run, "elsewhere", AGES[heartbeat])
    with run_lock(run) as held:
        assert held is not None
        assert code_of(lambda: delete_run(run)) == "run-may-be-live"
        assert record_end(run).state == "lost"
        with pytest.raises(OSError, match="taken over"):
            held.refresh()
        delete_run(run)
    assert not run.path.exists()


@pytest.mark.parametrize("ahead_s", [5.0, HOUR])
@pytest.mark.parametrize("where", ABROAD)
def test_clock_ahead_needs_the_users_word(ahead_s: float, where: str, run: RunDirectory) -> None:
    """Seconds ahead are no reason to doubt a heartbeat; an hour says nothing about life."""
    state = recorded(run, where, -ahead_s)
    seen = sighting(run, state)
    assert seen.alive is (True if ahead_s < STALE_S else None)
    assert ("ahead" in evidence(state, seen)) == (ahead_s == HOUR)
    assert code_of(lambda: ended_state(run)) == "run-may-be-live"
    assert ended_state(run, assume_dead=True).state == "lost"


@pytest.mark.parametrize("in_a_job", [False, True])
def test_the_end_of_a_job_is_known_sooner(run: RunDirectory, *, in_a_job: bool) -> None:
    state = recorded(run, ABROAD[0], 5.0)
    if in_a_job:
        script = run.job_script_path(state.attempt)
        script.parent.mkdir(parents=True, exist_ok=True)
        script.touch()
    with pytest.raises(InputError) as told:
        ended_state(run)
    assert ("once the scheduler says" in str(told.value)) == in_a_job


IN_A_NAMESPACE = """
import os, sys
from pathlib import Path
from msgspec.structs import replace
from so_tui.runs import RunDirectory, read_state, write_state
from so_tui.runs.liveness import identify, this_host
run, here = RunDirectory(Path(sys.argv[1])), this_host()
write_state(run, replace(read_state(run), state="training", attempt=1, host=here.name,
    boot_id=here.boot_id, pid_namespace=here.pid_namespace, supervisor=identify(os.getpid())))
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_run_in_another_pid_namespace_is_not_taken_for_lost(run: RunDirectory) -> None:
    argv = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", IN_A_NAMESPACE]
    with subprocess.Popen(
        [*argv, str(run.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as inside:
        assert inside.stdout is not None
        if inside.stdout.readline() != "ready\n":
            pytest.skip("no PID namespace can be made here")
        state = read_state(run)
        assert (state.host, state.boot_id) == (HERE.name, HERE.boot_id)
        assert state.pid_namespace != HERE.pid_namespace
        seen = sighting(run, state)
        assert (seen.alive, seen.by_processes) == (True, False)
        assert code_of(lambda: delete_run(run)) == "run-may-be-live"
        inside.communicate("")
