"""The tiers and the time budgets of the tests themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.budgets import Budgets, FileTime, read_budgets
from tests.support.python_path import ROOT, checkout_path
from tests.support.tiers import launches_ranks

SLEEPS = "import time\ndef test_it():\n    time.sleep({seconds})\n"
STARTS = "import subprocess, sys\n{mark}\ndef test_it():\n    subprocess.run([sys.executable, '-c', '', 'deepspeed.launcher.runner'])\n"


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
    """Run one test file in a pytest of its own, with both plugins."""
    (folder / "test_inner.py").write_text(test)
    plugins = ("-p", "tests.support.budgets", "-p", "tests.support.tiers", "-p", "no:cacheprovider")
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


def test_budgets_fail_a_session_only_where_they_are_enforced(tmp_path: Path) -> None:
    slow = SLEEPS.format(seconds=1.0)
    patched = "import tests.support.budgets as b\nb.read_budgets = lambda: b.Budgets(default={file}, files={{}}, tiers={{'all': {tier}}})\n"
    (tmp_path / "conftest.py").write_text(patched.format(file=0.01, tier=100))
    reported = inner_session(tmp_path, slow, "--budgets=report")
    assert reported.returncode == pytest.ExitCode.OK, reported.stdout
    assert "OVER BUDGET" in reported.stdout
    enforced = inner_session(tmp_path, slow, "--budgets=enforce")
    assert enforced.returncode == pytest.ExitCode.TESTS_FAILED, enforced.stdout
    (tmp_path / "conftest.py").write_text(patched.format(file=100, tier=0.01))
    assert inner_session(tmp_path, slow, "--budgets=enforce").returncode == pytest.ExitCode.OK
    tier = inner_session(tmp_path, slow, "--budgets=enforce", "--tier=all")
    assert tier.returncode == pytest.ExitCode.TESTS_FAILED, tier.stdout


def test_a_file_is_held_to_its_own_budget_and_others_to_the_default() -> None:
    budgets = Budgets(default=5.0, files={"tests/slow.py": 50.0}, tiers={})
    times = {
        "tests/slow.py": FileTime(60.0, 49.0, 3),
        "tests/a.py": FileTime(7.0, 6.0, 1),
        "tests/b.py": FileTime(9.0, 8.0, 1),
    }
    assert list(budgets.exceeded(times)) == ["tests/b.py", "tests/a.py"]


def test_every_file_with_a_budget_exists() -> None:
    budgets = read_budgets()
    assert budgets.default > 0
    assert [file for file in budgets.files if not (ROOT / file).is_file()] == []
