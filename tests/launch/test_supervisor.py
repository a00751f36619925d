"""Runs under the real supervisor and the real ``deepspeed`` launcher: every end has its true cause,
and no process is left.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from so_tui.launch import EXIT_GRACE_S
from so_tui.launch.executors import ensure_supervised
from so_tui.launch.launch import prepare, prepare_resume
from so_tui.launch.lifecycle import resume, start, stop
from so_tui.launch.supervisor.ending import request_stop, stop_request
from so_tui.launch.supervisor.processes import _pids
from so_tui.launch.supervisor.samples import MEMORY_INTERVAL_S
from so_tui.machine import Machine
from so_tui.runs import RunDirectory, alive, read_spec, read_state, state_with_truth
from so_tui.runs.liveness import read_stat
from so_tui.runs.records import OutcomeCode, RunState
from so_tui.runs.state import write_spec
from so_tui.spec import InputError, SoTuiError, with_values
from tests.support.fake_runs import (
    Runs,
    ended,
    kill,
    process_of,
    release,
    wait_for,
    wait_for_end_of,
)
from tests.support.waiting import running, wait_until

pytestmark = pytest.mark.slow

WITHIN_S = 30.0
"""Seconds between a death and the final state; this machine may be busy."""


def nothing_is_left(run: RunDirectory, before: RunState) -> bool:
    """No process known before lives, none on the host carries the run's mark, and its shared memory
    is gone.
    """
    mark = f"SO_TUI_RUN={run.path}".encode()
    marked = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended, or is another user's
            if mark in (folder / "environ").read_bytes().split(b"\0") and running(int(folder.name)):
                marked.append(folder.name)
    return (
        not any(alive(process) for process in before.processes)
        and not marked
        and not shared_memory_of(run, before)
    )


def shared_memory_of(run: RunDirectory, state: RunState) -> list[Path]:
    """The shared memory that is named by processes of a run. An earlier process with the same pid
    may have left some under another name.
    """
    return [
        path
        for process in state.processes
        if (path := Path(f"/dev/shm/torch_{process.pid}_{run.path.name}")).exists()
    ]


def problems_of_resume(
    run: RunDirectory, machine: Machine, values: dict[str, str] | None = None
) -> list[tuple[str, str]]:
    """Return the codes and fields for which a resume is refused."""
    with pytest.raises(InputError) as caught:
        prepare_resume(run, machine, values=values)
    return [(problem.code, problem.field) for problem in caught.value.problems]


def test_a_run_to_its_end(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_TRAINER", "steps=15 held")
    run = runs.start()
    first = read_state(run)
    assert first.state == "starting"
    assert first.supervisor is not None
    middle = wait_for(run, lambda state: state.step >= 2)
    release(run)
    assert {process.rank for process in middle.processes if process.role == "rank"} == {0, 1}
    last = wait_for(run, ended)
    assert (last.state, last.exit_code) == ("finished", 0)
    assert last.step == last.total_steps == last.saved_step == 15
    assert middle.supervisor is not None
    wait_for_end_of(middle.supervisor)  # its files are read
    assert last.heartbeat > middle.heartbeat > first.heartbeat
    assert nothing_is_left(run, middle)
    files = {path.name for path in run.attempt_dir(1).iterdir()}
    assert {"ds_config.json", "launch.json", "command.json", f"output.{last.host}.log"} <= files
    assert "rank 1 of 2" in run.log_path(1, last.host).read_text()
    assert any(run.samples_dir(last.host).iterdir())


@pytest.mark.trains
def test_the_end_waits_for_no_launcher_whose_ranks_have_ended(runs: Runs) -> None:
    run, before = runs.training()
    os.kill(process_of(before, "launcher", None).pid, signal.SIGSTOP)
    request_stop(run)
    assert wait_for(run, ended, timeout_s=EXIT_GRACE_S - 10).state == "stopped"
    assert nothing_is_left(run, before)


@pytest.mark.trains("steps=5 bad-exit lingers")
def test_an_ugly_exit_after_the_end_record_changes_nothing(runs: Runs, machine: Machine) -> None:
    run = runs.start()
    last = wait_for(run, ended)
    assert (last.state, last.exit_code) == ("finished", 0)
    assert problems_of_resume(run, machine) == [("run-has-finished", "run")]
    assert problems_of_resume(run, machine, {"train.steps": "5"}) == [("run-has-finished", "run")]
    for key, value in (("train.step", "9"), ("train.steps", "abc")):
        assert [field for _, field in problems_of_resume(run, machine, {key: value})] == [key]
    assert run.attempts() == (1,)
    assert resume(run, prepare_resume(run, machine, values={"train.steps": "9"}, force=True)) == 2
    assert wait_for(run, ended, of_attempt=2).state == "finished"
    assert read_spec(run).train.steps == 9


def killed(role: str, rank: int | None, manners: str, code: OutcomeCode) -> Any:
    name = role if rank is None else f"{role} {rank}"
    return pytest.param(
        role, rank, code, marks=pytest.mark.trains(manners), id=f"{name} {manners}".strip()
    )


@pytest.mark.parametrize(
    ("role", "rank", "code"),
    [
        killed("runner", None, "", OutcomeCode.RUNNER_LOST),
        killed("launcher", None, "orphans deaf", OutcomeCode.LAUNCHER_LOST),
        killed("rank", 1, "", OutcomeCode.RANK_LOST),
        killed("rank", 0, "mourns", OutcomeCode.RANK_LOST),
    ],
)
def test_kill_9_of_any_process(runs: Runs, role: str, rank: int | None, code: OutcomeCode) -> None:
    run, before = runs.training()
    kill(process_of(before, role, rank))
    last = wait_for(run, ended, timeout_s=WITHIN_S)
    assert (last.state, last.exit_code, last.code) == ("failed", 1, code)
    if rank is not None:
        assert last.reason == f"rank {rank} was ended by SIGKILL"
    assert nothing_is_left(run, before)


@pytest.mark.trains("crash")
def test_an_exception_of_a_rank_is_the_reason(runs: Runs) -> None:
    run = runs.start()
    last = wait_for(run, ended)
    assert (last.state, last.code, last.reason) == (
        "failed",
        OutcomeCode.UNEXPECTED,
        "RuntimeError: the loss is a teapot",
    )
    pids = [(run.path / f"rank{rank}.pid").read_text() for rank in (0, 1)]
    assert not [pid for pid in pids if Path(f"/dev/shm/torch_{pid}_{run.path.name}").exists()]


@pytest.mark.trains
def test_stop_ends_with_the_trainers_word(runs: Runs) -> None:
    run, before = runs.training()
    last = stop(run, grace_s=30)
    assert (last.state, last.exit_code) == ("stopped", 4)
    assert last.saved_step == last.step
    assert nothing_is_left(run, before)
    assert stop(run, grace_s=30) == last


@pytest.mark.trains("stubborn deaf")
def test_a_stubborn_run_is_killed_after_the_grace_time(runs: Runs) -> None:
    run, before = runs.training()
    last = stop(run, grace_s=1)
    assert (last.state, last.exit_code, last.code) == ("failed", 1, OutcomeCode.STOP_OVERDUE)
    assert nothing_is_left(run, before)


@pytest.mark.trains
def test_schedulers_warning_stops_and_kills_nothing(runs: Runs) -> None:
    run, before = runs.training()
    assert before.supervisor is not None
    for process in (*before.processes, before.supervisor):
        os.kill(process.pid, signal.SIGUSR1)
    last = wait_for(run, ended, timeout_s=WITHIN_S)
    assert (last.state, last.exit_code, last.saved_step) == ("stopped", 4, last.step)
    assert nothing_is_left(run, before)


@pytest.mark.trains
def test_it_is_resumed_with_other_settings_and_keeps_those(runs: Runs, machine: Machine) -> None:
    run, _ = runs.training()
    assert stop(run, grace_s=30).state == "stopped"
    fixed = problems_of_resume(run, machine, {"checkpoint.folder": "/elsewhere", "gpus": "1"})
    assert fixed == [("fixed-for-a-run", "checkpoint.folder")]
    assert [field for _, field in problems_of_resume(run, machine, {"gpus": "none"})] == ["gpus"]
    trained = problems_of_resume(run, machine, {"train.steps": str(read_state(run).saved_step)})
    assert trained == [("length-already-trained", "train.steps")]
    assert (run.attempts(), read_spec(run).gpus) == ((1,), 2)
    command = [sys.executable, "-m", "so_tui", "resume", str(run.path)]
    command += ["--plain", "--force", "--gpus", "1", "--set", "checkpoint.every_minutes=30"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    shown = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    again = wait_for(
        run, lambda state: state.attempt == 2 and state.state == "training", of_attempt=2
    )
    assert {process.rank for process in again.processes if process.role == "rank"} == {0}
    assert (read_spec(run).gpus, read_spec(run).checkpoint.every_minutes) == (1, 30)
    # A scheduler's warning to the batch script, which waits for the end.
    shown.send_signal(signal.SIGUSR1)
    assert shown.wait(timeout=2 * WITHIN_S) == 4
    assert read_state(run).state == "stopped"


@pytest.mark.trains
def test_training_outlives_its_supervisor_and_another_takes_over(runs: Runs) -> None:
    run, before = runs.training()
    assert before.supervisor is not None
    kill(before.supervisor)
    wait_for_end_of(before.supervisor)
    ranks = [process for process in before.processes if process.role == "rank"]
    assert all(alive(process) for process in ranks)
    assert ensure_supervised(run)
    ensure_supervised(run)  # a second look at the same time must not make a second supervisor
    after = wait_for(
        run,
        lambda state: (
            state.supervisor != before.supervisor and state.heartbeat > before.heartbeat + 3
        ),
    )
    assert after.attempt == 1
    assert after.step > before.step
    assert {process.pid for process in ranks} <= {process.pid for process in after.processes}
    assert not ensure_supervised(run)
    last = stop(run, grace_s=30)
    assert last.state == "stopped"
    assert nothing_is_left(run, after)


@pytest.mark.trains("orphans")
def test_a_takeover_tells_a_later_death(runs: Runs) -> None:
    run, before = runs.training()
    assert before.supervisor is not None
    kill(before.supervisor)
    wait_for_end_of(before.supervisor)
    ensure_supervised(run)
    # It must have seen the launcher alive.
    wait_for(
        run,
        lambda state: (
            state.supervisor != before.supervisor and state.heartbeat > before.heartbeat + 1
        ),
    )
    kill(process_of(before, "launcher"))
    last = wait_for(run, ended, timeout_s=WITHIN_S)
    assert (last.state, last.code) == ("failed", OutcomeCode.LAUNCHER_LOST)
    assert nothing_is_left(run, before)


@pytest.mark.trains
def test_a_run_whose_folder_is_deleted_ends(runs: Runs) -> None:
    run, before = runs.training()
    watching = subprocess.Popen(
        [sys.executable, "-m", "so_tui", "watch", str(run.path), "--plain"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert watching.stdout is not None
    assert run.name in watching.stdout.readline()
    run.path.rename(run.path.with_name("elsewhere"))
    run.path.mkdir()  # as one who deletes file by file leaves it, or one who writes makes it anew
    _, complaint = watching.communicate(timeout=WITHIN_S)
    assert (watching.returncode, "has been deleted" in complaint) == (1, True)
    assert before.supervisor is not None
    wait_for_end_of(before.supervisor, *before.processes, timeout_s=WITHIN_S)
    assert not list(run.path.iterdir())


@pytest.mark.trains
def test_everything_killed_at_once_is_lost(runs: Runs, machine: Machine) -> None:
    run, before = runs.training()
    assert before.supervisor is not None
    for process in (before.supervisor, *before.processes):
        kill(process)
    killed = time.time()
    wait_for_end_of(before.supervisor, *before.processes)
    assert not ensure_supervised(run), "nothing lives that a supervisor could attach to"
    last = state_with_truth(run)
    assert (last.state, last.exit_code, last.code) == ("lost", 1, OutcomeCode.UNOBSERVED)
    assert last.ended is not None
    assert last.ended <= killed, "not the time at which somebody looked"
    assert shared_memory_of(run, before)
    assert resume(run, prepare_resume(run, machine)) == 2
    assert not shared_memory_of(run, before), "the next attempt removes what nobody could remove"
    again = wait_for(
        run, lambda state: state.attempt == 2 and state.state == "training", of_attempt=2
    )
    assert (again.earlier_s, again.ended) == (last.took_s, None)
    assert stop(run, grace_s=30).state == "stopped"
    assert nothing_is_left(run, again)


@pytest.mark.trains
def test_two_runs_at_once_and_a_resume(runs: Runs, machine: Machine) -> None:
    (one, _), (two, _) = runs.training(), runs.training()
    commands = [json.loads(run.command_path(1).read_bytes()) for run in (one, two)]
    meetings = {
        change["value"]
        for command in commands
        for change in command["environment"]
        if change["name"] == "SO_TUI_RENDEZVOUS"
    }
    assert len(meetings) == 2
    assert problems_of_resume(one, machine) == [("run-is-live", "run")]
    stopped = stop(one, grace_s=30)
    with one.supervisor_lock_path.open(
        "ab"
    ) as held:  # by the supervisor of a resume that came a moment before
        fcntl.flock(held, fcntl.LOCK_EX)
        with ThreadPoolExecutor() as pool:
            late = pool.submit(
                resume, one, prepare_resume(one, machine, values={"train.learning_rate": "1e-3"})
            )
            while not one.launch_path(2).exists() and not late.done():
                time.sleep(0.01)
            write_spec(
                one, with_values(read_spec(one), {"train.learning_rate": "1e-4"})
            )  # as the one that came first does
            with pytest.raises(SoTuiError, match="came first"):
                late.result()
        assert read_spec(one).train.learning_rate == 1e-4
    assert resume(one, prepare_resume(one, machine)) == 2
    assert stop_request(one) is None
    again = wait_for(one, lambda state: state.attempt == 2 and state.state == "training")
    assert (again.started, again.ended, again.earlier_s) == (stopped.started, None, stopped.took_s)
    assert {path.name for path in one.attempt_dir(2).iterdir()} >= {
        "launch.json",
        "ds_config.json",
        "command.json",
    }
    request_stop(two)
    assert stop(one, grace_s=30).attempt == 2
    assert wait_for(two, ended).state == "stopped"


def test_it_goes_on_when_the_program_that_started_it_is_killed(runs: Runs) -> None:
    script = (
        "import msgspec, time\n"
        "from pathlib import Path\n"
        "from so_tui.launch.lifecycle import start\n"
        "from so_tui.launch.launch import prepare\n"
        "from so_tui.machine import inspect_machine\n"
        "from so_tui.spec import find_preset\n"
        "machine = msgspec.structs.replace(inspect_machine(), gpus=())\n"
        "run = start(prepare(find_preset('tiny').spec, machine, force=True), "
        f"runs_dir=Path({str(runs.folder)!r}))\n"
        "print(run.path, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as program:
        assert program.stdout is not None
        run = RunDirectory(Path(program.stdout.readline().strip()))
        os.killpg(program.pid, signal.SIGKILL)
    runs.adopt(run)
    wait_for(run, lambda state: state.step >= 2)
    assert stop(run, grace_s=30).state == "stopped"


def test_failed_start_leaves_nothing(
    runs: Runs, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = prepare(runs.spec, machine, force=True)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SoTuiError, match="supervisor ended immediately"):
        start(launch, runs_dir=runs.folder)
    assert not list(runs.folder.iterdir())


@pytest.mark.trains("forks")
def test_the_supervisor_is_light(runs: Runs) -> None:
    """While the run trains. Before its ranks are seen it looks five times as often, for the seconds
    that they take to start. It keeps no zombies.
    """
    run, before = runs.training()
    assert before.supervisor is not None
    began = time.time()
    time.sleep(MEMORY_INTERVAL_S + 3)
    folder = Path(f"/proc/{before.supervisor.pid}")
    kib = int(
        next(
            line
            for line in (folder / "status").read_text().splitlines()
            if line.startswith("VmRSS")
        ).split()[1]
    )
    assert kib < 40 * 1024
    written = [
        json.loads(line)
        for path in run.samples_dir(before.host).glob("raw-*")
        for line in path.read_text().splitlines()
    ]
    samples = [sample for sample in written if sample["time"] - sample["interval_s"] >= began]
    covered_s = sum(sample["interval_s"] for sample in samples)
    assert covered_s > MEMORY_INTERVAL_S, "the look at memory, which costs most, is in it"
    assert sum(sample["supervisor_cpu_s"] for sample in samples) < 0.01 * covered_s
    wait_for(run, lambda state: state.step > 20)
    parent = before.supervisor.pid
    wait_until(
        lambda: all(
            stat is None or stat.alive or stat.parent != parent for stat in map(read_stat, _pids())
        )
    )
    assert stop(run, grace_s=30).state == "stopped"
