"""A host whose /proc shows each user only processes of their own (mount option hidepid)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.users import SharedMachine, User

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


@pytest.fixture(autouse=True)
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


def test_a_run_with_hidden_processes_is_not_lost(machine: SharedMachine) -> None:
    owner, folder = machine.owner, machine.scratch / "runs"
    with owner.start(owner.interpreter, "-P", "-c", WITH_A_RUN, str(folder)) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        folder.chmod(0o755)
        assert state_of(machine.other, folder) == state_of(owner, folder) == "training"
        process.kill()
    assert state_of(owner, folder) == "lost"


def test_commands_work_where_processes_are_hidden(machine: SharedMachine) -> None:
    for command in ("inspect --json", "doctor", "plan tiny", "runs"):
        done = hidden_so_tui(machine.other, *command.split())
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode in (0, 1), (command, done.stderr)
        assert done.stdout, command
