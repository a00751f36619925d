"""Batch scripts of the user's own: kept when Slurm refuses them, and submitted again. Shell scripts
stand for Slurm's commands.
"""

from __future__ import annotations

import os
import platform
import re
import stat
from pathlib import Path

import pytest

from so_tui.folders import state_home
from tests.support.commands import Call, forget_cluster

REFUSED = "Batch job submission failed: Invalid account or account/partition combination specified"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file whose presence has sbatch accept jobs, which it refuses until then."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    refuses = f"echo 'sbatch: error: {REFUSED}' >&2; exit 1"
    for name, lines in (
        ("scontrol", "echo 'ClusterName = here'"),
        ("sbatch", f"if [ -e {folder}/accepts ]; then echo 7; else {refuses}; fi"),
    ):
        (folder / name).write_text(f"#!/bin/sh\n{lines}\n")
        (folder / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    forget_cluster(monkeypatch)
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", "sed -i '$a # mine'")
    monkeypatch.setenv("SO_TUI_RUNS_DIR", str(tmp_path / "runs"))
    return folder / "accepts"


SUBMIT = "run tiny --partition gh --detach"


def kept() -> list[Path]:
    return sorted((state_home() / "scripts").glob("*"))


def test_refused_script_is_kept_and_submitted_again(
    slurm: Path, tmp_path: Path, call: Call
) -> None:
    code, _, err = call(f"{SUBMIT} --edit")
    (script,) = kept()
    assert (code, str(script) in err, "account" in err) == (2, True, True)
    assert script.read_text().endswith("# mine\n")
    assert list((tmp_path / "runs").glob("tiny*")) == []
    slurm.touch()
    assert call(f"{SUBMIT} --edit --script", script).code == 0
    (run,) = (tmp_path / "runs").glob("tiny*")
    job = (run / "attempts/001/job.sh").read_text()
    assert job.endswith("# mine\n# mine\n")
    own, before = (
        re.findall("^so_tui_run=(.*)$", text, re.MULTILINE) for text in (job, script.read_text())
    )
    assert own == [str(run)] != before


def test_a_run_is_called_as_the_user_says_and_so_is_its_job(
    slurm: Path, tmp_path: Path, call: Call
) -> None:
    slurm.touch()
    assert call(f"{SUBMIT} --name mine.v2").code == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("mine.v2-")
    assert f"--job-name={run.name}\n" in (run / "attempts/001/job.sh").read_text()
    with pytest.raises(SystemExit, match="2"):
        call(f"{SUBMIT} --name ../mine")
    assert list((tmp_path / "runs").iterdir()) == [run]


@pytest.mark.parametrize("content", [b"#!/bin/sh\ntrue\n", b"\xff\xfe", None])
def test_other_scripts_are_refused(
    content: bytes | None, slurm: Path, tmp_path: Path, call: Call
) -> None:
    slurm.touch()
    script = tmp_path / "script.sh"
    if content is not None:
        script.write_bytes(content)
    assert call(f"{SUBMIT} --script", script).code == 2
    assert list((tmp_path / "runs").glob("tiny*")) == []


@pytest.mark.usefixtures("slurm")
def test_a_dry_run_warns_of_a_foreign_interpreter(call: Call) -> None:
    """That the nodes cannot execute."""
    code, out, err = call("run tiny --partition gh --dry-run --gpus 1 --machine gh200-480")
    assert (code, "so_tui_run=RUN" in out) == (0, True)
    assert ("aarch64" in err) == (platform.machine() != "aarch64")
