"""A run folder that would do harm if acted on: its command leaves a proof, it names processes."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from so_tui.launch.launch import prepare, write_launch
from so_tui.launch.supervisor.ending import request_stop
from so_tui.machine import inspect_machine
from so_tui.runs import RunDirectory, create_run, new_attempt, write_state
from so_tui.runs.records import Process, RunState, State
from so_tui.spec import find_preset


def write_hostile_run(
    folder: Path,
    proof: Path,
    *,
    state: State = "starting",
    processes: Sequence[Process] = (),
    supervisor: Process | None = None,
) -> RunDirectory:
    """Write a run whose first attempt would write its user's number into ``proof``, and which
    claims these processes, which a request to stop would have killed, and a supervisor.
    """
    launch = prepare(find_preset("tiny").spec, replace(inspect_machine(), gpus=()), force=True)
    run = create_run(launch.spec, folder)
    attempt = new_attempt(run)
    write_launch(run, attempt, replace(launch, argv=("/bin/sh", "-c", f"id -u >> {proof}")))
    claimed = RunState(
        name=run.name,
        state=state,
        attempt=attempt,
        host=socket.gethostname(),
        processes=tuple(processes),
        supervisor=supervisor,
    )
    write_state(run, claimed)
    request_stop(run, grace_s=0.0, reason="a trap")
    return run


def open_to_all(run: RunDirectory) -> None:
    """Let everybody write everything in a run."""
    for path in (run.path, *run.path.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o777 if path.is_dir() else 0o666)


def gone() -> Process:
    """Return a process that does not exist."""
    return Process(pid=os.getpid(), start_time=1, role="supervisor")
