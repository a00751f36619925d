"""Who can read a run on a shared machine: its owner, or the owner's group if told so."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from so_tui.spec import InputError
from tests.support.users import SharedMachine, User

MAKE_A_RUN = """
import os, sys
from pathlib import Path
import msgspec
from so_tui.launch.launch import prepare
from so_tui.launch.launch import write_launch
from so_tui.machine import inspect_machine
from so_tui.runs import MetricsWriter, create_run, new_attempt, write_state
from so_tui.runs.records import PhaseRecord, RunState
from so_tui.spec import find_preset
from so_tui.trust.files import umask_of
launch = prepare(find_preset("tiny").spec, msgspec.structs.replace(inspect_machine(), gpus=()), force=True)
run = create_run(launch.spec, Path(sys.argv[1]))
attempt = new_attempt(run)
write_launch(run, attempt, launch)
os.umask(umask_of(run.path))
writer = MetricsWriter(run, attempt)
writer.append(PhaseRecord(attempt=attempt, time=1.0, phase="training"))
writer.close()
run.log_path(attempt, "here").write_text("a line of the log\\n")
write_state(run, RunState(name=run.name, state="stopped", attempt=attempt, host="here", started=1.0))
print(run.path)
"""  # noqa: E501


def made(owner: User, folder: Path, share: str = "") -> Path:
    """Return a run that a user with an open umask has made."""
    done = owner.run(
        owner.interpreter, "-P", "-c", MAKE_A_RUN, str(folder), umask=0o002, SO_TUI_SHARE=share
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def in_group_of(other: User, owner: User) -> User:
    return dataclasses.replace(other, groups=(owner.uid,))


def modes(run: Path) -> set[tuple[str, str]]:
    return {
        ("folder" if path.is_dir() else "file", oct(path.stat().st_mode & 0o777))
        for path in (run, *run.rglob("*"))
    }


@pytest.mark.slow
def test_another_user_reads_nothing_of_a_run_by_default(machine: SharedMachine) -> None:
    run = made(machine.owner, machine.scratch / "runs")
    assert modes(run) == {("folder", "0o700"), ("file", "0o600")}
    recorded = machine.owner.home / ".local/state/so-tui/run-folders"
    assert oct(recorded.stat().st_mode & 0o777) == "0o600"
    for other in (machine.other, in_group_of(machine.other, machine.owner)):
        assert other.run("ls", str(run)).returncode != 0
        listed = other.so_tui("runs", "--runs-dir", str(run.parent))
        assert (listed.returncode, run.name in listed.stdout, "Traceback" in listed.stderr) == (
            0,
            False,
            False,
        )
        refused = other.so_tui("logs", str(run))
        assert refused.returncode == InputError.exit_code, refused.stderr


@pytest.mark.slow
def test_the_group_reads_a_shared_run_and_changes_nothing(machine: SharedMachine) -> None:
    run = made(machine.owner, machine.scratch / "runs", share="group")
    assert modes(run) == {("folder", "0o750"), ("file", "0o640")}
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    member = in_group_of(machine.other, machine.owner)
    assert run.name in member.so_tui("runs", "--runs-dir", str(run.parent)).stdout
    assert "a line of the log" in member.so_tui("logs", str(run)).stdout
    for arguments in (("watch", str(run), "--plain"), ("stop", str(run))):
        assert "Traceback" not in member.so_tui(*arguments).stderr
    assert member.run("touch", str(run / "x")).returncode != 0
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    assert machine.other.run("ls", str(run)).returncode != 0
