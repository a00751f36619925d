"""Output of Slurm's commands, as recorded."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from so_tui.launch.slurm import client
from so_tui.launch.slurm.client import Job, SlurmError, _parse_queue, _RefusedError, submit
from tests.support.commands import forget_cluster

QUEUE = """\
1201|PENDING|Resources|2026-11-24T02:13:00||/runs/tiny-1
1202|PENDING|Priority|N/A||/runs/a|b
1199|RUNNING|None|2026-11-24T00:13:00|nid00[1001-1002]|/x
1198|CANCELLED|None|2026-11-24T00:01:00|n1|y
1197_[1-4]|PENDING|Resources|N/A||z
slurm_load_jobs: a warning
"""
QUEUE_24_11 = """\
4|CANCELLED|JobHeldUser|2026-11-25T09:49:19||/root
3|PENDING|BeginTime|2026-11-25T10:49:19||/root
2|PENDING|ReqNodeNotAvail, UnavailableNodes:n[1-2]|N/A||/root
1|PENDING|Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions|N/A||/root
"""  # noqa: E501
"""By Slurm 24.11.5 of Debian 13."""
ACCOUNTING = (
    "1198|CANCELLED by 1000|None|2026-11-24T00:01:00|n1|y\n"
    "1190|TIMEOUT|None|2026-11-23T00:01:00|None assigned|z\n"
)


def test_the_queue() -> None:
    waits, behind, runs, cancelled = _parse_queue(QUEUE)
    assert (waits.id, waits.state, waits.reason, waits.nodes) == (
        "1201",
        "PENDING",
        "Resources",
        "",
    )
    assert waits.start is not None
    assert (behind.start, behind.folder) == (None, "/runs/a|b")
    assert (runs.state, runs.reason, runs.nodes) == ("RUNNING", "", "nid00[1001-1002]")
    assert cancelled.state == "CANCELLED"


def test_the_queue_of_slurm_24_11() -> None:
    cancelled, begins, unavailable, down = _parse_queue(QUEUE_24_11)
    assert (cancelled.id, cancelled.state, cancelled.folder) == ("4", "CANCELLED", "/root")
    assert begins.start is not None
    assert (unavailable.reason, unavailable.start) == (
        "ReqNodeNotAvail, UnavailableNodes:n[1-2]",
        None,
    )
    assert down.reason.startswith("Nodes required for job are DOWN")


def test_the_accounting() -> None:
    cancelled, late = _parse_queue(ACCOUNTING)
    assert (cancelled.state, late.state, late.nodes) == ("CANCELLED", "TIMEOUT", "")
    assert _parse_queue("") == ()
    assert isinstance(late, Job)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "|",
        "7",
        "7| |||||",
        "7|||0001-01-01T00:00:00||",
        "7|||9999-12-31T23:59:59||",
        "\u0663|RUNNING||||/x",
        "\0|\0|||",
    ],
)
def test_a_line_that_no_slurm_would_write_breaks_nothing(line: str) -> None:
    jobs = _parse_queue(f"{line}\n1201|PENDING|Resources|N/A||/x\n")
    assert jobs[-1].id == "1201"
    assert {job.id for job in jobs} <= {"7", "1201"}


def test_without_slurm_it_is_said_where_to_submit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SlurmError):
        submit("job.sh", "/", {"PATH": "/nowhere"})


def installed(folder: Path, name: str, lines: str) -> None:
    """Make a command of Slurm that a shell executes."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(stat.S_IRWXU)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("squeue", client.own_jobs),
        ("sacct", lambda: client.accounted("7")),
        ("scancel", lambda: client.cancel("7")),
        ("sinfo", client.partitions),
        ("sbatch", lambda: submit("job.sh", "/", {**os.environ, "TOKEN": "secret"})),
    ],
)
def test_no_variable_of_the_users_shell_changes_what_is_asked(
    name: str, call: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm lets ``SBATCH_PARTITION`` win over a script, and ``SQUEUE_PARTITION`` hide a job."""
    installed(tmp_path, name, f"env > {tmp_path}/seen; echo 7")
    hostile = {
        "SBATCH_JOB_NAME",
        "SBATCH_PARTITION",
        "SQUEUE_PARTITION",
        "SACCT_FORMAT",
        "SCANCEL_STATE",
        "SINFO_FORMAT",
        "SLURM_JOB_ID",
    }
    for variable in hostile:
        monkeypatch.setenv(variable, "x")
    monkeypatch.setenv("SLURM_CONF", "/etc/ours")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    call()
    seen = dict(line.partition("=")[::2] for line in (tmp_path / "seen").read_text().splitlines())
    assert hostile.isdisjoint(seen)
    assert seen["SLURM_CONF"] == "/etc/ours"
    assert ("TOKEN" in seen) == (name == "sbatch")


@pytest.mark.parametrize("state", ["PENDING", "CANCELLED"])
def test_a_job_that_slurm_requeued_itself_is_requeued(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    installed(tmp_path, "scontrol", "echo 'Job is pending execution' >&2; exit 1")
    installed(tmp_path, "squeue", f"echo '8|PENDING|None|N/A||/x'; echo '7|{state}|None|N/A||/x'")
    with contextlib.nullcontext() if state == "PENDING" else pytest.raises(_RefusedError):
        client.requeue("7")


def test_silent_cluster_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1019.0]
    monkeypatch.setattr("so_tui.launch.slurm.client.time.monotonic", lambda: now[0])
    forget_cluster(monkeypatch)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    installed(tmp_path, "scontrol", f"echo asked >> {tmp_path}/asked; exit 1")
    for _ in range(3):
        with pytest.raises(SlurmError):
            client.cluster_name()
    assert (tmp_path / "asked").read_text().split() == [
        "asked"
    ]  # a silent one is not asked every second
    installed(
        tmp_path,
        "scontrol",
        f"echo asked >> {tmp_path}/asked; echo 'ClusterName             = here'",
    )
    now[0] += 59
    with pytest.raises(SlurmError):
        client.cluster_name()
    now[0] += 1
    assert [client.cluster_name() for _ in range(3)] == ["here"] * 3
    assert (tmp_path / "asked").read_text().split() == ["asked"] * 2


@pytest.mark.parametrize(
    "printed", ["", "Usage: sbatch [OPTIONS(0)...]", "slurm 24.11.5", "7 8", "-7"]
)
def test_a_submission_without_a_number_is_refused(printed: str, tmp_path: Path) -> None:
    installed(tmp_path, "sbatch", f"echo '{printed}'")
    with pytest.raises(SlurmError):
        submit("job.sh", "/", {"PATH": f"{tmp_path}:{os.environ['PATH']}"})


@pytest.mark.parametrize(
    "printed", ["1201", "1201;alps", "Welcome\n----> checks ... OK\n1201;alps\n"]
)
def test_the_number_of_a_job_is_found_below_a_sites_own_words(printed: str, tmp_path: Path) -> None:
    installed(tmp_path, "sbatch", f"echo '{printed}'")
    assert submit("job.sh", "/", {"PATH": f"{tmp_path}:{os.environ['PATH']}"}) == "1201"


def test_unexecutable_command_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "squeue").write_text("no program")
    (tmp_path / "squeue").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmError):
        client.own_jobs()
