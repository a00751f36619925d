"""The tiers of the tests themselves, and their folders."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from so_tui.folders import default_runs_dir, state_home, user_folder
from tests.support.python_path import checkout_path
from tests.support.tiers import launches_ranks

STARTS = (
    "import subprocess, sys\n{mark}\ndef test_it():\n    subprocess.run([sys.executable, '-c', '', "
    "'deepspeed.launcher.runner'])\n"
)


@pytest.mark.parametrize(
    ("argv", "launches"),
    [
        (("python", "-m", "deepspeed.launcher.runner", "--hostfile", "/dev/null"), True),
        (("/usr/bin/deepspeed", "train.py"), True),
        (("python", "-P", "-m", "so_tui", "supervise", "/runs/one", "--attempt", "1"), True),
        (("/venv/bin/so-tui", "run", "tiny", "--plain"), True),
        (("python", "-m", "so_tui", "plan", "tiny", "--probe"), True),
        (("python", "-m", "so_tui", "run", "tiny", "--dry-run"), False),
        (("python", "-m", "so_tui", "runs"), False),
        (("python", "-c", "import deepspeed"), False),
    ],
)
def test_a_launch_is_recognised_by_its_arguments(argv: tuple[str, ...], launches: bool) -> None:
    assert launches_ranks(argv) is launches


def inner_session(folder: Path, test: str) -> subprocess.CompletedProcess[str]:
    """Run one test file in a pytest of its own, with the plugin."""
    (folder / "test_inner.py").write_text(test)
    plugins = ("-p", "tests.support.tiers", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(folder), *plugins]
    own = {"PYTHONPATH": checkout_path()}
    return subprocess.run(
        [*command, str(folder)], env=own, cwd=folder, capture_output=True, text=True, check=False
    )


def test_an_unmarked_test_that_launches_ranks_fails(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    refused = inner_session(tmp_path, STARTS.format(mark=""))
    assert refused.returncode == pytest.ExitCode.TESTS_FAILED, refused.stdout
    assert "mark it `slow`" in refused.stdout
    accepted = inner_session(tmp_path, STARTS.format(mark="import pytest\n@pytest.mark.slow"))
    assert accepted.returncode == pytest.ExitCode.OK, accepted.stdout


def test_tests_have_folders_of_their_own(tmp_path: Path) -> None:
    folders = (default_runs_dir(), user_folder(), state_home())
    assert all(folder.is_relative_to(tmp_path) for folder in folders)
    assert tmp_path.is_relative_to(tempfile.gettempdir())
