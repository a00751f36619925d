"""Folders that a user may not open: a command goes on without one, or names it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.users import SharedMachine, User

_BAD_INPUT = 2


@pytest.fixture
def closed(machine: SharedMachine) -> Path:
    """The home folder of another user."""
    return machine.other.home


def json_of(user: User, *argv: str, **changes: str) -> tuple[object, str]:
    """Return what a command prints as JSON, and what it says on stderr."""
    done = user.so_tui(*argv, "--json", timeout_s=60.0, umask=0o022, **changes)
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout), done.stderr


def test_unreadable_presets_do_not_hide_the_others(machine: SharedMachine, closed: Path) -> None:
    found, _ = json_of(machine.owner, "presets", XDG_CONFIG_HOME=str(closed))
    assert isinstance(found, dict)
    assert "tiny" in [preset["name"] for preset in found["presets"]]
    (problem,) = found["problems"]
    assert str(closed) in problem


def test_doctor_checks_what_it_can(machine: SharedMachine, closed: Path) -> None:
    for argv in (
        ("doctor", "--runs-dir", str(closed / "runs")),
        ("doctor", "tiny", "--set", f"checkpoint.folder={closed}/runs"),
    ):
        found, _ = json_of(machine.owner, *argv)
        assert isinstance(found, dict)
        assert found["findings"]
    found, _ = json_of(machine.owner, "doctor", XDG_STATE_HOME=str(closed))
    assert isinstance(found, dict)
    assert found["findings"]


def test_a_plan_needs_no_model_folder(machine: SharedMachine, closed: Path) -> None:
    found, _ = json_of(
        machine.owner, "plan", "tiny", "--machine", "gh200-480", "--set", f"model.id={closed}/model"
    )
    assert isinstance(found, dict)
    assert found["plans"]


def is_refused(user: User, folder: Path, *argv: str) -> None:
    """Check that a command that cannot do without a folder names it."""
    done = user.so_tui(*argv)
    assert done.returncode == _BAD_INPUT, done.stderr
    assert str(folder) in done.stderr
    assert "Traceback" not in done.stderr


def test_what_a_command_cannot_do_without_is_named(machine: SharedMachine, closed: Path) -> None:
    is_refused(machine.owner, closed, "generate", str(closed / "model"), "--prompt", "x")
    is_refused(machine.owner, closed, "inspect", "--sysroot", str(closed / "root"))


@pytest.mark.slow
def test_runs_and_reports_name_closed_folders(machine: SharedMachine, closed: Path) -> None:
    is_refused(machine.owner, closed, "validate", "--out", str(closed / "report"), "--minutes", "1")
    run = f"run tiny --plain --force --runs-dir {closed / 'runs'}"
    is_refused(machine.owner, closed, *run.split())
