"""How an attempt ended, concluded from evidence. Pure.

``finished`` and ``stopped`` need the trainer's end record. Exit codes are evidence of failure only:
DeepSpeed's runner returns 0 when its launcher was killed by a signal.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from so_tui.launch import DEFAULT_GRACE_S, EXIT_GRACE_S, KILL_AFTER_S
from so_tui.launch.supervisor.host_check import HostDiffersError, LockTakenError
from so_tui.launch.supervisor.processes import Loss
from so_tui.machine.software import INSTALL_TRAINING
from so_tui.plan.plan import Launch
from so_tui.runs import state as run_state
from so_tui.runs.directory import RunDirectory
from so_tui.runs.liveness import END_CODES, EXIT_CODES, identify, this_host
from so_tui.runs.metrics import MetricsReader
from so_tui.runs.records import ENDING, EndRecord, OutcomeCode, Process, RunState
from so_tui.runs.state import Failure
from so_tui.trust.decoding import read_json
from so_tui.trust.text import so_tui_command
from so_tui.units import thousands

Who = Literal["runner", "launcher", "rank"]


class Evidence(Struct, frozen=True, kw_only=True):
    """What the supervisor observed."""

    end: EndRecord | None = None
    failures: tuple[Failure, ...] = ()
    """The earliest first."""
    runner_status: int | None = None
    """As subprocess reports it, below 0 for a signal. None when unknown, because another supervisor
    had started the runner.
    """
    first_loss: Loss | None = None
    """The first of runner, launcher and ranks that ended."""
    stop_overdue_s: float | None = None
    """The grace time in seconds of a requested stop that was not carried out in time."""
    gone_unseen: bool = False
    """The processes disappeared while no supervisor was running."""
    oom_kills: int = 0
    """Processes that the kernel killed for lack of memory during the attempt."""
    exchanged: bool = False
    """Another folder has the name of the run directory."""
    missing_network: str = ""
    """The network that the site expects between nodes, where NCCL uses TCP sockets instead."""
    disk_full: bool = False
    """The run directory accepted no more records, so the trainer's last ones may be lost."""
    log: tuple[str, ...] = ()
    """The last lines of the log."""

    @property
    def unprompted(self) -> bool:
        """Whether a process ended before the supervisor or the launcher had ended anything."""
        return self.first_loss is not None and self.first_loss.unprompted


class Outcome(Struct, frozen=True, kw_only=True):
    """How the attempt ended and why. ``outcome_text`` puts it into words."""

    state: Literal["finished", "stopped", "failed", "lost"] = "failed"
    code: str
    """An ``OutcomeCode``, or the trainer's own code."""
    who: Who | None = None
    """The process whose end was the cause."""
    rank: int | None = None
    pid: int | None = None
    signal: int | None = None
    """The signal that ended it."""
    exit_code: int | None = None
    """Its exit code if no signal ended it."""
    count: int = 0
    """Processes killed for lack of memory."""
    limit_s: float | None = None
    """The grace time of an overdue stop."""
    detail: str = ""
    """What the failure names: an exception, a module, the error of a failed start."""
    job: str = ""
    """The scheduler's number of the job, if it is about that."""
    node: str = ""
    """The nodes of that job; without a job, the node of a run on several where it happened."""
    reported: str = ""
    """The trainer's own account of the reason, if it left one."""
    advice: str = ""
    """The trainer's advice."""

    @property
    def run_exit_code(self) -> int:
        """The exit code of the commands that follow the run."""
        return EXIT_CODES[self.state]


def conclude(evidence: Evidence) -> Outcome:
    """Return the outcome of an attempt, from the most to the least direct evidence."""
    bereaved = _bereaved(evidence)
    if (end := evidence.end) is not None and not (bereaved and end.state == "failed"):
        code = end.code if end.state == "failed" else ""
        return Outcome(
            state=end.state,
            code=code or END_CODES[end.state],
            reported=end.reason,
            advice=end.suggestion,
        )
    if evidence.exchanged:
        return Outcome(code=OutcomeCode.FOLDER_EXCHANGED)
    if evidence.missing_network:
        return Outcome(code=OutcomeCode.SLOW_NETWORK, detail=evidence.missing_network)
    if evidence.failures and not bereaved:
        first = evidence.failures[0]
        return Outcome(
            code=first.code or OutcomeCode.UNEXPECTED,
            who="rank",
            rank=first.rank,
            reported=first.reason,
            advice=first.suggestion,
        )
    if evidence.stop_overdue_s is not None:
        return Outcome(code=OutcomeCode.STOP_OVERDUE, limit_s=evidence.stop_overdue_s)
    for code, pattern in _LOGGED:
        if match := _search(pattern, evidence.log):
            return Outcome(code=code, detail=next(iter(match.groups()), ""))
    if evidence.oom_kills and _reported_rank_code(evidence.log) in (None, -signal.SIGKILL):
        return Outcome(code=OutcomeCode.KILLED_FOR_MEMORY, count=evidence.oom_kills)
    if evidence.disk_full:
        return Outcome(code=OutcomeCode.DISK_FULL)
    if evidence.gone_unseen:
        return Outcome(state="lost", code=OutcomeCode.UNOBSERVED)
    return _by_exit(evidence)


def _ended_by(code: int | None) -> int | None:
    """Return the signal that ended a process with this exit code. A rank obeys SIGTERM by leaving
    with 143.
    """
    if code is not None and code < 0:
        return -code
    return signal.SIGTERM if code == 128 + signal.SIGTERM else None


def _bereaved(evidence: Evidence) -> bool:
    """Return whether the ranks' reports are only consequences of another rank that a signal ended
    before it could report.
    """
    loss = evidence.first_loss
    return (
        loss is not None
        and loss.unprompted
        and loss.process.role == "rank"
        and _ended_by(loss.exit_code) is not None
        and all(failure.rank != loss.process.rank for failure in evidence.failures)
    )


_UNSEEN = Loss(Process(pid=0, start_time=0, role="runner"))
"""Where no scan saw a process end: only the runner's status is known."""


def _by_exit(evidence: Evidence) -> Outcome:
    """Conclude only from which process ended, and how."""
    lost, code, _ = evidence.first_loss or _UNSEEN
    reported = _reported_rank_code(evidence.log)
    who: Who = "rank"
    rank = lost.rank if lost.role == "rank" else None
    if lost.role == "runner":
        who, code = "runner", evidence.runner_status if code is None else code
    elif lost.role == "launcher" and reported is None:
        who = "launcher"
    elif code is None:
        code = reported  # a launcher that lived to see a rank fail reports that rank's code
    known = Outcome(code=OutcomeCode.UNEXPECTED, who=who, rank=rank, pid=lost.pid or None)
    vanished = lost.pid and code is None and (who != "rank" or rank is not None)
    signum = _ended_by(code)
    if vanished or signum is not None:
        return replace(known, code=_LOST_CODES[who], signal=signum)
    errors = filter(None, (_ERROR.match(line.strip()) for line in reversed(evidence.log)))
    error = next((match[1][:500] for match in errors), "")
    return replace(known, exit_code=code, detail=error)


_ERROR = re.compile(r"^(?:\[rank\d+\]: *)?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt)(?:: .*)?)$")
"""A line that looks like the end of a Python traceback, and what it says after the rank's
prefix.
"""
_LOST_CODES: dict[Who, OutcomeCode] = {
    "runner": OutcomeCode.RUNNER_LOST,
    "launcher": OutcomeCode.LAUNCHER_LOST,
    "rank": OutcomeCode.RANK_LOST,
}

# What other software writes to the log when it fails; the first group is what its message names.
_LOGGED: tuple[tuple[OutcomeCode, str], ...] = (
    (OutcomeCode.OUT_OF_GPU_MEMORY, r"torch\.(?:cuda\.)?OutOfMemoryError: (.*?)(?:\. GPU|$)"),
    (OutcomeCode.DISK_FULL, r"No space left on device"),
    (OutcomeCode.ADAM_TIMEOUT, r"SuperOffload CPU optimizer timeout"),
    (OutcomeCode.PORT_IN_USE, r"Address already in use|EADDRINUSE"),
    (OutcomeCode.MODULE_MISSING, r"ModuleNotFoundError: No module named '([^']+)'"),
    (
        OutcomeCode.NUMACTL_FAILED,
        r"(set_mempolicy: .*|<[\d,-]+> is invalid|No such file or directory: 'numactl')",
    ),
)


def _search(pattern: str, log: Sequence[str]) -> re.Match[str] | None:
    return next((match for line in log if (match := re.search(pattern, line))), None)


def _reported_rank_code(log: Sequence[str]) -> int | None:
    """Return the exit code that DeepSpeed's launcher reports of the rank that made it give up;
    below 0 for a signal.
    """
    match = _search(r"exits with return code = (-?\d+)", log)
    return int(match.group(1)) if match else None


# Outcomes in words: the reason and the suggestion of ``state.json``.


_CRASHES = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})


class _Wording(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``outcomes.toml`` says of a code."""

    reason: str = ""
    advice: str = ""
    settings: bool = False
    """Whether a resume needs changed settings."""


@cache
def _wordings() -> dict[str, _Wording]:
    """Return what is said of outcomes, by code."""
    return msgspec.toml.decode(
        Path(__file__).with_name("outcomes.toml").read_bytes(), type=dict[str, _Wording]
    )


_SAVED_IN_VAIN = ("checkpoints-unreadable", "checkpoint-missing")
"""Codes of attempts that could not continue from any step."""


def outcome_text(
    outcome: Outcome, name: str, saved_step: int | None = None, advice: str = ""
) -> tuple[str, str]:
    """Return the reason of an outcome, and what to do next: after a failure also how to resume, and
    with changed settings where it needs them.

    Args:
        outcome: How an attempt ended.
        name: The run's name.
        saved_step: The step of the last checkpoint, or None.
        advice: The plan's own advice, in place of a general one.
    """
    if outcome.state in ("finished", "stopped"):
        return outcome.reported or (_reason(outcome) if outcome.job else ""), outcome.advice
    advice = outcome.advice if outcome.reported else advice or _advice(outcome, name)
    settings = " --set KEY=VALUE" if _wording(outcome).settings else ""
    command = f"`{so_tui_command('resume', name)}{settings}`"
    again = (
        f"Nothing had been saved: {command} starts from the beginning"
        if saved_step is None
        else f"{command} continues from step {thousands(saved_step)}"
    )
    if outcome.code in _SAVED_IN_VAIN:  # the trainer says how to go on
        again = ""
    parts = (part.rstrip(".") for part in (advice, again) if part)
    where = f"on node {outcome.node}: " if outcome.node and not outcome.job else ""
    return where + _reason(outcome), ". ".join(parts)


def _reason(outcome: Outcome) -> str:
    """Return the reason as the host says it on which it happened."""
    if outcome.reported:
        where = "" if outcome.rank is None else f"rank {outcome.rank}: "
        return where + outcome.reported
    if outcome.code in _LOST_CODES.values():
        if outcome.signal is None:
            return f"{_who(outcome)} (pid {outcome.pid}) disappeared during training: it was killed"
        try:
            name = signal.Signals(outcome.signal).name
        except ValueError:  # a real-time signal
            name = f"signal {outcome.signal}"
        return f"{_who(outcome)} was ended by {name}"
    if pattern := _wording(outcome).reason:
        return pattern.format(es="" if outcome.count == 1 else "es", **asdict(outcome))
    ending = (
        f"with exit code {outcome.exit_code}"
        if outcome.exit_code
        else "without the trainer's end record"
    )
    return outcome.detail or f"{_who(outcome)} ended {ending}"


def _advice(outcome: Outcome, name: str) -> str:
    if outcome.code in _LOST_CODES.values() and outcome.signal in _CRASHES:
        return "Native code crashed. See the last lines of the log"
    return _wording(outcome).advice.format(
        install=INSTALL_TRAINING, logs=so_tui_command("logs", name)
    )


def _wording(outcome: Outcome) -> _Wording:
    return _wordings().get(outcome.code) or _Wording()


def _who(outcome: Outcome) -> str:
    if outcome.who == "rank":
        return "a rank" if outcome.rank is None else f"rank {outcome.rank}"
    return f"DeepSpeed's {outcome.who or 'runner'}"


def not_started(error: Exception) -> Outcome:
    """Return the outcome of an attempt whose processes were not started."""
    return Outcome(
        code=_NOT_STARTED.get(type(error), OutcomeCode.NOT_STARTED),
        detail="; ".join(str(error).splitlines()),
    )


_NOT_STARTED = {
    LockTakenError: OutcomeCode.GPU_IN_USE,
    HostDiffersError: OutcomeCode.HOST_DIFFERS,
}

# The state of a run at its start, while it trains and at its end: pure functions from records to
# ``RunState``.


def supervised_here() -> dict[str, Any]:
    """Return what a state says of a run that this process supervises."""
    _wordings()  # at the end the program may have been replaced
    host = this_host()
    return {
        "supervisor": identify(os.getpid(), "supervisor"),
        "host": host.name,
        "boot_id": host.boot_id,
        "pid_namespace": host.pid_namespace,
    }


def first_state(name: str, attempt: int, before: RunState, launch: Launch) -> RunState:
    """Return the state of an attempt that is about to start. ``before`` is the state that the
    previous attempt left.
    """
    now = time.time()
    state = replace(
        queued_state(before),
        name=name,
        state="starting",
        detail="DeepSpeed's launcher starts the ranks",
        attempt=attempt,
        started=before.started or now,
        attempt_started=now,
        forced=launch.forced,
        checks_s=launch.checks_s,
        slowdown=None,
        disk_full=False,
        ending=False,
        **supervised_here(),
    )
    return replace(state, saved_step=None, saved_at=None) if launch.start_over else state


def queued_state(before: RunState) -> RunState:
    """Return the state of a run that waits for a job. ``before`` is the state that the previous
    attempt left.
    """
    return replace(
        before,
        state="queued",
        host="",
        supervisor=None,
        processes=(),
        ended=None,
        code="",
        reason="",
        suggestion="",
        detail="",
        exit_code=None,
        # One that waits for a job keeps that of the attempts before it.
        earlier_s=before.earlier_s if before.took_s is None else before.took_s,
        heartbeat=before.heartbeat + 1,
    )


def left_queue(queued: RunState, attempt: int) -> RunState:
    """Return the final state of a run that waits for a job of an attempt and will not get it."""
    now = time.time()  # waiting is no part of its duration
    return final_state(
        replace(queued, attempt=attempt, attempt_started=now),
        Outcome(state="stopped", code=OutcomeCode.STOPPED),
        now,
    )


def final_state(state: RunState, outcome: Outcome, ended: float, advice: str = "") -> RunState:
    """Return the state after the end of an attempt.

    Args:
        state: The state before.
        outcome: How it ended.
        ended: When, in seconds since the epoch.
        advice: The plan's own, as for ``outcome_text``.
    """
    reason, suggestion = outcome_text(outcome, state.name, state.saved_step, advice)
    return replace(
        state,
        state=outcome.state,
        ending=False,
        detail="",
        code=str(outcome.code),
        reason=reason,
        suggestion=suggestion,
        ended=ended,
        exit_code=outcome.run_exit_code,
        processes=(),
    )


def observed(state: RunState, reader: MetricsReader) -> RunState:
    """Return ``state`` with what the records of its attempt add: phase, step, loss,
    checkpoints.
    """
    attempt, events, latest = state.attempt, reader.events, reader.latest
    start, phase = events.start, events.phase
    if start is not None and start.attempt == attempt:
        state = replace(state, total_steps=start.total_steps)
    if latest is not None:
        state = replace(state, step=latest.step, loss=latest.loss)
    if phase is not None and phase.attempt == attempt:
        state = replace(state, state=phase.phase, detail=phase.detail, ending=phase.stage == ENDING)
    if events.checkpoints:
        saved = events.checkpoints[-1]
        state = replace(state, saved_step=saved.step, saved_at=saved.time)
    elif events.resumes and events.resumes[-1].attempt == attempt and events.resumes[-1].step == 0:
        # Started over: what was saved before no longer counts. After any other resume its record is
        # in a segment that is not read yet.
        state = replace(state, saved_step=None, saved_at=None)
    if (end := events.end_of(attempt)) is not None:
        # Not every step is logged, and an attempt that was stopped before its first step is back at
        # its checkpoint.
        state = replace(state, ending=True, step=state.step if end.state == "failed" else end.step)
    return state


# How a run is ended: the user's request to stop, and when its processes are terminated and killed.


class StopRequest(run_state.Request, frozen=True, kw_only=True):
    """A stop with a time limit, after which the processes are killed. ``so-tui stop`` writes it,
    the supervisor reads it.
    """

    grace_s: float = DEFAULT_GRACE_S


def request_stop(run: RunDirectory, **asked: Any) -> None:
    """Ask the run to stop; ``asked`` are fields of ``StopRequest``. A later request replaces an
    earlier one, but a scheduler's or a signal's does not replace a person's. Raises OSError.
    """
    run_state.request(run, "stop", StopRequest, **asked)


def stop_request(run: RunDirectory) -> StopRequest | None:
    """Return the pending request, or None."""
    try:
        return read_json(run.control_dir / "stop", StopRequest)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError):
        # The file exists, so a stop is wanted: a person may have made it with `touch`.
        return StopRequest(by="", time=0.0)


@dataclass
class Shutdown:
    """Decides when an attempt's processes are terminated and killed. Pure: all times are passed in
    (seconds, monotonic).
    """

    ended_at: float | None = None
    """When the trainer's end record was seen."""
    broken: bool = False
    """The processes cannot go on, such as because the runner or the launcher was lost."""
    overdue_at: float | None = None
    """When a requested stop must have been carried out."""
    terminated_at: float | None = None
    _stop: tuple[StopRequest, int | None] | None = None
    """The stop that is pending, and the last checkpoint when its time was given."""

    def stop(self, asked: StopRequest, saved_step: int | None, now: float) -> None:
        """Give a requested stop its time.

        A stop may have to wait for the checkpoint that is being written before it writes the last
        one. With the default grace, each one that completes gives it the whole time anew.

        Args:
            asked: The request.
            saved_step: The step of the newest checkpoint.
            now: The time.
        """
        known = asked, saved_step if asked.grace_s == DEFAULT_GRACE_S else None
        if known != self._stop:
            self._stop, self.overdue_at = known, now + asked.grace_s

    def next_signal(self, now: float) -> signal.Signals | None:
        """Return the signal that the processes must get now, if any. The caller sends it."""
        if self.terminated_at is not None:
            return signal.SIGKILL if now >= self.terminated_at + KILL_AFTER_S else None
        due = (
            self.broken or self.stop_overdue(now)
            if self.ended_at is None
            else now >= self.ended_at + EXIT_GRACE_S
        )
        if not due:
            return None
        self.terminated_at = now
        return signal.SIGTERM

    def stop_overdue(self, now: float) -> bool:
        """Return whether a requested stop was not carried out in time."""
        return self.ended_at is None and self.overdue_at is not None and now >= self.overdue_at
