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

from so_tui.cli import main
from so_tui.commands import run as batch_script
from so_tui.folders import state_home
from tests.support.commands import forget_cluster

REFUSED = (
    "sbatch: error: Batch job submission failed: Invalid account or account/partition combination "
    "specified"
)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with commands of Slurm, whose sbatch refuses jobs until the file ``accepts``
    exists.
    """
    folder = tmp_path / "slurm"
    folder.mkdir()
    refuses = f"touch {folder}/asked; echo '{REFUSED}' >&2; exit 1"
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
    return folder


def submitted(tmp_path: Path, *options: str) -> int:
    argv = ["run", "tiny", "--partition", "gh", "--runs-dir", str(tmp_path / "runs"), "--detach"]
    return main([*argv, *options])


def kept() -> list[Path]:
    return sorted((state_home() / "scripts").glob("*"))


def test_refused_script_is_kept_and_submitted_again(
    slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submitted(tmp_path, "--edit") == 2
    (script,) = kept()
    printed = capsys.readouterr().err
    assert str(script) in printed
    assert "account" in printed
    assert script.read_text().endswith("# mine\n")
    assert list((tmp_path / "runs").glob("tiny*")) == []
    (slurm / "accepts").touch()
    assert submitted(tmp_path, "--script", str(script)) == 0
    (run,) = (tmp_path / "runs").glob("tiny*")
    job = (run / "attempts/001/job.sh").read_text()
    assert job.endswith("# mine\n")
    assert (
        re.findall("^so_tui_run=(.*)$", job, re.MULTILINE)
        == [str(run)]
        != re.findall("^so_tui_run=(.*)$", script.read_text(), re.MULTILINE)
    )


def test_a_run_is_called_as_the_user_says_and_so_is_its_job(slurm: Path, tmp_path: Path) -> None:
    (slurm / "accepts").touch()
    assert submitted(tmp_path, "--name", "mine.v2") == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("mine.v2-")
    assert f"--job-name={run.name}\n" in (run / "attempts/001/job.sh").read_text()
    with pytest.raises(SystemExit, match="2"):
        submitted(tmp_path, "--name", "../mine")
    assert list((tmp_path / "runs").iterdir()) == [run]


@pytest.mark.parametrize(("answer", "code", "left"), [("y", 0, 0), ("", 0, 0), ("n", 2, 1)])
def test_a_refused_script_can_be_changed_again_at_once(
    answer: str, code: int, left: int, slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers(_question: str) -> str:
        assert len(kept()) == 1  # should the terminal go away now
        (slurm / "accepts").touch()
        return answer

    monkeypatch.setattr(batch_script, "usable_terminal", lambda: True)
    monkeypatch.setattr("builtins.input", answers)
    assert submitted(tmp_path, "--edit") == code
    assert len(kept()) == left
    for run in (tmp_path / "runs").glob("tiny*"):
        assert (run / "attempts/001/job.sh").read_text().endswith("# mine\n# mine\n")


def test_unchanged_is_not_kept(
    slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDITOR", "true")
    assert submitted(tmp_path, "--edit") == 2
    assert kept() == []


@pytest.mark.parametrize("content", [b"#!/bin/sh\ntrue\n", b"\xff\xfe", None])
def test_other_scripts_are_refused(content: bytes | None, slurm: Path, tmp_path: Path) -> None:
    (slurm / "accepts").touch()
    script = tmp_path / "script.sh"
    if content is not None:
        script.write_bytes(content)
    assert submitted(tmp_path, "--script", str(script)) == 2
    assert list((tmp_path / "runs").glob("tiny*")) == []


@pytest.mark.parametrize("options", [["--edit"], ["--script", "job.sh"]])
def test_script_needs_submission(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "tiny", "--partition", "gh", "--dry-run", *options]) == 2
    assert options[0] in capsys.readouterr().err


@pytest.mark.usefixtures("slurm")
def test_a_dry_run_warns_of_a_foreign_interpreter(capsys: pytest.CaptureFixture[str]) -> None:
    """That the nodes cannot execute."""
    argv = ["run", "tiny", "--partition", "gh", "--dry-run", "--gpus", "1"]
    assert main([*argv, "--machine", "gh200-480"]) == 0
    printed = capsys.readouterr()
    assert ("aarch64" in printed.err) == (platform.machine() != "aarch64")
    assert "so_tui_run=RUN" in printed.out
