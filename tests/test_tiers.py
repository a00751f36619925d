"""The tiers of the tests themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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


def inner_session(folder: Path, test: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run one test file in a pytest of its own, with the plugin."""
    (folder / "test_inner.py").write_text(test)
    plugins = ("-p", "tests.support.tiers", "-p", "no:cacheprovider")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--rootdir",
        str(folder),
        *plugins,
        *options,
        str(folder),
    ]
    return subprocess.run(
        command,
        env={"PYTHONPATH": checkout_path()},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_unmarked_test_that_launches_ranks_fails(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    refused = inner_session(tmp_path, STARTS.format(mark=""))
    assert refused.returncode == pytest.ExitCode.TESTS_FAILED, refused.stdout
    assert "mark it `slow`" in refused.stdout
    accepted = inner_session(tmp_path, STARTS.format(mark="import pytest\n@pytest.mark.slow"))
    assert accepted.returncode == pytest.ExitCode.OK, accepted.stdout


def test_session_fails_beyond_its_cpu_limit(tmp_path: Path) -> None:
    burns = (
        "import time\ndef test_it():\n    while time.process_time() < {seconds}:\n        pass\n"
    )
    within = inner_session(tmp_path, burns.format(seconds=0), "-n1", "--cpu-limit=60")
    assert within.returncode == pytest.ExitCode.OK, within.stdout
    beyond = inner_session(tmp_path, burns.format(seconds=4), "-n1", "--cpu-limit=4")
    assert beyond.returncode == pytest.ExitCode.TESTS_FAILED, beyond.stdout
    assert "1 passed" in beyond.stdout
    assert "limit 4 s" in beyond.stdout
