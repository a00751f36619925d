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
from so_tui.machine import inspect_machine
from so_tui.runs import create_run, find_run, state_with_truth, write_state
from so_tui.runs.liveness import this_host
from so_tui.runs.liveness import identify, sighting
from so_tui.runs.records import RunState
from so_tui.spec import find_preset
run = create_run(find_preset("tiny").spec, Path(sys.argv[1]))
here, own = this_host(), identify(os.getpid())
state = RunState(name=run.name, state="training", attempt=1, host=here.name, boot_id=here.boot_id, pid_namespace=here.pid_namespace,
    supervisor=own, started=time.time())
write_state(run, state)
os.chmod(run.path, 0o755)
for path in run.path.iterdir():
    path.chmod(0o755 if path.is_dir() else 0o644)
print(run.name, flush=True)
sys.stdin.read()
"""  # noqa: E501


def hidden(user: User, *argv: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run a command as a user in a mount namespace whose /proc hides processes of others."""
    unshared = ["unshare", "--mount", "--propagation", "private", "bash", "-c"]
    command = [*unshared, HIDING, str(user.uid), *argv]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=user.environment(),
        cwd="/",
        check=False,
    )


@pytest.fixture(autouse=True)
def hiding(machine: SharedMachine) -> None:
    """Skip where a process of another user cannot be hidden: no privilege, or no hidepid."""
    shown = hidden(machine.other, "test", "-e", f"/proc/{os.getpid()}/stat")
    if shown.returncode != 1 or shown.stderr:
        pytest.skip(f"/proc cannot be mounted with hidepid here ({shown.stderr.strip()})")


def listed(user: User, folder: Path) -> dict[str, object]:
    done = hidden(
        user, user.interpreter, "-P", "-m", "so_tui", "runs", "--json", "--runs-dir", str(folder)
    )
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(done.stdout)["runs"]
    assert isinstance(run, dict)
    return run


def test_a_run_with_hidden_processes_is_not_lost(machine: SharedMachine) -> None:
    owner, folder = machine.owner, machine.scratch / "runs"
    with subprocess.Popen(
        [owner.interpreter, "-P", "-c", WITH_A_RUN, str(folder)],
        user=owner.uid, group=owner.uid, extra_groups=(), umask=0o022, env=owner.environment(), cwd="/",  # noqa: E501
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline()
        folder.chmod(0o755)
        assert listed(machine.other, folder)["state"] == "training"
        assert listed(owner, folder)["state"] == "training"
        process.kill()
    assert listed(owner, folder)["state"] == "lost"


def test_commands_work_where_processes_are_hidden(machine: SharedMachine) -> None:
    user = machine.other
    for arguments in (["inspect", "--json"], ["doctor"], ["plan", "tiny"], ["runs"]):
        done = hidden(user, user.interpreter, "-P", "-m", "so_tui", *arguments)
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode in (0, 1), (arguments, done.stderr)
        assert done.stdout, arguments
