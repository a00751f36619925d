"""Submissions that Slurm refuses, with what Slurm 22.05 and 24.11 print; tests/slurm has the real
one.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from so_tui.launch.slurm import client
from so_tui.launch.slurm.client import SlurmError, _RefusedError, explained
from so_tui.spec import InputError, Problem
from tests.support.launching import tiny

SPEC = tiny(
    slurm__partition="gh-dv",
    slurm__account="mine",
    slurm__qos="fast",
    slurm__time_limit="48:00:00",
    slurm__constraint="gh",
)
FAILED = "sbatch: error: Batch job submission failed: "


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of commands that stand for Slurm's."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    installed(tmp_path, "sinfo", "printf 'gh*|up|1:00|0/1/0/1||\\ngh-dev|up|1:00|0/1/0/1||\\n'")
    return tmp_path


def installed(folder: Path, name: str, lines: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(stat.S_IRWXU)


def refused(slurm: Path, printed: str) -> InputError | SlurmError:
    (slurm / "printed").write_text(printed)
    installed(slurm, "sbatch", f"cat {slurm}/printed >&2; exit 1")
    with pytest.raises(SlurmError) as caught:
        client.submit("job.sh", "/", os.environ)
    return explained(caught.value, SPEC)


TIME = "Requested time limit is invalid (missing or exceeds some limit)"
LIMIT = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
PARTITION = f"sbatch: error: invalid partition specified: gh-dv\n{FAILED}Invalid partition name"
GRES = "sbatch: error: Invalid generic resource (gres) specification"


@pytest.mark.parametrize(
    ("printed", "code", "field", "value"),
    [
        (
            f"{FAILED}Invalid account or account/partition combination specified",
            "slurm-account",
            "slurm.account",
            "mine",
        ),
        (f"{PARTITION} specified", "slurm-partition", "slurm.partition", "gh-dv"),
        (f"{FAILED}Invalid qos specification", "slurm-qos", "slurm.qos", "fast"),
        (f"{FAILED}Invalid feature specification", "slurm-constraint", "slurm.constraint", "gh"),
        (f"{FAILED}{TIME}", "slurm-time-limit", "slurm.time_limit", "48:00:00"),
        (f"{FAILED}{LIMIT}", "slurm-limit", "slurm.qos", "fast"),
        (f"{FAILED}Requested node configuration is not available", "slurm-nodes", "gpus", "2"),
        # --nodes=9 of 2, by 24.11.5
        (f"{FAILED}More processors requested than permitted", "slurm-nodes", "nodes", "1"),
        (GRES, "slurm-nodes", "gpus", "2"),  # by 24.11.5
    ],
)
def test_refusal_names_its_key(
    printed: str, code: str, field: str, value: str, slurm: Path
) -> None:
    problem = problem_of(refused(slurm, f"{printed}\n"))
    assert (problem.code, problem.field, problem.value) == (code, field, value)
    assert "sbatch: error" not in problem.message
    assert problem.remedy


def test_a_misspelt_partition_is_recognised(slurm: Path) -> None:
    assert (
        "gh-dev" in problem_of(refused(slurm, f"{FAILED}Invalid partition name specified\n")).remedy
    )
    installed(slurm, "sinfo", "exit 1")
    assert problem_of(refused(slurm, f"{FAILED}Invalid partition name specified\n")).remedy


def problem_of(error: InputError | SlurmError) -> Problem:
    assert isinstance(error, InputError)
    return error.problems[0]


def test_a_sites_own_words_are_shown_as_they_are(slurm: Path) -> None:
    error = refused(
        slurm,
        f"sbatch: error: Use ibrun.\x1b[2J\n\nsbatch: error: No --mem here\n{FAILED}Invalid qos "
        "specification\n",
    )
    assert isinstance(error, _RefusedError)
    assert error.lines == (
        "Use ibrun.\x1b[2J",
        "No --mem here",
        "Batch job submission failed: Invalid qos specification",
    )
    assert "No --mem here" in str(error)
    assert str(error).isprintable()
