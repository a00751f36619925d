"""A disk that is full, a clock that jumps, and file systems whose locks or attributes are not what
they seem.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random

from benchmarks.faults.kind import FINISHED, STOPPED, Kind, Told, failed, told
from benchmarks.faults.kinds.requests import list_from_everywhere, resume_twice, supervise_again
from benchmarks.faults.kinds.signals import ANY_TIME
from benchmarks.faults.scene import Moment, Scene
from benchmarks.faults.shim import Locks, Shim


def shim_of(scene: Scene) -> Shim:
    """Return the scene's shim, which its kind asked for."""
    assert scene.shim is not None
    return scene.shim


def full(part: str) -> Callable[[Scene, Random], None]:
    """Return the effect of a disk that is full for paths with this part, until the attempt has
    ended.
    """

    def inject(scene: Scene, _chance: Random) -> None:
        shim_of(scene).fill(str(scene.run.path) + part)
        scene.settle()
        shim_of(scene).fill("")

    return inject


def full_for_a_while(part: str) -> Callable[[Scene, Random], None]:
    """Return the effect of a disk on which somebody frees space before the attempt ends."""

    def inject(scene: Scene, chance: Random) -> None:
        shim_of(scene).fill(str(scene.run.path) + part)
        time.sleep(chance.uniform(0.5, 3.0))
        shim_of(scene).fill("")

    return inject


def jump(seconds: int) -> Callable[[Scene, Random], None]:
    """Return the effect of a clock that is set forwards or back."""
    return lambda scene, _chance: shim_of(scene).set_clock(seconds)


def with_locks(
    locks: Locks, then: Callable[[Scene, Random], None]
) -> Callable[[Scene, Random], None]:
    """Return an effect on a file system whose locks fail or lock nothing."""

    def inject(scene: Scene, chance: Random) -> None:
        shim_of(scene).lock(locks, str(scene.runs_dir))
        then(scene, chance)

    return inject


def late_records(scene: Scene, _chance: Random) -> None:
    """Let attributes of the records be seconds old for all that read them."""
    shim_of(scene).delay_attributes(3.0, str(scene.run.path / "metrics"))


def late(scene: Scene, chance: Random) -> None:
    """Let attributes of the run's files be seconds old, and stop the run."""
    shim_of(scene).delay_attributes(chance.uniform(1.0, 3.0), str(scene.run.path / "control"))
    scene.stop()


def _kind(
    name: str,
    group: str,
    what: str,
    inject: Callable[[Scene, Random], None],
    right: frozenset[Told],
    moments: tuple[Moment, ...] = ("training",),
    *,
    loses_records: bool = False,
) -> Kind:
    return Kind(
        name,
        group,
        what,
        inject,
        right,
        moments=moments,
        loses_records=loses_records,
        needs_shim=True,
    )


_DISK_FULL = failed("disk-full", "checkpoint-failed")
KINDS = (
    _kind(
        "disk-full-checkpoint",
        "disk",
        "the disk is full for checkpoints",
        full("/checkpoints/"),
        _DISK_FULL,
    ),
    _kind(
        "disk-full-metrics",
        "disk",
        "the disk is full for metrics",
        full("/metrics/"),
        _DISK_FULL,
        loses_records=True,
    ),
    _kind(
        "disk-full-all",
        "disk",
        "the disk of the run is full",
        full("/"),
        _DISK_FULL | told(FINISHED),
        loses_records=True,
    ),
    _kind(
        "disk-full-log",
        "disk",
        "the disk is full for the log",
        full("/attempts/"),
        _DISK_FULL | told(FINISHED),
    ),
    _kind(
        "disk-full-state",
        "disk",
        "the disk is full for the state",
        full_for_a_while("/.state.json"),
        told(FINISHED),
    ),
    _kind(
        "disk-full-samples",
        "disk",
        "the disk is full for the samples",
        full_for_a_while("/samples."),
        told(FINISHED),
    ),
    _kind(
        "clock-forwards",
        "clock",
        "the clock jumps an hour ahead",
        jump(3600),
        told(FINISHED),
        ANY_TIME,
    ),
    _kind(
        "clock-back",
        "clock",
        "the clock is set back by an hour",
        jump(-3600),
        told(FINISHED),
        ANY_TIME,
    ),
    _kind(
        "clock-far-back",
        "clock",
        "the clock is set back to 1970",
        jump(-1_700_000_000),
        told(FINISHED),
        ANY_TIME,
    ),
    _kind(
        "no-locks",
        "file-system",
        "flock fails; two more supervisors",
        with_locks("fail", supervise_again),
        told(FINISHED),
        ANY_TIME,
    ),
    _kind(
        "idle-locks",
        "file-system",
        "flock locks nothing; two more supervisors",
        with_locks("lock nothing", supervise_again),
        told(FINISHED),
        ANY_TIME,
    ),
    _kind(
        "no-locks-killed",
        "file-system",
        "flock fails; the supervisor is killed, and three commands list the run",
        with_locks("fail", list_from_everywhere),
        told(FINISHED),
    ),
    _kind(
        "idle-locks-killed",
        "file-system",
        "flock locks nothing; the supervisor is killed, and three commands list the run",
        with_locks("lock nothing", list_from_everywhere),
        told(FINISHED),
    ),
    _kind(
        "no-locks-two-resumes",
        "file-system",
        "flock fails; everything is killed, and two commands resume the run",
        with_locks("fail", resume_twice),
        told(FINISHED),
        ANY_TIME,
    ),
    _kind(
        "idle-locks-two-resumes",
        "file-system",
        "flock locks nothing; everything is killed, and two commands resume the run",
        with_locks("lock nothing", resume_twice),
        told(FINISHED),
        ANY_TIME,
    ),
    Kind(
        "late-records",
        "file-system",
        "attributes of the records are seconds old; `run --plain` follows",
        late_records,
        told(FINISHED),
        begin="plain",
        moments=ANY_TIME,
        needs_shim=True,
        starter_exit=frozenset({0}),
    ),
    _kind(
        "late-attributes",
        "file-system",
        "attributes are seconds old; the run is stopped",
        late,
        told(STOPPED, FINISHED),
        ANY_TIME,
    ),
)
