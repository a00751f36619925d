"""Who can read a run on a shared machine: its owner, or the owner's group if told so."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from so_tui.spec import InputError
from tests.support.users import SharedMachine, User

pytestmark = pytest.mark.slow
MAKE_A_RUN = """
import os, sys
from pathlib import Path
from msgspec.structs import replace
from so_tui.launch.launch import prepare, write_launch
from so_tui.machine import inspect_machine
from so_tui.runs import create_run, new_attempt
from so_tui.runs.records import PhaseRecord
from so_tui.spec import find_preset
from so_tui.trust.files import umask_of
from tests.support.records import append_records, change_state
launch = prepare(find_preset("tiny").spec, replace(inspect_machine(), gpus=()), force=True)
run = create_run(launch.spec, Path(sys.argv[1]))
attempt = new_attempt(run)
write_launch(run, attempt, launch)
os.umask(umask_of(run.path))
append_records(run, PhaseRecord(attempt=attempt, time=1.0, phase="training"))
run.log_path(attempt, "here").write_text("a line of the log\\n")
change_state(run, state="stopped", attempt=attempt, host="here", started=1.0)
print(run.path)
"""


def made(machine: SharedMachine, share: str = "") -> Path:
    """Return a run that a user with an open umask has made."""
    owner, folder = machine.owner, str(machine.scratch / "runs")
    code = (owner.interpreter, "-P", "-c", MAKE_A_RUN, folder)
    done = owner.run(*code, umask=0o002, SO_TUI_SHARE=share)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def in_the_owners_group(machine: SharedMachine) -> User:
    return dataclasses.replace(machine.other, groups=(machine.owner.uid,))


def modes(run: Path) -> set[tuple[bool, str]]:
    found = (run, *run.rglob("*"))
    return {(path.is_dir(), oct(path.stat().st_mode & 0o777)) for path in found}


def test_another_user_reads_nothing_of_a_run_by_default(machine: SharedMachine) -> None:
    run = made(machine)
    assert modes(run) == {(True, "0o700"), (False, "0o600")}
    assert modes(machine.owner.home / ".local/state/so-tui/run-folders") == {(False, "0o600")}
    for other in (machine.other, in_the_owners_group(machine)):
        assert other.run("ls", str(run)).returncode != 0
        listed = other.so_tui("runs", "--runs-dir", str(run.parent))
        assert (listed.returncode, run.name in listed.stdout) == (0, False)
        assert "Traceback" not in listed.stderr
        refused = other.so_tui("logs", str(run))
        assert refused.returncode == InputError.exit_code, refused.stderr


def test_the_group_reads_a_shared_run_and_changes_nothing(machine: SharedMachine) -> None:
    run = made(machine, share="group")
    assert modes(run) == {(True, "0o750"), (False, "0o640")}
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    member = in_the_owners_group(machine)
    assert run.name in member.so_tui("runs", "--runs-dir", str(run.parent)).stdout
    assert "a line of the log" in member.so_tui("logs", str(run)).stdout
    for arguments in (("watch", str(run), "--plain"), ("stop", str(run))):
        assert "Traceback" not in member.so_tui(*arguments).stderr
    assert member.run("touch", str(run / "x")).returncode != 0
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    assert machine.other.run("ls", str(run)).returncode != 0
