"""How an attempt ended, concluded from evidence. Pure.

``finished`` and ``stopped`` need the trainer's end record. Exit codes are evidence of failure only: DeepSpeed's runner returns 0 when its
launcher was killed by a signal.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from so_tui.runs.outcome import OutcomeCode
from so_tui.runs.records import EndRecord, Process
from so_tui.runs.unobserved import EXIT_CODES

EndState = Literal["finished", "stopped", "failed", "lost"]
Who = Literal["runner", "launcher", "rank"]


class Failure(Struct, frozen=True):
    """What a rank wrote into ``failure.rank<R>.json`` before it gave up."""

    rank: int
    reason: str
    suggestion: str = ""
    step: int = 0
    code: str = ""
    """Empty in files of older versions."""


class Evidence(Struct, frozen=True, kw_only=True):
    """What the supervisor observed."""

    end: EndRecord | None = None
    failures: tuple[Failure, ...] = ()
    """The earliest first."""
    runner_status: int | None = None
    """As subprocess reports it, below 0 for a signal. None when unknown, because another supervisor had started the runner."""
    first_lost: Process | None = None
    """The first of runner, launcher and ranks that ended."""
    first_lost_code: int | None = None
    """Its exit code (below 0 for a signal), if it could be observed."""
    unprompted: bool = False
    """It ended before the supervisor or the launcher had ended anything."""
    stop_overdue_s: float | None = None
    """The grace time in seconds of a requested stop that was not carried out in time."""
    gone_unseen: bool = False
    """The processes disappeared while no supervisor was running."""
    oom_kills: int = 0
    """Processes that the kernel killed for lack of memory during the attempt."""
    missing_network: str = ""
    """The network that the site expects between nodes, where NCCL uses TCP sockets instead."""
    disk_full: bool = False
    """The run directory accepted no more records, so the trainer's last ones may be lost."""
    log: tuple[str, ...] = ()
    """The last lines of the log."""


class Outcome(Struct, frozen=True, kw_only=True):
    """How the attempt ended and why. ``outcome_text`` puts it into words."""

    state: EndState
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
        return _recorded(end)
    if evidence.missing_network:
        return Outcome(
            state="failed", code=OutcomeCode.SLOW_NETWORK, detail=evidence.missing_network
        )
    if evidence.failures and not bereaved:
        first = evidence.failures[0]
        code = first.code or OutcomeCode.UNEXPECTED
        return Outcome(
            state="failed",
            code=code,
            who="rank",
            rank=first.rank,
            reported=first.reason,
            advice=first.suggestion,
        )
    if evidence.stop_overdue_s is not None:
        return Outcome(
            state="failed", code=OutcomeCode.STOP_OVERDUE, limit_s=evidence.stop_overdue_s
        )
    for code, pattern in _LOGGED:
        if match := _search(pattern, evidence.log):
            return Outcome(state="failed", code=code, detail=next(iter(match.groups()), ""))
    if evidence.oom_kills and _reported_rank_code(evidence.log) in (None, -signal.SIGKILL):
        return Outcome(state="failed", code=OutcomeCode.KILLED_FOR_MEMORY, count=evidence.oom_kills)
    if evidence.disk_full:
        return Outcome(state="failed", code=OutcomeCode.DISK_FULL)
    if evidence.gone_unseen:
        return Outcome(state="lost", code=OutcomeCode.UNOBSERVED)
    return _by_exit(evidence)


def ended_by(code: int | None) -> int | None:
    """Return the signal that ended a process with this exit code. A rank obeys SIGTERM by leaving with 143."""
    if code is not None and code < 0:
        return -code
    return signal.SIGTERM if code == 128 + signal.SIGTERM else None


def _recorded(end: EndRecord) -> Outcome:
    codes: dict[str, str] = {
        "finished": OutcomeCode.FINISHED,
        "stopped": OutcomeCode.STOPPED,
        "failed": end.code or OutcomeCode.UNEXPECTED,
    }
    return Outcome(
        state=end.state, code=codes[end.state], reported=end.reason, advice=end.suggestion
    )


def _bereaved(evidence: Evidence) -> bool:
    """Return whether the ranks' reports are only consequences of another rank that a signal ended before it could report."""
    lost, code = evidence.first_lost, evidence.first_lost_code
    if not evidence.unprompted or lost is None or lost.role != "rank" or ended_by(code) is None:
        return False
    return all(failure.rank != lost.rank for failure in evidence.failures)


def _by_exit(evidence: Evidence) -> Outcome:
    """Conclude only from which process ended, and how."""
    lost, reported = evidence.first_lost, _reported_rank_code(evidence.log)
    code, pid = evidence.first_lost_code, None if lost is None else lost.pid
    who: Who = "rank"
    rank: int | None = None
    if lost is None or lost.role == "runner":
        who, code = "runner", evidence.runner_status if code is None else code
    elif lost.role == "launcher" and reported is None:
        who = "launcher"
    else:
        # A launcher that lived to see a rank fail reports that rank's code.
        rank, code = (
            (lost.rank if lost.role == "rank" else None),
            reported if code is None else code,
        )
    vanished = lost is not None and code is None and (who != "rank" or rank is not None)
    if vanished or (signum := ended_by(code)) is not None:
        return Outcome(
            state="failed",
            code=_LOST[who],
            who=who,
            rank=rank,
            pid=pid,
            signal=None if vanished else signum,
        )
    error = _last_error(evidence.log)
    return Outcome(
        state="failed",
        code=OutcomeCode.UNEXPECTED,
        who=who,
        rank=rank,
        pid=pid,
        exit_code=code,
        detail=error,
    )


_LOST: dict[Who, OutcomeCode] = {
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
    compiled = re.compile(pattern)
    return next((match for line in log if (match := compiled.search(line))), None)


def _reported_rank_code(log: Sequence[str]) -> int | None:
    """Return the exit code that DeepSpeed's launcher reports of the rank that made it give up; below 0 for a signal."""
    match = _search(r"exits with return code = (-?\d+)", log)
    return int(match.group(1)) if match else None


def _last_error(log: Sequence[str]) -> str:
    """Return the last line that looks like the end of a Python traceback, without the rank's prefix."""
    pattern = re.compile(
        r"^(?:\[rank\d+\]: *)?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt)(?:: .*)?)$"
    )
    return next(
        (match.group(1)[:500] for line in reversed(log) if (match := pattern.match(line.strip()))),
        "",
    )
