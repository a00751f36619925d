"""What users do at a bad moment: stops at every phase, and two of everything."""

from __future__ import annotations

from random import Random

from benchmarks.faults.kind import FINISHED, STOPPED, Kind, failed, told
from benchmarks.faults.kinds.signals import ANY_TIME, kill_tree
from benchmarks.faults.scene import Scene


def stop(scene: Scene, _chance: Random) -> None:
    """Stop the run as a user does."""
    if scene.stop().exit_code != 0:
        scene.noted.append("stop-failed")


def stop_without_patience(scene: Scene, chance: Random) -> None:
    """Stop it with hardly any grace time."""
    scene.stop("--grace", f"{chance.uniform(0.05, 1.0):.2f}")


def stop_twice(scene: Scene, _chance: Random) -> None:
    """Two users stop it at once."""
    waiting = [scene.begin("stop", str(scene.run.path)) for _ in range(2)]
    for wait in waiting:
        wait(120)


def supervise_again(scene: Scene, _chance: Random) -> None:
    """Start two more supervisors of the attempt, without a starter."""
    state = scene.state()
    attempt = str(state.attempt if state else 1)
    waiting = [
        scene.begin("supervise", str(scene.run.path), "--attempt", attempt) for _ in range(2)
    ]
    for wait in waiting:
        wait(180)


def list_from_everywhere(scene: Scene, chance: Random) -> None:
    """Kill the supervisor, and let several commands find that out at once."""
    from signal import SIGKILL

    from benchmarks.faults.kinds.signals import send

    send("supervisor", SIGKILL)(scene, chance)
    waiting = [scene.begin("runs", "--json", "--runs-dir", str(scene.runs_dir)) for _ in range(3)]
    for wait in waiting:
        wait(60)


def resume_twice(scene: Scene, chance: Random) -> None:
    """Kill everything, then resume it from two terminals at once: one trains, the other is told
    so.
    """
    kill_tree(scene, chance)
    scene.settle()
    waiting = [scene.begin("resume", str(scene.run.path), "--plain") for _ in range(2)]
    codes = [wait(240).exit_code for wait in waiting]
    if codes.count(0) != 1:
        scene.noted.append(
            "resumed-by-two" if all(code == 0 for code in codes) else "resumed-by-none"
        )


def supervise_no_attempt(scene: Scene, _chance: Random) -> None:
    """Ask for the supervisor of an attempt that was never made."""
    scene.so_tui("supervise", str(scene.run.path), "--attempt", "7")


KINDS = (
    Kind("stop", "stop", "`so-tui stop`", stop, told(STOPPED, FINISHED), moments=ANY_TIME),
    Kind(
        "stop-saving",
        "stop",
        "`so-tui stop` while it saves",
        stop,
        told(STOPPED, FINISHED),
        moments=("saving",),
    ),
    Kind(
        "stop-without-patience",
        "stop",
        "`so-tui stop` with a grace of less than a second",
        stop_without_patience,
        told(STOPPED, FINISHED) | failed("stop-overdue"),
        moments=ANY_TIME,
    ),
    Kind(
        "stop-twice",
        "stop",
        "two users stop it",
        stop_twice,
        told(STOPPED, FINISHED),
        moments=ANY_TIME,
    ),
    Kind(
        "two-supervisors",
        "two",
        "two more supervisors",
        supervise_again,
        told(FINISHED),
        moments=("starting", *ANY_TIME),
    ),
    Kind(
        "no-such-attempt",
        "two",
        "a supervisor for an attempt that was never made",
        supervise_no_attempt,
        told(STOPPED),
        begin="stopped",
    ),
    Kind(
        "three-lists",
        "two",
        "the supervisor is killed, and three commands list the run",
        list_from_everywhere,
        told(FINISHED),
    ),
    Kind(
        "two-resumes",
        "two",
        "everything is killed, and two commands resume the run",
        resume_twice,
        told(FINISHED),
        moments=ANY_TIME,
    ),
)
