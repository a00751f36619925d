"""Starting, resuming, stopping a run, and making sure that someone watches it. What the commands and the screen call."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from so_tui.launch.checks import quick_checks
from so_tui.launch.executors.local import Place, Started, ThisMachine
from so_tui.launch.preparation import Launch, prepare, visible_machine
from so_tui.launch.sources import with_absolute_paths
from so_tui.launch.stopping import DEFAULT_GRACE_S, request_stop
from so_tui.machine.types import Machine
from so_tui.runs import control
from so_tui.runs.directory import RunDirectory, new_attempt
from so_tui.runs.listing import create_run
from so_tui.runs.liveness import state_with_truth, supervised
from so_tui.runs.records import FINAL_STATES, RunState
from so_tui.runs.state import read_spec, read_state, write_spec
from so_tui.spec import InputError, Problem, RunSpec, SoTuiError, with_values
from so_tui.spec.files import write_atomic

_KEPT_FOR_LIFE = ("name", "model.id", "model.revision", "model.weights", "model.tokenizer", "checkpoint.folder")
_READY_S = 30.0
_POLL_S = 0.05
_AFTER_KILL_S = 60.0
"""How long after the grace time a stop still waits for the last word: the kill itself, and giving back much memory."""


def start(
    spec: RunSpec, machine: Machine, *, runs_dir: Path | str | None = None, force: bool = False, place: Place | None = None
) -> RunDirectory:
    """Start a run on this machine and return when its supervisor has taken it over. Training goes on by itself from there.

    Raises InputError or Refused before anything is written, SoTuiError when the supervisor did not start; then nothing is left behind.
    """
    spec = with_absolute_paths(spec)
    machine = visible_machine(machine, os.environ)
    _refuse_other_host(machine)
    launch = prepare(spec, machine, force=force)
    quick_checks(launch.plan, machine, force=force, runs_dir=runs_dir)
    run = create_run(launch.plan.spec, Path(runs_dir) if runs_dir else None)
    try:
        _launch_attempt(run, new_attempt(run), launch, machine, place or ThisMachine())
    except BaseException:
        if _untouched(run):
            shutil.rmtree(run.path, ignore_errors=True)
        raise
    return run


def resume(
    run: RunDirectory, machine: Machine, *, values: Mapping[str, str] | None = None, force: bool = False, place: Place | None = None
) -> int:
    """Start another attempt, which goes on from the last checkpoint. Returns its number.

    ``values``: dotted keys to change from now on (``gpus``, ``offload.mode``, ...); the states are shared out anew to what they ask for.
    Raises InputError when the run still lives, has nothing left to train, or a key is one that a run keeps for life; else as ``start``.
    """
    before = state_with_truth(run)
    if before.state not in FINAL_STATES:
        remedy = f"Watch it with `so-tui watch {run.name}`, or stop it first"
        raise InputError([Problem(field="run", value=run.name, message=f"still runs ({before.state})", remedy=remedy)])
    spec = _changed(read_spec(run), values or {})
    if before.state == "finished" and not _lengthens(values or {}, before.total_steps):
        remedy = f"Train longer with `so-tui resume {run.name} --set train.steps=N`, or use what it trained: `so-tui export {run.name}`"
        raise InputError(
            [Problem(field="run", value=run.name, message=f"has finished all of its {before.total_steps} steps", remedy=remedy)]
        )
    _refuse_passed_length(values or {}, before)
    machine = visible_machine(machine, os.environ)
    _refuse_other_host(machine)
    launch = prepare(spec, machine, force=force or before.forced)
    quick_checks(launch.plan, machine, force=force or before.forced, resuming=True, runs_dir=run.path)
    for action in control.ACTIONS:
        control.clear(run, action)
    attempt = new_attempt(run)
    try:
        _launch_attempt(run, attempt, launch, machine, place or ThisMachine())
    finally:
        if read_state(run).attempt != attempt:
            shutil.rmtree(run.attempt_dir(attempt), ignore_errors=True)
        elif values:  # not before: of two resumes at once, the settings of the one that trains count
            write_spec(run, launch.plan.spec)
    return attempt


def stop(run: RunDirectory, *, grace_s: float = DEFAULT_GRACE_S) -> RunState:
    """Ask the run to stop with a checkpoint, and wait for its end. After ``grace_s`` seconds the supervisor kills it.

    Returns the state at the end, or as it is when even that has not come about in time. Interrupting the wait leaves the request standing.
    """
    state = state_with_truth(run)
    if state.state in FINAL_STATES:
        return state
    request_stop(run, grace_s=grace_s)
    ensure_supervised(run)
    deadline = time.monotonic() + grace_s + _AFTER_KILL_S
    while (state := state_with_truth(run)).state not in FINAL_STATES and time.monotonic() < deadline:
        time.sleep(4 * _POLL_S)
    return state


def ensure_supervised(run: RunDirectory) -> bool:
    """Start a replacement when the run's supervisor has died on this host before the run ended. Returns whether it did.

    Several callers may do so at once: the replacements settle it by a lock, and one stays.
    """
    with contextlib.suppress(InputError):  # no readable state: nothing to take over
        state = read_state(run)
        if state.state in FINAL_STATES or state.host != socket.gethostname() or supervised(state):
            return False
        with contextlib.suppress(OSError):  # a run of someone else: looking at it is all we may do
            ThisMachine().start(_supervisor_argv(run, state.attempt), os.environ, _supervisor_log(run, state.attempt))
            return True
    return False


def _lengthens(values: Mapping[str, str], steps: int) -> bool:
    """Whether these settings may leave something to train after ``steps``; how many steps epochs or tokens are only the data says."""
    given = values.get("train.steps", "")
    return (given.isdecimal() and int(given) > steps) or "train.epochs" in values or "train.tokens" in values


def _refuse_passed_length(values: Mapping[str, str], before: RunState) -> None:
    given = values.get("train.steps", "")
    if before.saved_step and given.isdecimal() and 0 < int(given) <= before.saved_step:
        message = f"it goes on from step {before.saved_step}, and would have nothing to train"
        remedy = f"Give more steps, or use what it trained: `so-tui export {before.name}`"
        raise InputError([Problem(field="train.steps", value=given, message=message, remedy=remedy)])


def _changed(spec: RunSpec, values: Mapping[str, str]) -> RunSpec:
    """The spec of the next attempt. Raises InputError for a key that would make it another run, or lose sight of its checkpoints."""
    fixed = [key for key in values if key in _KEPT_FOR_LIFE or key.startswith("model.config")]
    if fixed:
        remedy = "Start a new run with it, or resume without"
        raise InputError(
            [Problem(field=key, value=values[key], message="cannot change when a run is resumed", remedy=remedy) for key in fixed]
        )
    return with_absolute_paths(with_values(spec, values)) if values else spec


def _launch_attempt(run: RunDirectory, attempt: int, launch: Launch, machine: Machine, place: Place) -> None:
    host = socket.gethostname()
    try:
        write_atomic(run.machine_path(attempt, host), _pretty(machine))
        write_atomic(run.plan_path(attempt), _pretty(launch.plan))
        write_atomic(run.ds_config_path(attempt), _pretty(launch.ds_config))
        log = _supervisor_log(run, attempt)
        started = place.start(_supervisor_argv(run, attempt), os.environ, log)
    except OSError as error:
        remedy = "Free some space there, or choose another folder with --runs-dir"
        raise InputError(
            [Problem(field="--runs-dir", value=str(run.path.parent), message=f"cannot be written: {error.strerror}", remedy=remedy)]
        ) from error
    try:
        _wait_until_taken(run, attempt, started, log)
    except KeyboardInterrupt:  # the supervisor may live by now, and would train what nobody wants any more
        control.request(run, "stop", reason="interrupted while it was started")
        raise


def _wait_until_taken(run: RunDirectory, attempt: int, started: Started, log: Path) -> None:
    """Return when the supervisor has written its first state. Raises SoTuiError when it ended without, or takes too long."""
    deadline = time.monotonic() + _READY_S
    while read_state(run).attempt != attempt:
        code = started.ended()
        if code == 0 and read_state(run).attempt != attempt:  # it found another one at work
            raise SoTuiError(f"another start of {run.name} came first: `so-tui watch {run.name}` shows it")
        if code is not None and read_state(run).attempt != attempt:
            raise SoTuiError(f"the supervisor ended at once (exit code {code}): {_last_lines(log)}")
        if time.monotonic() > deadline:
            raise SoTuiError(f"the supervisor did not take the run over within {_READY_S:.0f} s: {_last_lines(log)}")
        time.sleep(_POLL_S)


def _untouched(run: RunDirectory) -> bool:
    """Whether no supervisor has written anything about the run: then nothing runs and nothing is worth keeping."""
    with contextlib.suppress(InputError):
        return read_state(run).supervisor is None
    return True


def _supervisor_argv(run: RunDirectory, attempt: int) -> tuple[str, ...]:
    return (sys.executable, "-P", "-m", "so_tui", "supervise", str(run.path), "--attempt", str(attempt))


def _supervisor_log(run: RunDirectory, attempt: int) -> Path:
    return run.attempt_dir(attempt) / f"supervisor.{socket.gethostname()}.log"


def _refuse_other_host(machine: Machine) -> None:
    if machine.hostname != socket.gethostname():
        remedy = "Start it on that machine, or look at it with --dry-run"
        raise InputError([Problem(field="--machine", value=machine.hostname, message="is another machine than this one", remedy=remedy)])


def _last_lines(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        lines = []
    return " / ".join(lines[-3:]) or "it said nothing"


def _pretty(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1)
