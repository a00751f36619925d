"""The tiers of the tests themselves, and their folders."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from so_tui.folders import default_runs_dir, state_home, user_folder
from tests.support.python_path import checkout_path

STARTS = """
import pytest, subprocess, sys

def test_unmarked():
    subprocess.run([sys.executable, "-c", "", "deepspeed.launcher.runner"])

def test_run():
    subprocess.run([sys.executable, "-c", "", "so_tui", "run"])

def test_dry_run():
    subprocess.run([sys.executable, "-c", "", "so_tui", "run", "--dry-run"])

@pytest.mark.slow
def test_slow():
    test_unmarked()
"""


def test_an_unmarked_test_that_launches_ranks_fails(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    (tmp_path / "test_inner.py").write_text(STARTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.tiers"]
    command += ["--rootdir", str(tmp_path), "-p", "no:cacheprovider", str(tmp_path)]
    own = {"PYTHONPATH": checkout_path()}
    done = subprocess.run(
        command, env=own, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert "mark it `slow`" in done.stdout
    assert "ERROR test_inner.py::test_unmarked" in done.stdout
    assert "ERROR test_inner.py::test_run" in done.stdout
    assert not any(name in done.stdout for name in ("test_slow", "test_dry_run"))


def test_tests_have_folders_of_their_own(tmp_path: Path) -> None:
    folders = (default_runs_dir(), user_folder(), state_home())
    assert all(folder.is_relative_to(tmp_path) for folder in folders)
    assert tmp_path.is_relative_to(tempfile.gettempdir())
