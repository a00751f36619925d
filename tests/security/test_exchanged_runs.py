"""A run folder that another user exchanges, where both can rename folders, decides nothing."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from so_tui.runs import RunDirectory, read_state
from so_tui.runs.records import FINAL_STATES, OutcomeCode
from so_tui.spec import InputError
from tests.support.users import SharedMachine
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system

_PROJECT_GID = 60_999
MAKE_A_DECOY = """
import os, sys
from pathlib import Path
from msgspec.structs import replace
from so_tui.launch.launch import prepare, write_launch
from so_tui.machine import inspect_machine
from so_tui.runs import create_run, new_attempt
from so_tui.spec import find_preset, with_values
spec = with_values(find_preset("tiny").spec, {"train.steps": "3"})
run = create_run(spec, Path(sys.argv[1]))
write_launch(run, new_attempt(run), prepare(spec, replace(inspect_machine(), gpus=()), force=True))
for path in (run.path, *run.path.rglob("*")):
    path.chmod(0o777 if path.is_dir() else 0o666)
run.path.rename(sys.argv[2])
"""
EXCHANGE = """
import os, sys, time
from pathlib import Path
decoy, word = Path(sys.argv[1]), sys.argv[2].encode()
while True:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\\0")
        except OSError:
            continue
        if word in words and b"--run" in words:
            run = Path(os.fsdecode(words[words.index(b"--run") + 1]))
            if run.parent != decoy.parent:
                continue
            run.rename(run.with_name(run.name + ".moved"))
            decoy.rename(run)
            sys.exit(0)
    time.sleep(0.002)
"""
"""Waits for a process that names a run in the decoy's folder, and puts the decoy in its place."""


@dataclasses.dataclass(frozen=True)
class Project:
    """A project's folder, in which two of its members can rename whatever is there."""

    machine: SharedMachine
    folder: Path

    @property
    def decoy(self) -> Path:
        """The run of the other member."""
        return self.folder / "decoy"

    def moved(self) -> RunDirectory:
        (run,) = self.folder.glob("*.moved")
        return RunDirectory(run)


@pytest.fixture
def project(machine: SharedMachine) -> Project:
    folder = machine.scratch.parent / "project"
    folder.mkdir()
    os.chown(folder, 0, _PROJECT_GID)
    folder.chmod(0o2770)
    members = (
        dataclasses.replace(user, groups=(_PROJECT_GID,)) for user in (machine.owner, machine.other)
    )
    owner, other = members
    project = Project(SharedMachine(owner, other, machine.scratch), folder)
    made = other.python(MAKE_A_DECOY, str(machine.scratch / "decoys"), str(project.decoy))
    assert made.returncode == 0, made.stderr
    return project


def test_ranks_use_nothing_of_an_exchanged_folder(project: Project) -> None:
    """It is exchanged while the ranks are being started, in the seconds before they read."""
    owner, other = project.machine.owner, project.machine.other
    watching = (other.interpreter, "-c", EXCHANGE, str(project.decoy), "so_tui_trainer")
    with other.start(*watching) as attacker:
        folder = str(project.folder)
        given = ("--runs-dir", folder, "--set", "train.steps=500", "--detach")
        started = owner.so_tui("run", "tiny", *given, timeout_s=200)
        with suppress(subprocess.TimeoutExpired):
            attacker.wait(30)
        attacker.kill()
        assert attacker.stderr is not None
        assert attacker.wait() == 0, (started, attacker.stderr.read())
    run = project.moved()
    wait_until(lambda: read_state(run).state in FINAL_STATES, limit_s=120)
    decoy = RunDirectory(run.path.with_name(run.name.removesuffix(".moved")))
    assert not list(decoy.metrics_dir.iterdir()), "a rank has trained what the other user planned"
    assert not list(decoy.path.glob("samples.*"))
    state = read_state(run)
    assert (state.state, state.code) == ("failed", OutcomeCode.FOLDER_EXCHANGED)
    assert "another folder" in state.reason


@pytest.mark.parametrize("others", ["rank", "supervisor"])
def test_a_launch_that_nobody_prepared_is_not_started(project: Project, others: str) -> None:
    """A different launch of the same user, at the same path, is refused as well."""
    owner = project.machine.owner
    made = owner.python(MAKE_A_DECOY, str(owner.home / "runs"), str(owner.home / "one"))
    assert made.returncode == 0, made.stderr
    path = owner.home / "one"
    for part in (path, *path.rglob("*")):
        part.chmod(0o700 if part.is_dir() else 0o600)
    command = (
        ("-m", "so_tui_trainer", "--run", str(path), "--attempt", "1")
        if others == "rank"
        else ("-m", "so_tui", "supervise", str(path), "--attempt", "1")
    )
    for digest in ("", "0" * 64):
        done = owner.run(owner.interpreter, "-P", *command, SO_TUI_LAUNCH=digest, RANK="0")
        assert "is not the one that was prepared" in done.stderr
        assert done.returncode == (1 if others == "rank" else InputError.exit_code)
    assert sorted(found.name for found in (path / "attempts" / "001").iterdir()) == [
        "ds_config.json",
        "launch.json",
    ]
