"""Slurm's commands: what they are asked, what they print, as recorded, and what they refuse."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from so_tui.launch.launch import Job
from so_tui.launch.slurm import client
from so_tui.launch.slurm.client import (
    Partition,
    SlurmError,
    _parse_partitions,
    _parse_queue,
    _RefusedError,
    explained,
    queue,
    submit,
)
from so_tui.spec import InputError, SoTuiError
from tests.launch.slurm.conftest import Install
from tests.support.commands import forget_cluster
from tests.support.launching import tiny

QUEUE = """\
1201|PENDING|Resources|2026-11-24T02:13:00||/runs/tiny-1
1202|PENDING|Priority|N/A||/runs/a|b
1199|RUNNING|None|2026-11-24T02:13:00|nid00[1001-1002]|/x
1197_[1-4]|PENDING|Resources|N/A||z
slurm_load_jobs: a warning
1198|CANCELLED by 1000|None|2026-11-24T02:13:00|None assigned|y
"""
"""Of ``squeue``, and a line of ``sacct``."""
RECORDED = "main*|up|1:00:00|1/1/0/2|gpu:2|(null)\nstrict|up|1:00:00|1/1/0/2|gpu:2|(null)\n"
"""By Slurm 22.05.8."""
SEVERAL = """\
gh-dev|up|2:00:00|0/8/0/8|(null)|gh
normal*|up|1-00:00:00|90/10/4/104|gpu:gh200:4(S:0-3)|thp_never,nvidia_vboost_enabled
normal*|up|1-00:00:00|0/2/0/2|gpu:gh200:2,tmpdisk:900|thp_never
closed|down|infinite|0/0/7/7|N/A|
"""


def test_jobs_of_the_queue_and_the_accounting() -> None:
    at = datetime(2026, 11, 24, 2, 13).timestamp()
    assert _parse_queue(QUEUE) == (
        Job(id="1201", state="PENDING", reason="Resources", start=at, folder="/runs/tiny-1"),
        Job(id="1202", state="PENDING", reason="Priority", folder="/runs/a|b"),
        Job(id="1199", state="RUNNING", start=at, nodes="nid00[1001-1002]", folder="/x"),
        Job(id="1198", state="CANCELLED", start=at, folder="y"),
    )


@pytest.mark.parametrize(
    "line",
    [
        *("", "|", "7", "7| |||||", "7|||0001-01-01T00:00:00||", "7|||9999-12-31T23:59:59||"),
        *("\u0663|RUNNING||||/x", "\0|\0|||", "a|up|1:00|1/2/3|gpu:1|x"),
        "PARTITION|AVAIL|TIMELIMIT|NODES(A/I/O/T)|GRES|AVAIL_FEATURES",
    ],
)
def test_a_line_that_no_slurm_would_write_breaks_nothing(line: str) -> None:
    jobs = _parse_queue(f"{line}\n1201|PENDING|Resources|N/A||/x\n")
    assert jobs[-1].id == "1201"
    assert {job.id for job in jobs} <= {"7", "1201"}
    partitions = _parse_partitions(f"{line}\n{RECORDED}")
    assert [partition.name for partition in partitions] == ["main", "strict"]


def test_groups_of_nodes_add_up_to_partitions() -> None:
    assert _parse_partitions(SEVERAL) == (
        Partition(
            name="normal",
            default=True,
            time_limit="1-00:00:00",
            nodes=106,
            idle=12,
            gpus=4,
            features=("thp_never", "nvidia_vboost_enabled"),
        ),
        Partition(name="gh-dev", time_limit="2:00:00", nodes=8, idle=8, features=("gh",)),
        Partition(name="closed", open=False, nodes=7),
    )


def submitted() -> str:
    return submit("#!/bin/sh\n", "/", {**os.environ, "TOKEN": "secret"})


CALLS: dict[str, Callable[[], object]] = {
    "squeue": client.own_jobs,
    "sacct": lambda: client.accounted("7"),
    "scancel": lambda: client.cancel("7"),
    "sinfo": client.partitions,
    "sbatch": submitted,
}


@pytest.mark.parametrize("name", CALLS)
def test_no_variable_of_the_users_shell_changes_what_is_asked(
    name: str, install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm lets ``SBATCH_PARTITION`` win over a script, and ``SQUEUE_PARTITION`` hide a job."""
    install(name, f"env > {tmp_path}/seen; echo 7")
    commands = ("SBATCH", "SQUEUE", "SACCT", "SCANCEL", "SINFO", "SLURM_JOB")
    hostile = {f"{command}_PARTITION" for command in commands} | {"SBATCH_JOB_NAME", "SLURM_JOB_ID"}
    for variable in hostile:
        monkeypatch.setenv(variable, "x")
    monkeypatch.setenv("SLURM_CONF", "/etc/ours")
    CALLS[name]()
    seen = dict(line.partition("=")[::2] for line in (tmp_path / "seen").read_text().splitlines())
    assert seen.keys().isdisjoint(hostile)
    assert seen["SLURM_CONF"] == "/etc/ours"
    assert ("TOKEN" in seen) == (name == "sbatch")


@pytest.mark.parametrize("state", ["PENDING", "CANCELLED"])
def test_a_job_that_slurm_requeued_itself_is_requeued(state: str, install: Install) -> None:
    install("scontrol", "echo 'Job is pending execution' >&2; exit 1")
    install("squeue", f"echo '8|PENDING|None|N/A||/x'; echo '7|{state}|None|N/A||/x'")
    with contextlib.nullcontext() if state == "PENDING" else pytest.raises(_RefusedError):
        client.requeue("7")


def test_silent_cluster_is_asked_again(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1019.0]
    monkeypatch.setattr("so_tui.launch.slurm.client.time.monotonic", lambda: now[0])
    forget_cluster(monkeypatch)
    asked = tmp_path / "asked"
    install("scontrol", f"echo asked >> {asked}; exit 1")
    for _ in range(3):
        with pytest.raises(SlurmError):
            client.cluster_name()
    assert asked.read_text().split() == ["asked"]  # a silent one is not asked every second
    install("scontrol", f"echo asked >> {asked}; echo 'ClusterName             = here'")
    now[0] += 59
    with pytest.raises(SlurmError):
        client.cluster_name()
    now[0] += 1
    assert [client.cluster_name() for _ in range(3)] == ["here"] * 3
    assert asked.read_text().split() == ["asked"] * 2


@pytest.mark.parametrize(
    ("printed", "number"),
    [
        ("1201", "1201"),
        ("Welcome\n----> checks ... OK\n1201;alps\n", "1201"),
        ("Usage: sbatch [OPTIONS(0)...]", None),
        ("slurm 24.11.5", None),
        ("-7", None),
    ],
)
def test_job_number_below_a_sites_words(printed: str, number: str | None, install: Install) -> None:
    install("sbatch", f"echo '{printed}'")
    with contextlib.nullcontext() if number else pytest.raises(SlurmError):
        assert submitted() == number


def test_a_script_is_handed_over_and_not_named(install: Install, tmp_path: Path) -> None:
    """A file could be exchanged before Slurm reads it.."""
    install(
        "sbatch",
        f"cat > {tmp_path}/read; umask > {tmp_path}/umask; echo $* > {tmp_path}/given; echo 7",
    )
    tmp_path.chmod(0o750)
    assert submit("#!/bin/sh\n# \u00e9\n", str(tmp_path), os.environ) == "7"
    assert (tmp_path / "given").read_text() == f"--parsable --chdir={tmp_path}\n"
    assert (tmp_path / "read").read_text() == "#!/bin/sh\n# \u00e9\n"
    assert (tmp_path / "umask").read_text() == "0027\n"


def test_unexecutable_command_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmError):
        submitted()  # there is none
    (tmp_path / "squeue").write_text("no program")
    (tmp_path / "squeue").chmod(0o700)
    with pytest.raises(SlurmError):
        client.own_jobs()


SPEC = tiny(
    slurm__partition="gh-dv",
    slurm__account="mine",
    slurm__qos="fast",
    slurm__time_limit="48:00:00",
    slurm__constraint="gh",
)
FAILED = "sbatch: error: Batch job submission failed: "


@pytest.fixture
def refused(install: Install, tmp_path: Path) -> Callable[[str], SoTuiError]:
    """Have Slurm print something and refuse a job; it has the partitions gh and gh-dev."""

    def refuse(printed: str) -> SoTuiError:
        (tmp_path / "printed").write_text(printed)
        install("sbatch", f"cat {tmp_path}/printed >&2; exit 1")
        with pytest.raises(SlurmError) as caught:
            submitted()
        return explained(caught.value, SPEC)

    install("sinfo", "printf 'gh*|up|1:00|0/1/0/1||\\ngh-dev|up|1:00|0/1/0/1||\\n'")
    return refuse


@pytest.mark.parametrize(
    ("said", "code", "field", "value"),
    [
        (
            "Invalid account or account/partition combination specified",
            *("slurm-account", "slurm.account", "mine"),
        ),
        ("Invalid partition name specified", "slurm-partition", "slurm.partition", "gh-dv"),
        ("Invalid qos specification", "slurm-qos", "slurm.qos", "fast"),
        ("Invalid feature specification", "slurm-constraint", "slurm.constraint", "gh"),
        ("Requested time limit is invalid", "slurm-time-limit", "slurm.time_limit", "48:00:00"),
        ("Job violates accounting/QOS policy", "slurm-limit", "slurm.qos", "fast"),
        ("Requested node configuration is not available", "slurm-nodes", "gpus", "2"),
        # --nodes=9 of 2, and --gres=gpu:9, by 24.11.5
        ("More processors requested than permitted", "slurm-nodes", "nodes", "1"),
        ("Invalid generic resource (gres) specification", "slurm-nodes", "gpus", "2"),
    ],
)
def test_refusal_names_its_key(
    said: str, code: str, field: str, value: str, refused: Callable[[str], InputError]
) -> None:
    before = {
        "slurm-partition": f"sbatch: error: invalid partition specified: gh-dv\n{FAILED}",
        "slurm-nodes": "sbatch: error: " if "gres" in said else FAILED,
    }
    (problem,) = refused(f"{before.get(code, FAILED)}{said} (and more)\n").problems
    assert (problem.code, problem.field, problem.value) == (code, field, value)
    assert "sbatch: error" not in problem.message
    assert problem.remedy
    assert code != "slurm-partition" or "gh-dev" in problem.remedy


def test_a_sites_own_words_are_shown_as_they_are(refused: Callable[[str], _RefusedError]) -> None:
    error = refused(
        "sbatch: error: Use ibrun.\x1b[2J\n\nsbatch: error: No --mem here\n"
        f"{FAILED}Invalid qos specification\n"
    )
    assert error.lines == (
        "Use ibrun.\x1b[2J",
        "No --mem here",
        "Batch job submission failed: Invalid qos specification",
    )
    assert "No --mem here" in str(error)
    assert str(error).isprintable()


# One answer of Slurm for all screens, on file systems that are full, have no locks, or are shared
# by hosts whose clocks differ.


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return when Slurm was asked, which takes a moment; it knows one job."""
    times: list[float] = []

    def own_jobs() -> tuple[Job, ...]:
        times.append(time.time())
        time.sleep(0.1)
        return (Job(id="7", state="PENDING"),)

    monkeypatch.setattr(client, "own_jobs", own_jobs)
    return times


@pytest.mark.parametrize(("ahead_s", "asks"), [(5, 0), (-5, 0), (3600, 1), (-3600, 1)])
def test_answer_of_another_clock_counts(
    ahead_s: float, asks: int, asked: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue("here", 30)
    (file,) = shutil.copytree(tmp_path / "cache", tmp_path / "other").glob("slurm/queue.*.json")
    os.utime(file, (time.time() + ahead_s,) * 2)
    monkeypatch.setattr(client, "cache_home", lambda: tmp_path / "other")
    asked.clear()
    for _ in range(3):
        queue("here", 30)
    assert len(asked) == asks


def test_asked_as_rarely_without_a_cache(asked: list[float], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    answers = [queue("here", 30) for _ in range(5)]
    assert [[job.id for job in answer.jobs] for answer in answers if answer] == [["7"]] * 5
    assert len(asked) == 1


def test_waiting_threads_share_one_slow_answer(asked: list[float]) -> None:
    threads = [threading.Thread(target=queue, args=("here", 30)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == 1
