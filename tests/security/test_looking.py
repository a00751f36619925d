"""Looking at a run only reads: nothing of it is executed, nobody's process is signalled."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from so_tui.launch.launch import prepare, write_launch
from so_tui.launch.supervisor.ending import request_stop
from so_tui.machine import inspect_machine
from so_tui.runs import RunDirectory, create_run, new_attempt, read_state
from so_tui.runs.directory import run_id
from so_tui.runs.liveness import identify
from so_tui.runs.records import Process, State
from so_tui.spec import find_preset
from tests.support.records import change_state
from tests.support.users import SharedMachine, User
from tests.support.waiting import LIMIT_S, wait_until

pytestmark = pytest.mark.system

LOOK_ON_THE_SCREEN = """
import sys
from pathlib import Path
from so_tui.runs import RunDirectory, delete_run
from so_tui.spec import SoTuiError
from so_tui.ui.charts.series import Wanted
from so_tui.ui.dashboard.follow import RunFollower
from so_tui.ui.run_rows import RunLister
folder, run = Path(sys.argv[1]), RunDirectory(Path(sys.argv[2]))
lister, follower = RunLister(folder), RunFollower(run)
for _ in range(3):
    lister.rows()
    follower.poll(Wanted(("loss",), ("loss",)))
try:
    delete_run(run)
except SoTuiError as error:
    print(error)
"""
SLEEPER = "import time; time.sleep(600)"
GONE = Process(pid=os.getpid(), start_time=1, role="supervisor")
"""A process that does not exist."""


def write_hostile_run(folder: Path, proof: Path, **claims: Any) -> RunDirectory:
    """Write a run that would write its user's number into ``proof`` and end processes."""
    launch = prepare(find_preset("tiny").spec, replace(inspect_machine(), gpus=()), force=True)
    run = create_run(launch.spec, folder)
    attempt = new_attempt(run)
    write_launch(run, attempt, replace(launch, argv=("/bin/sh", "-c", f"id -u >> {proof}")))
    change_state(run, attempt=attempt, host=socket.gethostname(), **claims)
    request_stop(run, grace_s=0.0, reason="a trap")
    return run


@dataclass(frozen=True)
class Scene:
    """A hostile run on the shared file system, and a process of the person who looks at it."""

    machine: SharedMachine
    proof: Path
    bystander: subprocess.Popen[str]

    @property
    def viewer(self) -> User:
        return self.machine.other

    @property
    def known(self) -> Process:
        """The bystander, as a state file may name it."""
        found = identify(self.bystander.pid, "rank")
        assert found is not None
        return replace(found, rank=0)

    def hostile(self, state: State = "starting", *, supervised: bool = False) -> RunDirectory:
        """Return a run of the other user, which the viewer may even write to."""
        folder = self.machine.scratch / "runs"
        claims = {"processes": (self.known,), "supervisor": self.known if supervised else GONE}
        run = write_hostile_run(folder, self.proof, state=state, **claims)
        for path in (run.path, *run.path.rglob("*")):
            if not path.is_symlink():
                path.chmod(0o777 if path.is_dir() else 0o666)
        self.machine.owner.give(folder)
        folder.chmod(0o755)
        return run

    def own(self, **claims: Any) -> RunDirectory:
        """Return a hostile run in the viewer's own folder."""
        folder = self.viewer.home / "runs"
        claims = {"state": "training", "supervisor": GONE} | claims
        run = write_hostile_run(folder, self.proof, **claims)
        self.viewer.give(folder)
        return run

    def nothing_happened(self) -> None:
        """Fail if anything was executed, a supervisor started or the bystander ended."""
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            assert not supervisors_of(self.viewer), "a supervisor was started"
            assert not self.proof.exists(), "the run's command was executed"
            assert self.bystander.poll() is None, "a process of the viewer was ended"
            time.sleep(0.2)


@pytest.fixture
def scene(machine: SharedMachine) -> Iterator[Scene]:
    """The scene; everything the users leave is removed."""
    viewer = machine.other
    bystander = viewer.start(viewer.interpreter, "-c", SLEEPER)
    yield Scene(machine, machine.scratch / "proof", bystander)
    bystander.kill()
    bystander.communicate()


@contextmanager
def marked(user: User, run: RunDirectory, known: str) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that carries the marker of a run."""
    marker = {"SO_TUI_RUN": str(run.path), "SO_TUI_RUN_ID": known, "SO_TUI_ATTEMPT": "1"}
    with user.start(user.interpreter, "-c", SLEEPER, umask=0o022, **marker) as member:
        try:
            yield member
        finally:
            member.kill()


def supervisors_of(user: User) -> list[Path]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if folder.stat().st_uid == user.uid and b"supervise" in words:
                found.append(folder)
    return found


def look_in_every_way(user: User, run: RunDirectory) -> dict[str, subprocess.CompletedProcess[str]]:
    """Run every command that names a run, and what the screen calls."""
    folder, path = str(run.path.parent), str(run.path)
    began = time.monotonic()
    with user.start(user.interpreter, "-P", "-m", "so_tui", "watch", path, "--plain") as watching:
        done = {
            "runs": user.so_tui("runs", "--runs-dir", folder),
            "runs --json": user.so_tui("runs", "--json", "--runs-dir", folder),
            "logs": user.so_tui("logs", path),
            "export": user.so_tui("export", path, "--to", str(user.home / "export")),
            "stop": user.so_tui("stop", path, "--grace", "1"),
            "resume": user.so_tui("resume", path, "--plain", "--force"),
            "screen": user.python(LOOK_ON_THE_SCREEN, folder, path),
        }
        try:
            # It looks after the supervisor every 5 s.
            watching.wait(timeout=max(0.1, began + 7 - time.monotonic()))
        except subprocess.TimeoutExpired:
            watching.send_signal(signal.SIGINT)
            watching.wait(timeout=LIMIT_S)
    return done


@pytest.mark.parametrize(
    ("state", "supervised"), [("starting", False), ("training", False), ("training", True)]
)
def test_looking_at_anothers_run_is_harmless(scene: Scene, state: State, supervised: bool) -> None:
    run = scene.hostile(state, supervised=supervised)
    done = look_in_every_way(scene.viewer, run)
    scene.nothing_happened()
    assert done["runs"].returncode == 0
    assert (done["stop"].returncode, done["resume"].returncode) == (3, 3)
    assert "not your run" in done["stop"].stderr
    assert "Traceback" not in "".join(result.stderr for result in done.values())
    assert run.path.exists()


def test_a_request_that_cannot_be_written_is_an_error(scene: Scene) -> None:
    run = scene.own(supervisor=scene.known)
    run.control_dir.chmod(0o500)
    done = scene.viewer.so_tui("stop", str(run.path), "--grace", "1")
    assert done.returncode == 2
    assert "cannot be written: Permission denied" in done.stderr
    assert "Traceback" not in done.stderr
    scene.nothing_happened()


def test_a_copied_run_is_data(scene: Scene) -> None:
    """As ``cp -r`` or ``tar`` copy it."""
    viewer, folder = scene.viewer, scene.viewer.home / "runs"
    copy = shutil.copytree(scene.hostile().path, folder / "copied")
    for path in (copy, *copy.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    viewer.give(folder)
    for command in (("runs", "--runs-dir", str(folder)), ("stop", str(copy), "--grace", "0")):
        with viewer.start(viewer.interpreter, "-P", "-m", "so_tui", *command) as asked:
            try:
                asked.wait(timeout=4)
            except subprocess.TimeoutExpired:  # it waits for the end of the living process
                asked.kill()
    assert viewer.so_tui("supervise", str(copy), "--attempt", "1").returncode == 2
    scene.nothing_happened()


@pytest.mark.parametrize(
    "part",
    [
        *("", "state.json", "attempts", "attempts/001", "attempts/001/launch.json"),
        *("control", "metrics", "run.json"),
    ],
)
@pytest.mark.parametrize("trick", ["another-users", "link", "writable"])
def test_a_run_that_others_control_is_not_acted_upon(scene: Scene, part: str, trick: str) -> None:
    """In the viewer's own folder, with a marked process: only this part stands in the way."""
    viewer, run = scene.viewer, scene.own()
    known = run_id(run)
    target = run.path / part
    match trick:
        case "another-users":
            scene.machine.owner.give(target)
        case "link":
            target.symlink_to(target.rename(viewer.home / "moved"))
        case _:
            target.chmod(target.stat().st_mode | 0o002)
    with marked(viewer, run, known) as member:
        listed = viewer.so_tui("runs", "--runs-dir", str(run.path.parent))
        assert (listed.returncode, listed.stderr) == (0, "")
        supervise = viewer.so_tui("supervise", str(run.path), "--attempt", "1")
        assert supervise.returncode in (2, 3), supervise.stderr
        assert "Traceback" not in supervise.stderr
        assert not supervisors_of(viewer)
        assert member.poll() is None
    assert not scene.proof.exists()


def test_only_marked_processes_of_a_run_are_stopped(scene: Scene) -> None:
    """The marker, and not the state file, decides which processes are stopped."""
    run = scene.own(processes=(scene.known,))
    with marked(scene.viewer, run, run_id(run)) as member:
        listed = scene.viewer.so_tui("runs", "--runs-dir", str(run.path.parent))
        assert listed.returncode == 0
        assert member.wait(timeout=LIMIT_S) == -signal.SIGTERM, "the request to stop is overdue"
    wait_until(lambda: read_state(run).state != "training")
    assert read_state(run).code == "stop-overdue"
    assert scene.bystander.poll() is None
    assert not scene.proof.exists()


def test_a_newer_run_of_others_is_not_latest(machine: SharedMachine) -> None:
    """Otherwise a user who can make a folder next to a run would choose the run that a command
    without a name takes.
    """
    make = "import sys; from pathlib import Path; from tests.support.launching import tiny; "
    make += "from so_tui.runs import create_run; print(create_run(tiny(), Path(sys.argv[1])).path)"
    find = "import sys; from pathlib import Path; from so_tui.runs import find_run; "
    find += "print(find_run('latest', Path(sys.argv[1])).path)"
    runs = machine.scratch / "runs"
    runs.mkdir()
    runs.chmod(0o1777)
    mine, theirs = (
        user.python(make, str(runs)).stdout.strip() for user in (machine.owner, machine.other)
    )
    for path in (Path(theirs), Path(theirs, "spec.json")):
        path.chmod(0o755)
        os.utime(path, (4e9, 4e9))
    assert machine.owner.python(find, str(runs)).stdout.strip() == mine
    shutil.rmtree(mine)
    assert machine.owner.python(find, str(runs)).stdout.strip() == theirs
