"""Supervisors of two nodes, as Slurm would start them, with launchers of the real ``deepspeed`` and
the fake trainer.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from so_tui.launch.launch import prepare, write_launch
from so_tui.launch.slurm.executor import Submission, _write_submission
from so_tui.launch.supervisor.node import NodeState
from so_tui.machine import Machine
from so_tui.runs import RunDirectory, alive, create_run, new_attempt, read_state
from so_tui.runs.records import OutcomeCode
from so_tui.spec import find_preset
from so_tui.trust.decoding import read_json
from tests.support.fake_runs import FAKE_TRAINER, ended, kill, wait_for
from tests.support.python_path import python_path

HOSTS = ("n1", "n2")


def _can_name_hosts() -> bool:
    return (
        os.geteuid() == 0
        and subprocess.run(
            ["unshare", "--uts", "hostname", "n1"], capture_output=True, check=False
        ).returncode
        == 0
    )


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not _can_name_hosts(), reason="only root can give two processes hosts of their own"
    ),
]


@pytest.fixture
def run(tmp_path: Path, machine: Machine) -> Iterator[RunDirectory]:
    """A run of one rank on each of two nodes, whose supervisors have just been started."""
    spec = msgspec.structs.replace(find_preset("tiny").spec, gpus=1, nodes=2)
    run = create_run(spec, tmp_path)
    attempt = new_attempt(run)
    write_launch(run, attempt, prepare(spec, machine, force=True))
    submitted = Submission(
        job_id="7",
        cluster="none",
        partition="main",
        site="generic",
        poll_s=1,
        submitted=time.time(),
    )
    _write_submission(run, attempt, submitted)
    job = {
        "SLURM_NNODES": "2",
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        "SLURM_JOB_ID": "7",
    }
    supervisors = []
    for node, host in enumerate(HOSTS):
        supervise = (
            f"{sys.executable} -P -m so_tui supervise '{run.path}' --attempt {attempt} --in-job"
        )
        env = {
            **os.environ,
            **job,
            "SLURM_NODEID": str(node),
            "PYTHONPATH": python_path(FAKE_TRAINER),
        }
        with (tmp_path / f"{host}.log").open("wb") as log:
            argv = ["unshare", "--uts", "sh", "-c", f"hostname {host} && exec {supervise}"]
            supervisors.append(
                subprocess.Popen(argv, env=env, stdout=log, stderr=log, start_new_session=True)
            )
    yield run
    for supervisor in supervisors:
        if supervisor.poll() is None:
            supervisor.send_signal(signal.SIGTERM)
        supervisor.wait(60)


def other_node(run: RunDirectory) -> NodeState:
    return read_json(run.node_path(1, 1), NodeState)


def test_a_rank_that_is_killed_on_another_node_is_the_cause(run: RunDirectory) -> None:
    before = wait_for(
        run,
        lambda state: (
            state.step >= 2 and run.node_path(1, 1).exists() and len(other_node(run).processes) == 3
        ),
    )
    rank = next(process for process in other_node(run).processes if process.role == "rank")
    assert rank.rank == 1
    kill(rank)
    deadline = time.monotonic() + 60
    while not ended(state := read_state(run)):
        assert time.monotonic() < deadline, state
        time.sleep(0.1)
    assert (state.state, state.code, state.host) == ("failed", OutcomeCode.RANK_LOST, "n1")
    assert "n2" in state.reason
    assert "SIGKILL" in state.reason
    assert other_node(run).ended
    assert not any(alive(process) for process in before.processes)
    assert run.sample_hosts() == HOSTS
