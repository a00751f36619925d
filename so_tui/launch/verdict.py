"""How an attempt ended, told from evidence. Pure.

``finished`` and ``stopped`` need the trainer's own word; an exit code is evidence of failure only: DeepSpeed's runner returns 0 when its
launcher was killed by a signal.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from so_tui.runs.liveness import EXIT_CODES
from so_tui.runs.records import EndRecord, Process


class Failure(Struct, frozen=True):
    """What a rank left in ``failure.rank<R>.json`` before it gave up."""

    rank: int
    reason: str
    suggestion: str = ""
    step: int = 0


class Evidence(Struct, frozen=True, kw_only=True):
    name: str
    """The run's name, for the advice."""
    saved_step: int | None = None
    """The step of the last checkpoint; None when there is none."""
    end: EndRecord | None = None
    failures: tuple[Failure, ...] = ()
    runner_status: int | None = None
    """As subprocess tells it: below 0 it is a signal's number; None when it is not known (another supervisor had started it)."""
    first_gone: Process | None = None
    """The first of runner, launcher and ranks that ended."""
    first_gone_code: int | None = None
    """Its exit code (below 0: a signal's number), where that could be seen."""
    unprompted: bool = False
    """It ended before anything of the run was told to end."""
    stop_overdue_s: float | None = None
    """A stop was asked for and not carried out within so many seconds."""
    gone_unseen: bool = False
    """The processes had vanished while nobody watched."""
    less_gpu_memory: str = "Lower train.micro_batch or data.sequence_length, or raise offload.ratio; `so-tui plan` shows what each costs"
    """What would need less of it, by the plan."""
    less_host_memory: str = "Lower offload.ratio, use more GPUs, or free host memory. `so-tui plan` shows what is needed"
    oom_kills: int = 0
    """Processes that the kernel killed for want of memory while the attempt ran."""
    disk_full: bool = False
    """The run's folder took no more records: the trainer's last words may have been lost."""
    log: tuple[str, ...] = ()
    """The last lines of the log."""


class End(Struct, frozen=True, kw_only=True):
    state: Literal["finished", "stopped", "failed", "lost"]
    reason: str = ""
    suggestion: str = ""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.state]


def conclude(evidence: Evidence) -> End:
    """The end of the attempt, with a reason and what to do next: of a failure also how to go on, with which settings changed."""
    end = _concluded(evidence)
    if end.state != "failed" or "so-tui resume" in end.suggestion:
        return end
    again = _again(evidence, " --set KEY=VALUE" if _SETTING.search(end.suggestion) else "")
    return msgspec.structs.replace(end, suggestion=f"{end.suggestion.rstrip('.')}. {again}" if end.suggestion else again)


_SETTING = re.compile(r"\b(?:data|train|offload|model)\.[a-z]")


def _concluded(evidence: Evidence) -> End:
    bereaved = _bereaved(evidence)
    if (end := evidence.end) is not None and not (bereaved and end.state == "failed"):
        return End(state=end.state, reason=end.reason, suggestion=end.suggestion)
    if evidence.failures and not bereaved:
        first = evidence.failures[0]
        return End(state="failed", reason=f"rank {first.rank}: {first.reason}", suggestion=first.suggestion)
    if evidence.stop_overdue_s is not None:
        limit = f"{evidence.stop_overdue_s:.0f} s"
        reason = f"asked to stop, the trainer did not end within {limit} and was killed; nothing was saved after the last checkpoint"
        return End(state="failed", reason=reason, suggestion="Give it more time next time (`so-tui stop --grace SECONDS`)")
    for pattern, reason, suggestion in _KNOWN:
        if match := _search(pattern, evidence.log):
            return End(
                state="failed",
                reason=reason.format(*match.groups()),
                suggestion=suggestion.format(name=evidence.name, less_gpu_memory=evidence.less_gpu_memory),
            )
    if evidence.oom_kills and _rank_code(evidence.log) in (None, -signal.SIGKILL):
        reason = f"the kernel killed {evidence.oom_kills} process{'es' if evidence.oom_kills > 1 else ''} of this host for want of memory"
        return End(state="failed", reason=reason, suggestion=evidence.less_host_memory)
    if evidence.disk_full:
        reason = "the disk of the run's folder is full: nothing more could be recorded"
        return End(state="failed", reason=reason, suggestion="Make room there")
    if evidence.gone_unseen:
        reason = (
            "its processes are gone and left no word; they were not watched when they ended (a reboot, or everything was killed at once)"
        )
        return End(state="lost", reason=reason, suggestion=_again(evidence))
    return _by_exit(evidence)


def ended_by(code: int | None) -> int | None:
    """The signal that ended a process with this exit code; a rank obeys SIGTERM by leaving with 143."""
    if code is not None and code < 0:
        return -code
    return signal.SIGTERM if code == 128 + signal.SIGTERM else None


def _bereaved(evidence: Evidence) -> bool:
    """Whether what the ranks report are only the consequences of one that a signal ended before it could say a word."""
    gone, code = evidence.first_gone, evidence.first_gone_code
    if not evidence.unprompted or gone is None or gone.role != "rank" or ended_by(code) is None:
        return False
    return all(failure.rank != gone.rank for failure in evidence.failures)


def _again(evidence: Evidence, settings: str = "") -> str:
    command = f"`so-tui resume {evidence.name}{settings}`"
    if evidence.saved_step is None:
        return f"Nothing had been saved: {command} starts it over"
    return f"{command} goes on from step {evidence.saved_step}"


def _by_exit(evidence: Evidence) -> End:
    """A failure of which only who died, and how, is known."""
    gone, status, reported = evidence.first_gone, evidence.runner_status, _rank_code(evidence.log)
    code = evidence.first_gone_code
    if gone is None or gone.role == "runner":
        who, code = "DeepSpeed's runner", status if code is None else code
    elif gone.role == "launcher" and reported is None:
        who = "DeepSpeed's launcher"
    else:
        # A launcher that lived to see a rank fail reports that rank's code.
        who, code = f"rank {gone.rank}" if gone.role == "rank" else "a rank", reported if code is None else code
    if signum := ended_by(code):
        return _killed(who, signum)
    if gone is not None and code is None and who != "a rank":
        reason = f"{who} (pid {gone.pid}) vanished while training went on: it was killed"
        return End(state="failed", reason=reason, suggestion=_WHO_KILLS)
    log = f"The log has the whole story: `so-tui logs {evidence.name}`"
    if error := _last_error(evidence.log):
        return End(state="failed", reason=error, suggestion=log)
    told = f"ended with exit code {code}" if code else "ended without a word of the trainer"
    return End(state="failed", reason=f"{who} {told}", suggestion=log)


_WHO_KILLS = "Nothing in so-tui does that on its own: look for the kernel's out-of-memory killer (`dmesg`), a scheduler or a person"


def _killed(who: str, signum: int) -> End:
    known = {member.value: member.name for member in signal.Signals}
    name = known.get(signum, f"signal {signum}")
    crash = name in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE")
    suggestion = "A crash of native code: the log's last lines say where" if crash else _WHO_KILLS
    return End(state="failed", reason=f"{who} was ended by {name}", suggestion=suggestion)


_KNOWN: tuple[tuple[str, str, str], ...] = (
    (
        r"torch\.(?:cuda\.)?OutOfMemoryError: (.*?)(?:\. GPU|$)",
        "out of GPU memory: {0}",
        "{less_gpu_memory}",
    ),
    (
        r"No space left on device",
        "no space left on a device",
        "Free space on the disk of the run and its checkpoints, and in /dev/shm (in Docker: --shm-size)",
    ),
    (
        r"SuperOffload CPU optimizer timeout",
        "CPU Adam did not answer in time",
        "Give it more cores (offload.cpu_adam_cores_fraction, OMP threads): see `so-tui doctor`",
    ),
    (
        r"Address already in use|EADDRINUSE",
        "the rendezvous port was taken by another program",
        "Start again: `so-tui resume {name}` takes another port",
    ),
    (
        r"ModuleNotFoundError: No module named '([^']+)'",
        "the Python module {0} is not installed",
        "Install the training extra: pip install 'so-tui[train]'",
    ),
    (
        r"(set_mempolicy: .*|<[\d,-]+> is invalid|No such file or directory: 'numactl')",
        "numactl failed: {0}",
        "`so-tui doctor` says whether numactl works here; in a container, set_mempolicy may be forbidden",
    ),
)


def _search(pattern: str, log: Sequence[str]) -> re.Match[str] | None:
    compiled = re.compile(pattern)
    return next((match for line in log if (match := compiled.search(line))), None)


def _rank_code(log: Sequence[str]) -> int | None:
    """The return code that DeepSpeed's launcher reports of the rank that made it give up; below 0 it is a signal's number."""
    match = _search(r"exits with return code = (-?\d+)", log)
    return int(match.group(1)) if match else None


def _last_error(log: Sequence[str]) -> str:
    """The last line that looks like the end of a Python traceback, without the rank's prefix."""
    pattern = re.compile(r"^(?:\[rank\d+\]: *)?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt)(?:: .*)?)$")
    return next((match.group(1)[:500] for line in reversed(log) if (match := pattern.match(line.strip()))), "")
