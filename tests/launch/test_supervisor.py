"""Under the real supervisor and launcher every end has its true cause and leaves nothing."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from msgspec.structs import replace

from so_tui.cli import main
from so_tui.launch import EXIT_GRACE_S
from so_tui.launch.executors import ensure_supervised
from so_tui.launch.launch import prepare, prepare_resume, supervisor_log
from so_tui.launch.lifecycle import resume, start, stop
from so_tui.launch.supervisor.ending import request_stop, stop_request
from so_tui.launch.supervisor.processes import own_environs
from so_tui.launch.supervisor.samples import MEMORY_INTERVAL_S
from so_tui.machine import Machine
from so_tui.plan.plan import StepTime
from so_tui.runs import RunDirectory, RunReader, alive, read_spec, read_state, state_with_truth
from so_tui.runs.directory import checkpoint_folders
from so_tui.runs.liveness import read_stat
from so_tui.runs.records import OutcomeCode, Process, RunState
from so_tui.runs.state import write_spec, write_state
from so_tui.spec import InputError, SoTuiError, with_values
from tests.support.fake_runs import (
    Runs,
    ended,
    kill,
    process_of,
    roles,
    wait_for,
    wait_for_end_of,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

WITHIN_S = 30.0
"""Seconds between a death and the final state; this machine may be busy."""


def nothing_is_left(run: RunDirectory, before: RunState) -> bool:
    """No known or marked process of the run lives."""
    marked = any(f"SO_TUI_RUN={run.path}" in environ for environ in own_environs())
    return not (any(map(alive, before.processes)) or marked)


def supervisor_of(state: RunState) -> Process:
    assert state.supervisor is not None
    return state.supervisor


def wait_for_training(run: RunDirectory, attempt: int) -> RunState:
    return wait_for(
        run,
        lambda state: state.attempt == attempt and state.state == "training",
        of_attempt=attempt,
    )


def problems_of_resume(
    run: RunDirectory, machine: Machine, values: dict[str, str] | None = None
) -> list[tuple[str, str]]:
    """Return the codes and fields for which a resume is refused."""
    with pytest.raises(InputError) as caught:
        prepare_resume(run, machine, values=values)
    return [(problem.code, problem.field) for problem in caught.value.problems]


def test_the_end_waits_for_no_launcher_whose_ranks_have_ended(runs: Runs) -> None:
    run, before = runs.training()
    os.kill(process_of(before, "launcher", None).pid, signal.SIGSTOP)
    request_stop(run)
    assert wait_for(run, ended, timeout_s=EXIT_GRACE_S - 10).state == "stopped"
    assert nothing_is_left(run, before)


@pytest.mark.parametrize("manners", ["steps=5 bad-exit lingers"])
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


@pytest.mark.parametrize(
    ("role", "rank", "manners", "code"),
    [
        ("runner", None, "", OutcomeCode.RUNNER_LOST),
        ("launcher", None, "orphans deaf", OutcomeCode.LAUNCHER_LOST),
        ("rank", 1, "", OutcomeCode.RANK_LOST),
        ("rank", 0, "mourns", OutcomeCode.RANK_LOST),
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


def test_stop_names_a_suspended_supervisor_and_what_was_saved(
    runs: Runs, capfd: pytest.CaptureFixture[str]
) -> None:
    run, before = runs.training()
    pid = supervisor_of(before).pid
    os.kill(pid, signal.SIGSTOP)
    try:
        assert main(["stop", str(run.path)]) == 1
    finally:
        os.kill(pid, signal.SIGCONT)
    told = capfd.readouterr()
    assert f"`kill -CONT {pid}` lets it go on" in told.err
    saved = max(checkpoint_folders(run.checkpoints_dir)).name
    assert f"step {int(saved.removeprefix('step-'))} is saved" in told.out
    assert wait_for(run, ended, timeout_s=WITHIN_S).state == "stopped"


@pytest.mark.parametrize("manners", ["stubborn deaf"])
def test_a_stubborn_run_is_killed_after_the_grace_time(runs: Runs) -> None:
    run, before = runs.training()
    last = stop(run, grace_s=1)
    assert (last.state, last.exit_code, last.code) == ("failed", 1, OutcomeCode.STOP_OVERDUE)
    assert nothing_is_left(run, before)


def test_schedulers_warning_stops_and_kills_nothing(runs: Runs) -> None:
    run, before = runs.training()
    for process in (*before.processes, supervisor_of(before)):
        os.kill(process.pid, signal.SIGUSR1)
    last = wait_for(run, ended, timeout_s=WITHIN_S)
    assert (last.state, last.exit_code, last.saved_step) == ("stopped", 4, last.step)
    assert nothing_is_left(run, before)


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
    again = wait_for_training(run, 2)
    assert {process.rank for process in again.processes if process.role == "rank"} == {0}
    assert (read_spec(run).gpus, read_spec(run).checkpoint.every_minutes) == (1, 30)
    # A scheduler's warning to the batch script, which waits for the end.
    shown.send_signal(signal.SIGUSR1)
    assert shown.wait(timeout=2 * WITHIN_S) == 4
    assert read_state(run).state == "stopped"


@pytest.mark.parametrize("manners", ["orphans"])
def test_training_outlives_its_supervisor_and_another_takes_over(runs: Runs) -> None:
    """Which tells a later death."""
    run, before = runs.training()
    kill(supervisor_of(before))
    wait_for_end_of(supervisor_of(before))
    ranks = [process for process in before.processes if process.role == "rank"]
    assert all(alive(process) for process in ranks)
    assert ensure_supervised(run)
    ensure_supervised(run)  # a second look at the same time must not make a second supervisor
    wait_for(run, lambda state: state.supervisor != before.supervisor)
    after = wait_for(run, lambda state: state.heartbeat > before.heartbeat + 3)
    assert after.attempt == 1
    assert after.step > before.step
    assert {process.pid for process in ranks} <= {process.pid for process in after.processes}
    assert not ensure_supervised(run)
    kill(process_of(before, "launcher"))
    last = wait_for(run, ended, timeout_s=WITHIN_S)
    assert (last.state, last.code) == ("failed", OutcomeCode.LAUNCHER_LOST)
    assert nothing_is_left(run, after)


def test_a_run_whose_folder_is_deleted_ends(runs: Runs) -> None:
    run, before = runs.training()
    argv, pipe = [sys.executable, "-m", "so_tui", "watch", str(run.path)], subprocess.PIPE
    watching = subprocess.Popen([*argv, "--plain"], stdout=pipe, stderr=pipe, text=True)
    assert watching.stdout is not None
    assert run.name in watching.stdout.readline()
    run.path.rename(run.path.with_name("elsewhere"))
    run.path.mkdir()  # as one who deletes file by file leaves it, or one who writes makes it anew
    _, complaint = watching.communicate(timeout=WITHIN_S)
    assert (watching.returncode, "has been deleted" in complaint) == (1, True)
    wait_for_end_of(supervisor_of(before), *before.processes, timeout_s=WITHIN_S)
    assert not list(run.path.iterdir())


def test_everything_killed_at_once_is_lost(runs: Runs, machine: Machine) -> None:
    run, before = runs.training()
    everything = (supervisor_of(before), *before.processes)
    for process in everything:
        kill(process)
    killed = time.time()
    wait_for_end_of(*everything)
    assert not ensure_supervised(run), "nothing lives that a supervisor could attach to"
    last = state_with_truth(run)
    assert (last.state, last.exit_code, last.code) == ("lost", 1, OutcomeCode.UNOBSERVED)
    assert last.ended is not None
    assert last.ended <= killed, "not the time at which somebody looked"
    assert resume(run, prepare_resume(run, machine)) == 2
    again = wait_for_training(run, 2)
    assert (again.earlier_s, again.ended) == (last.took_s, None)
    assert stop(run, grace_s=30).state == "stopped"
    assert nothing_is_left(run, again)


def test_two_runs_at_once_and_a_resume(runs: Runs, machine: Machine) -> None:
    (one, _), (two, _) = runs.training(), runs.training()
    commands = [json.loads(run.command_path(1).read_bytes())["environment"] for run in (one, two)]
    changes = [change for changes in commands for change in changes]
    assert len({c["value"] for c in changes if c["name"] == "SO_TUI_RENDEZVOUS"}) == 2
    assert problems_of_resume(one, machine) == [("run-is-live", "run")]
    stopped = stop(one, grace_s=30)
    rate = "train.learning_rate"
    # The lock is held by the supervisor of a resume that came a moment before.
    with one.supervisor_lock_path.open("ab") as held, ThreadPoolExecutor() as pool:
        fcntl.flock(held, fcntl.LOCK_EX)
        late = pool.submit(resume, one, prepare_resume(one, machine, values={rate: "1e-3"}))
        wait_until(lambda: one.launch_path(2).exists() or late.done())
        write_spec(one, with_values(read_spec(one), {rate: "1e-4"}))  # as the first one does
        with pytest.raises(SoTuiError, match="came first"):
            late.result()
        assert read_spec(one).train.learning_rate == 1e-4
    assert resume(one, prepare_resume(one, machine)) == 2
    assert stop_request(one) is None
    again = wait_for_training(one, 2)
    assert (again.started, again.ended, again.earlier_s) == (stopped.started, None, stopped.took_s)
    written = {path.name for path in one.attempt_dir(2).iterdir()}
    assert written >= {"ds_config.json", "launch.json", "command.json"}
    request_stop(two)
    assert stop(one, grace_s=30).attempt == 2
    assert wait_for(two, ended).state == "stopped"


STARTS = """
import sys, time
from pathlib import Path
from msgspec.structs import replace
from so_tui.machine import inspect_machine
from so_tui.spec import find_preset
from tests.support.fake_runs import Runs
Runs(Path(sys.argv[1]), find_preset("tiny").spec, replace(inspect_machine(), gpus=())).start()
time.sleep(600)
"""


def test_it_goes_on_when_the_program_that_started_it_is_killed(runs: Runs) -> None:
    argv = [sys.executable, "-c", STARTS, str(runs.folder)]
    with subprocess.Popen(argv, start_new_session=True) as program:
        wait_until(lambda: list(runs.folder.glob("*/rank0.pid")))
        os.killpg(program.pid, signal.SIGKILL)
    (path,) = runs.folder.iterdir()
    run = RunDirectory(path)
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


@pytest.mark.parametrize("manners", ["forks"])
def test_the_supervisor_is_light(runs: Runs) -> None:
    """While the run trains; before, it looks five times as often. It keeps no zombies."""
    run, before = runs.training()
    supervisor = psutil.Process(supervisor_of(before).pid)
    began = time.time()
    time.sleep(MEMORY_INTERVAL_S + 3)
    assert supervisor.memory_info().rss < 40 << 20
    found = RunReader(run).poll(limit_s=10.0).samples.values()
    samples = [s for host in found for s in host if s.time - s.interval_s >= began]
    covered_s = sum(sample.interval_s for sample in samples)
    assert covered_s > MEMORY_INTERVAL_S, "the look at memory, which costs most, is in it"
    assert sum(sample.supervisor_cpu_s for sample in samples) < 0.01 * covered_s
    wait_for(run, lambda state: state.step > 20)

    def no_zombie() -> bool:
        stats = [read_stat(child.pid) for child in supervisor.children()]
        return all(stat is None or stat.alive for stat in stats)

    wait_until(no_zombie)
    assert stop(run, grace_s=30).state == "stopped"


@pytest.mark.parametrize("manners", ["long-ago"])
def test_a_supervisor_compares_its_run_with_the_plan(runs: Runs, machine: Machine) -> None:
    """The records say that it has trained for minutes, longer a step than planned."""
    step = StepTime(forward_s=0.01, backward_s=0.02, exposed_optimizer_s=0.0, data_s=0.0)
    launch = prepare(runs.spec, machine, force=True)
    launch = replace(launch, plan=replace(launch.plan, step=step, step_s=step.total_s))
    run = start(launch, runs_dir=runs.folder)
    runs.adopt(run)
    slowdown = wait_for(run, lambda state: state.slowdown is not None).slowdown
    assert slowdown is not None
    assert [slowdown.step_s, slowdown.planned_s] == pytest.approx([0.1, 0.03])
    found = RunReader(run).poll(limit_s=10.0).samples.values()
    places = [place for samples in found for sample in samples for place in sample.placement]
    assert {place.rank for place in places} == {0, 1}


def test_moved_run_keeps_its_supervisor_until_back(runs: Runs) -> None:
    """Requests are not written through links, which could lead anywhere."""
    run, state = runs.training()
    moved = run.path.with_name("moved")
    run.path.rename(moved)
    run.path.symlink_to(moved)
    os.kill(supervisor_of(state).pid, signal.SIGTERM)
    log = supervisor_log(run, 1)
    wait_until(lambda: "link" in log.read_text())
    run.path.unlink()
    moved.rename(run.path)
    assert wait_for(run, ended).state == "stopped"


def test_rank_end_is_seen_though_children_are_ignored(runs: Runs) -> None:
    """DeepSpeed's launcher cannot tell how its ranks ended until somebody changes that."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        run = runs.start()
    finally:
        signal.signal(signal.SIGCHLD, before)
    everyone = {"runner", "launcher", "rank"}
    state = wait_for(run, lambda state: state.step >= 2 and everyone <= roles(state))
    kill(process_of(state, "rank", 1))
    last = wait_for(run, ended)
    assert (last.state, last.code) == ("failed", OutcomeCode.RANK_LOST)
    assert last.reason == "rank 1 was ended by SIGKILL"


@pytest.mark.parametrize("newer", [True, False], ids=["newer attempt", "other supervisor"])
def test_superseded_supervisor_leaves(newer: bool, runs: Runs) -> None:
    """It was cut off while another attempt began: it ends its processes and writes nothing."""
    run, state = runs.training()
    mine = supervisor_of(state)
    other = replace(mine, pid=1 << 21)
    found = replace(state, attempt=state.attempt + newer, supervisor=other, host="elsewhere")
    deadline = time.monotonic() + 30
    while alive(mine) and time.monotonic() < deadline:
        write_state(run, found)  # again, because its last write may come just after ours
        time.sleep(0.2)
    try:
        assert not alive(mine)
        assert any(map(alive, state.processes)) != newer
        assert read_state(run) == found
    finally:
        write_state(run, state)  # so that what is left is found and ended
