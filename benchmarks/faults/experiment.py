"""One fault: a run begins, meets it at a moment, and is resumed; what was seen of that."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from pathlib import Path
from random import Random

from benchmarks.faults import processes
from benchmarks.faults.kind import Kind, Told
from benchmarks.faults.scene import SAVE_EVERY, STEPS, Moment, NeverCameError, Scene, readable
from benchmarks.faults.verdict import Expected, Losses, Seen
from so_tui.runs import RunDirectory
from so_tui.runs.records import FINAL_STATES, CheckpointRecord, ResumedRecord, StepRecord

_AFTER_END_S = 15.0
"""How long processes may take to be gone after the end of their run."""
_DELAYS: dict[Moment, float] = {"starting": 1.0, "loading": 4.0, "training": 0.2, "saving": 0.15}
"""The longest random delay after the begin of a moment, in seconds."""


def reference(folder: Path) -> dict[int, frozenset[str]]:
    """Train a run that nothing disturbs, and return its losses. Raises NeverCameError if it does
    not finish.
    """
    scene = Scene(folder, None)
    try:
        scene.start("detached")
        if (state := scene.settle()) != "finished":
            raise NeverCameError(f"the reference run is {state}")
        return losses(scene.run)
    finally:
        scene.close()


def stopped_run(folder: Path) -> None:
    """Train a run, and stop it once it has three checkpoints."""
    scene = Scene(folder, None)
    try:
        scene.start("detached")
        scene.wait_for("training", 2 * SAVE_EVERY + 1)
        scene.stop()
        if (state := scene.settle()) != "stopped":
            raise NeverCameError(f"the run that was to be stopped is {state}")
    finally:
        scene.close()


def meet(kind: Kind, scene: Scene, chance: Random, stopped: Path) -> dict[str, object]:
    """Let a run meet the fault, and return the moment. Raises NeverCameError if it came too
    late.
    """
    if kind.begin == "stopped":
        shutil.copytree(stopped, scene.runs_dir, dirs_exist_ok=True)
        kind.inject(scene, chance)
        return {"moment": "stopped"}
    if kind.needs_shim and scene.shim is None:
        raise NeverCameError("there is no C compiler for the library of faults")
    moment, step, delay = (
        chance.choice(kind.moments),
        chance.randrange(2, STEPS // 2),
        chance.random(),
    )
    scene.start(kind.how)
    scene.wait_for(moment, step)
    delay *= _DELAYS[moment]
    time.sleep(delay)
    found: dict[str, object] = {
        "moment": moment,
        "delay_s": round(delay, 3),
        "step": scene.trained(),
    }
    kind.inject(scene, chance)
    return found


def observe(kind: Kind, scene: Scene, undisturbed: Losses) -> tuple[Expected, Seen]:
    """Wait for the end of the attempt, resume the run as its user would, and return what is right
    and what was seen.
    """
    scene.settle()
    orphans = _orphans(scene)
    reported = str(scene.reported().get("state", ""))
    state = scene.state()
    recorded: Told = (
        (state.state, state.code) if state is not None and state.state in FINAL_STATES else ("", "")
    )
    locks = scene.held_locks() if not orphans else ()
    saved = _saved(scene.run)
    refused: tuple[str, ...] = ()
    if reported != "finished":
        refused = _resume(scene)
        if kind.remedy is not None:
            kind.remedy(scene)
            _resume(scene, *(("--start-over",) if kind.starts_over else ()))
    end = str(scene.reported().get("state", ""))
    orphans += _orphans(scene)
    expected = Expected(
        told=kind.told,
        refusals=kind.refusals,
        losses=undisturbed,
        loses_records=kind.loses_records,
        resumed_from=_resumable(kind, saved),
        starter_exit=kind.starter_exit,
    )
    return expected, Seen(
        reported=reported,
        recorded=recorded,
        refused=refused,
        end=end,
        losses=losses(scene.run),
        resumed_from=_resumed_from(scene.run) if reported != "finished" else None,
        trained_twice=_trained_twice(scene.run),
        orphans=orphans,
        shared_memory=processes.shared_memory_of(scene.roles.pids),
        locks=locks or (scene.held_locks() if not orphans else ()),
        partial=tuple(path.name for path in scene.run.checkpoints_dir.glob("*.partial")),
        tracebacks=tracebacks(scene),
        starter_exit=_starter_exit(scene),
    )


def losses(run: RunDirectory) -> dict[int, frozenset[str]]:
    """Return every recorded loss by step. Records that are damaged are left out."""
    found: dict[int, set[str]] = {}
    for record in readable(run):
        if isinstance(record, StepRecord):
            found.setdefault(record.step, set()).add(record.loss.hex())
    return {step: frozenset(values) for step, values in found.items()}


def _saved(run: RunDirectory) -> int:
    """Return the step of the newest checkpoint that the records know; 0 if there is none."""
    return max(
        (record.step for record in readable(run) if isinstance(record, CheckpointRecord)), default=0
    )


def _resumed_from(run: RunDirectory) -> int | None:
    found = [record.step for record in readable(run) if isinstance(record, ResumedRecord)]
    return found[-1] if found else None


def _trained_twice(run: RunDirectory) -> tuple[int, ...]:
    counts = Counter(
        (record.attempt, record.step) for record in readable(run) if isinstance(record, StepRecord)
    )
    return tuple(sorted({step for (_, step), count in counts.items() if count > 1}))


def tracebacks(scene: Scene) -> tuple[str, ...]:
    """Return where Python tracebacks were shown to a user or left by a supervisor."""
    shown = [
        f"command {index}"
        for index, done in enumerate(scene.transcript)
        if "Traceback" in done.err + done.out
    ]
    logs = [
        path
        for path in scene.run.path.glob("attempts/*/supervisor.*.log")
        if "Traceback" in path.read_text(errors="replace")
    ]
    return (*shown, *(str(path.relative_to(scene.run.path)) for path in logs))


def _resumable(kind: Kind, saved: int) -> int:
    """Return the earliest step from which the run may be resumed."""
    if kind.starts_over:
        return 0
    return saved - SAVE_EVERY if kind.loses_checkpoint else saved


def _resume(scene: Scene, *arguments: str) -> tuple[str, ...]:
    """Resume the run, and return why that was refused, or why the attempt failed; empty if it
    finished.
    """
    done = scene.resume(*arguments)
    if done.exit_code == 0:
        return ()
    scene.settle()
    state = scene.state()
    return done.codes or ((state.code,) if state is not None and state.code else ("no-code",))


def _orphans(scene: Scene) -> tuple[str, ...]:
    """Return processes that outlive the run. The command that started it ends by itself, and a
    screen stays until its user leaves.
    """
    scene.roles.scan()
    deadline = time.monotonic() + _AFTER_END_S
    while time.monotonic() < deadline:
        left = processes.marked(scene.mark)
        if scene.starter is not None and (
            scene.starter.poll() is not None or scene.terminal is not None
        ):
            left.pop(scene.starter.pid, None)
        if not left:
            return ()
        time.sleep(0.1)
    return tuple(f"{pid} {command[:120]}" for pid, command in left.items())


def _starter_exit(scene: Scene) -> int | None:
    return scene.starter.poll() if scene.starter is not None else None
