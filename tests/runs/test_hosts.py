"""Whether a run lives, as far as this host can tell, and what may be done to one whose host cannot
be asked.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from so_tui.runs import HeartbeatWatch, RunDirectory, read_state, write_state
from so_tui.runs.listing import delete_run
from so_tui.runs.liveness import (
    OLD_S,
    STALE_S,
    Liveness,
    identify,
    sighting,
    state_with_truth,
    this_host,
)
from so_tui.runs.lock import ended_state, evidence, record_end, run_lock
from so_tui.runs.records import OutcomeCode, Process, RunState
from so_tui.spec import InputError

HERE = this_host()
DEAD = Process(pid=1 << 21, start_time=1, role="supervisor")
PLACES: dict[str, dict[str, object]] = {
    "here": {},
    "restarted": {"boot_id": "another"},
    "container": {"pid_namespace": 1},
    "elsewhere": {"host": "elsewhere", "boot_id": "another"},
}
AGES = {"fresh": 0.0, "between": (STALE_S + OLD_S) / 2, "old": OLD_S + 60}
HOUR = 3600.0


def recorded(run: RunDirectory, where: str, age_s: float = 0.0, **others: object) -> RunState:
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
    with pytest.raises(InputError) as caught:
        action()
    return caught.value.problems[0].code


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(
    ("heartbeat", "expected"),
    [("fresh", Liveness.ALIVE), ("between", Liveness.UNKNOWN), ("old", Liveness.GONE)],
)
def test_processes_decide_here_and_the_heartbeat_elsewhere(
    where: str, heartbeat: str, expected: Liveness, run: RunDirectory
) -> None:
    state = recorded(run, where, AGES[heartbeat])
    seen = sighting(run, state)
    assert seen.by_processes == (where == "here")
    assert seen.liveness is (Liveness.GONE if where == "here" else expected)
    assert seen.restarted == (where == "restarted")


@pytest.mark.parametrize("where", ["restarted", "container", "elsewhere"])
def test_reused_pid_elsewhere_proves_nothing(where: str, run: RunDirectory) -> None:
    me = identify(os.getpid())
    assert sighting(run, recorded(run, where, AGES["old"], supervisor=me)).liveness is Liveness.GONE


@pytest.mark.parametrize("error_s", [-HOUR, HOUR])
@pytest.mark.parametrize("where", ["restarted", "container", "elsewhere"])
def test_wrong_clock_ends_no_moving_run(where: str, error_s: float, run: RunDirectory) -> None:
    now = [0.0]
    watch = HeartbeatWatch(clock=lambda: now[0])
    sighting(run, recorded(run, where, error_s, heartbeat=1), watch)
    for beat in range(2, 5):
        now[0] += STALE_S - 1
        assert (
            sighting(run, recorded(run, where, error_s, heartbeat=beat), watch).liveness
            is not Liveness.GONE
        )
        assert sighting(run, read_state(run), watch).liveness is Liveness.ALIVE
    now[0] += STALE_S + 1
    assert sighting(run, read_state(run), watch).liveness is Liveness.GONE


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
    for action in (
        lambda: record_end(run),
        lambda: ended_state(run, assume_dead=True),
        lambda: delete_run(run, assume_dead=True),
    ):
        assert code_of(action) == "run-is-live"
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
    assert run.path.exists()


@pytest.mark.parametrize("heartbeat", ["between", "old"])
def test_lock_of_a_gone_host_keeps_no_run(heartbeat: str, run: RunDirectory) -> None:
    """Some servers hold it until that host starts again. The user's word and a minute without a
    sign of life are enough.
    """
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
@pytest.mark.parametrize("where", ["restarted", "container", "elsewhere"])
def test_clock_ahead_needs_the_users_word(ahead_s: float, where: str, run: RunDirectory) -> None:
    """A clock that is seconds ahead is no reason to doubt a heartbeat; one that is an hour ahead
    says nothing about life.
    """
    state = recorded(run, where, -ahead_s)
    seen = sighting(run, state)
    assert seen.liveness is (Liveness.ALIVE if ahead_s < STALE_S else Liveness.UNKNOWN)
    assert ("ahead" in evidence(state, seen)) == (ahead_s == HOUR)
    assert code_of(lambda: ended_state(run)) == "run-may-be-live"
    assert ended_state(run, assume_dead=True).state == "lost"


def test_a_host_that_died_days_ago_does_not_keep_its_run(run: RunDirectory) -> None:
    recorded(run, "elsewhere", 3 * 24 * HOUR)
    assert state_with_truth(run).state == "lost"
    delete_run(run)
    assert not run.path.exists()


def test_a_run_in_another_pid_namespace_is_not_taken_for_lost(run: RunDirectory) -> None:
    code = """
import sys, time
from so_tui.runs import RunDirectory, read_state, write_state
from so_tui.runs.liveness import this_host
from so_tui.runs.liveness import identify
import msgspec, os
run, here = RunDirectory(sys.argv[1]), this_host()
state = msgspec.structs.replace(read_state(run), state="training", attempt=1, host=here.name, boot_id=here.boot_id,
    pid_namespace=here.pid_namespace, supervisor=identify(os.getpid()))
write_state(run, state)
print("ready", flush=True)
sys.stdin.read()
"""  # noqa: E501
    argv = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code, str(run.path)]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as inside:
        assert inside.stdout is not None
        if inside.stdout.readline() != "ready\n":
            pytest.skip("no PID namespace can be made here")
        state = read_state(run)
        assert (state.host, state.boot_id) == (HERE.name, HERE.boot_id)
        assert state.pid_namespace != HERE.pid_namespace
        seen = sighting(run, state)
        assert (seen.liveness, seen.by_processes) == (Liveness.ALIVE, False)
        assert code_of(lambda: delete_run(run)) == "run-may-be-live"
        inside.communicate("")
