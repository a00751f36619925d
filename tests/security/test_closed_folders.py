"""Folders that a user may not open: a command goes on without one, or names it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.users import SharedMachine

_BAD_INPUT = 2


def json_of(machine: SharedMachine, *argv: str, **changes: str) -> dict[str, Any]:
    """Return what a command of the owner prints as JSON."""
    done = machine.owner.so_tui(*argv, "--json", timeout_s=60.0, umask=0o022, **changes)
    assert "Traceback" not in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_commands_do_without_folders_that_are_closed(machine: SharedMachine) -> None:
    closed = str(machine.other.home)
    found = json_of(machine, "presets", XDG_CONFIG_HOME=closed)
    assert "tiny" in [preset["name"] for preset in found["presets"]]
    (problem,) = found["problems"]
    assert closed in problem
    for argv in (
        ("doctor", "--runs-dir", f"{closed}/runs"),
        ("doctor", "tiny", "--set", f"checkpoint.folder={closed}/runs"),
    ):
        assert json_of(machine, *argv)["findings"]
    assert json_of(machine, "doctor", XDG_STATE_HOME=closed)["findings"]
    plan = ("plan", "tiny", "--machine", "gh200-480", "--set", f"model.id={closed}/model")
    assert json_of(machine, *plan)["plans"]


@pytest.mark.parametrize(
    "command",
    [
        "generate CLOSED/model --prompt x",
        "inspect --sysroot CLOSED/root",
        *(
            pytest.param(command, marks=pytest.mark.slow)
            for command in (
                "validate --out CLOSED/report --minutes 1",
                "run tiny --plain --force --runs-dir CLOSED/runs",
            )
        ),
    ],
)
def test_what_a_command_cannot_do_without_is_named(machine: SharedMachine, command: str) -> None:
    closed = str(machine.other.home)
    done = machine.owner.so_tui(*command.replace("CLOSED", closed).split())
    assert done.returncode == _BAD_INPUT, done.stderr
    assert closed in done.stderr
    assert "Traceback" not in done.stderr
