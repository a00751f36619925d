"""A user cannot read closed folders, runs and hidden processes of others."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from so_tui.spec import InputError
from tests.support.users import SharedMachine, User

_BAD_INPUT = InputError.exit_code


def json_of(machine: SharedMachine, *argv: str, **changes: str) -> dict[str, Any]:
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
    "command", ["generate CLOSED/model --prompt x", "inspect --sysroot CLOSED/root"]
)
def test_what_a_command_cannot_do_without_is_named(machine: SharedMachine, command: str) -> None:
    closed = str(machine.other.home)
    done = machine.owner.so_tui(*command.replace("CLOSED", closed).split())
    assert done.returncode == _BAD_INPUT, done.stderr
    assert closed in done.stderr
    assert "Traceback" not in done.stderr


MAKE_A_RUN = """
import os, sys
from pathlib import Path
from msgspec.structs import replace
from so_tui.launch.launch import prepare, write_launch
from so_tui.machine import inspect_machine
from so_tui.runs import create_run, new_attempt
from so_tui.runs.records import PhaseRecord
from so_tui.spec import find_preset
from so_tui.trust.folders import umask_of
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


@pytest.mark.slow
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
        assert refused.returncode == _BAD_INPUT, refused.stderr


@pytest.mark.slow
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


HIDING = (
    'mount -t proc -o hidepid=2 proc /proc && exec setpriv --reuid "$0" --regid "$0" '
    '--clear-groups "$@"'
)
WITH_A_RUN = """
import os, sys, time
from pathlib import Path
from so_tui.runs import create_run
from so_tui.runs.liveness import identify, this_host
from so_tui.spec import find_preset
from tests.support.records import change_state
run, here = create_run(find_preset("tiny").spec, Path(sys.argv[1])), this_host()
change_state(run, state="training", attempt=1, host=here.name, boot_id=here.boot_id,
    pid_namespace=here.pid_namespace, supervisor=identify(os.getpid()), started=time.time())
os.chmod(run.path, 0o755)
os.chmod(run.path.parent, 0o755)
for path in run.path.iterdir():
    path.chmod(0o755 if path.is_dir() else 0o644)
print(run.name, flush=True)
time.sleep(600)
"""


def hidden(user: User, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a user in a mount namespace whose /proc hides processes of others."""
    unshared = ["unshare", "--mount", "--propagation", "private", "bash", "-c"]
    return subprocess.run(
        [*unshared, HIDING, str(user.uid), *argv],
        capture_output=True,
        text=True,
        timeout=60,
        env=user.environment(),
        cwd="/",
        check=False,
    )


def hidden_so_tui(user: User, *arguments: str) -> subprocess.CompletedProcess[str]:
    return hidden(user, user.interpreter, "-P", "-m", "so_tui", *arguments)


@pytest.fixture
def hiding(machine: SharedMachine) -> None:
    """Skip where a process of another user cannot be hidden: no privilege, or no hidepid."""
    shown = hidden(machine.other, "test", "-e", f"/proc/{os.getpid()}/stat")
    if shown.returncode != 1 or shown.stderr:
        pytest.skip(f"/proc cannot be mounted with hidepid here ({shown.stderr.strip()})")


def state_of(user: User, folder: Path) -> object:
    (run,) = json.loads(hidden_so_tui(user, "runs", "--json", "--runs-dir", str(folder)).stdout)[
        "runs"
    ]
    return run["state"]


@pytest.mark.usefixtures("hiding")
def test_a_run_with_hidden_processes_is_not_lost(machine: SharedMachine) -> None:
    owner, folder = machine.owner, machine.scratch / "runs"
    with owner.start(owner.interpreter, "-P", "-c", WITH_A_RUN, str(folder)) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline()
            folder.chmod(0o755)
            assert state_of(machine.other, folder) == state_of(owner, folder) == "training"
        finally:
            process.kill()
    assert state_of(owner, folder) == "lost"


@pytest.mark.usefixtures("hiding")
def test_commands_work_where_processes_are_hidden(machine: SharedMachine) -> None:
    for command in ("inspect --json", "doctor", "plan tiny", "runs"):
        done = hidden_so_tui(machine.other, *command.split())
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode in (0, 1), (command, done.stderr)
        assert done.stdout, command


WRITABLE = """
import sys
from pathlib import Path
from so_tui.launch.checks import writable
from so_tui.spec import InputError
for path in sys.argv[1:]:
    try:
        print("allowed", writable(Path(path), "--to"))
    except InputError as error:
        print(*(problem.code for problem in error.problems), error.problems[0].remedy)
"""


@pytest.mark.slow
def test_a_link_of_others_to_a_folder_of_ones_own_is_not_written_through(
    machine: SharedMachine,
) -> None:
    """The link's owner would choose where runs, checkpoints and exports go. Links of this user, and
    links of others to their own folders, as projects have them, are followed.
    """
    mine, theirs = machine.owner.home / "mine", machine.scratch / "theirs"
    mine.mkdir()
    theirs.mkdir()
    led, project, own = (machine.scratch / name for name in ("led", "project", "own"))
    led.symlink_to(mine)
    project.symlink_to(theirs)
    own.symlink_to(mine)
    for path, user in ((theirs, machine.other), (mine, machine.owner), (own, machine.owner)):
        user.give(path)
    for link in (led, project):
        os.lchown(link, machine.other.uid, machine.other.uid)
    theirs.chmod(0o777)
    done = machine.owner.python(WRITABLE, *map(str, (led, led / "new" / "er", project, own)))
    said = done.stdout.splitlines()
    remedy = f"link-of-others Name the folder itself: {mine}."
    assert said == [remedy, remedy, f"allowed {project}", f"allowed {own}"], done.stderr
    for option in (f"--runs-dir={led}", f"--set=checkpoint.folder={led}/new"):
        run = machine.owner.so_tui("run", "tiny", "--detach", option)
        assert "another user's link" in run.stderr, run
        assert run.returncode == 2
    assert not list(mine.iterdir())
