"""Signals to every process of a run: killed, asked to end, suspended for seconds."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from random import Random

from benchmarks.faults import processes
from benchmarks.faults.kind import FINISHED, STOPPED, UNOBSERVED, Begin, Kind, Told, failed, told
from benchmarks.faults.scene import Moment, Scene

ANY_TIME: tuple[Moment, ...] = ("loading", "training", "saving")
_BUSY: tuple[Moment, ...] = ("training", "saving")


def send(role: str, signum: signal.Signals) -> Callable[[Scene, Random], None]:
    """Return the effect of one signal to one process."""

    def inject(scene: Scene, _chance: Random) -> None:
        target = scene.process(role)
        with contextlib.suppress(ProcessLookupError):
            os.kill(target.pid, signum)

    return inject


def suspend(role: str) -> Callable[[Scene, Random], None]:
    """Return the effect of SIGSTOP, and SIGCONT some seconds later."""

    def inject(scene: Scene, chance: Random) -> None:
        target = scene.process(role)
        with contextlib.suppress(ProcessLookupError):
            os.kill(target.pid, signal.SIGSTOP)
            time.sleep(chance.uniform(1.0, 5.0))
            os.kill(target.pid, signal.SIGCONT)

    return inject


def kill_tree(scene: Scene, _chance: Random) -> None:
    """Kill every process at once, the supervisor too: what the end of a job or of a container
    does.
    """
    for _ in range(3):  # those that were being started meanwhile
        for pid in processes.marked(scene.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def kill_ranks_and_launchers(scene: Scene, _chance: Random) -> None:
    """Kill everything but the supervisor."""
    for role, process in scene.roles.scan().items():
        if role != "supervisor":
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


def hang_up(scene: Scene, _chance: Random) -> None:
    """Close the terminal of the screen."""
    scene.hang_up()


_LOST_RANK = failed("rank-lost")
_LOST: dict[str, tuple[frozenset[Told], tuple[Moment, ...]]] = {
    "supervisor": (told(FINISHED), ANY_TIME),
    "runner": (failed("runner-lost"), ANY_TIME),
    "launcher": (failed("launcher-lost"), ANY_TIME),
    "rank0": (_LOST_RANK, ANY_TIME),
    "rank1": (_LOST_RANK, ANY_TIME),
    "adam0": (failed("adam-worker-lost"), _BUSY),
    "adam1": (failed("adam-worker-lost"), _BUSY),
}
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def _stopped_by(role: str, signum: signal.Signals) -> frozenset[Told]:
    """Return what a stop signal to a process does (docs/checkpoints.md): it stops the run, ends the
    process, or is ignored.
    """
    if role == "supervisor" or (role.startswith("rank") and signum == signal.SIGUSR1):
        return told(STOPPED, FINISHED)  # finished: it came with the last step
    if role.startswith("adam") or signum == signal.SIGUSR1:
        return told(FINISHED)
    if role.startswith("rank"):
        return failed("rank-lost", "unexpected")
    return failed(f"{role}-lost", "rank-lost", "unexpected")


def _kills() -> tuple[Kind, ...]:
    single = tuple(
        Kind(
            f"kill-{role}",
            "kill",
            f"SIGKILL to {role}",
            send(role, signal.SIGKILL),
            right,
            moments=moments,
        )
        for role, (right, moments) in _LOST.items()
    )
    watchers = tuple(
        Kind(
            f"kill-{begin}",
            "kill",
            what,
            send(begin, signal.SIGKILL),
            told(FINISHED),
            begin=begin,
            moments=ANY_TIME,
        )
        for begin, what in _WATCHERS.items()
    )
    trees = (
        Kind(
            "kill-tree",
            "kill",
            "SIGKILL to every process",
            kill_tree,
            told(UNOBSERVED),
            moments=ANY_TIME,
        ),
        Kind(
            "kill-tree-saving",
            "kill",
            "SIGKILL to every process while it saves",
            kill_tree,
            told(UNOBSERVED),
            moments=("saving",),
        ),
        Kind(
            "kill-all-but-supervisor",
            "kill",
            "SIGKILL to all but the supervisor",
            kill_ranks_and_launchers,
            failed("rank-lost", "launcher-lost", "runner-lost"),
            moments=_BUSY,
        ),
        Kind(
            "hang-up-screen",
            "kill",
            "the terminal of the screen is lost",
            hang_up,
            told(FINISHED),
            begin="screen",
            moments=ANY_TIME,
        ),
    )
    return (*single, *watchers, *trees)


_WATCHERS: dict[Begin, str] = {
    "screen": "SIGKILL to the screen",
    "plain": "SIGKILL to `run --plain`",
}


def _stops() -> tuple[Kind, ...]:
    processes_ = tuple(
        Kind(
            f"{signum.name[3:].lower()}-{role}",
            "stop-signal",
            f"{signum.name} to {role}",
            send(role, signum),
            _stopped_by(role, signum),
            moments=("training",) if role.startswith("adam") else _BUSY,
        )
        for role in _LOST
        for signum in _STOPPING
    )
    plain = tuple(
        Kind(
            f"{signum.name[3:].lower()}-plain",
            "stop-signal",
            f"{signum.name} to `run --plain`",
            send("plain", signum),
            told(STOPPED, FINISHED),
            begin="plain",
            moments=ANY_TIME,
            starter_exit=frozenset({0, 4}),
        )
        for signum in _STOPPING
    )
    return (*processes_, *plain)


def _suspensions() -> tuple[Kind, ...]:
    return tuple(
        Kind(
            f"suspend-{role}",
            "suspend",
            f"SIGSTOP to {role} for seconds",
            suspend(role),
            told(FINISHED),
            moments=moments,
        )
        for role, (_, moments) in _LOST.items()
    )


KINDS = (*_kills(), *_stops(), *_suspensions())
