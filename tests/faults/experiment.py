"""One fault: a run begins, meets it at a moment, and is resumed; what was seen of that."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path
from random import Random

from so_tui.runs import RunDirectory
from so_tui.runs.records import FINAL_STATES, StepRecord
from tests.faults import processes
from tests.faults.kind import Kind, Told
from tests.faults.scene import SAVE_EVERY, STEPS, Moment, NeverCameError, Scene
from tests.faults.verdict import Expected, Losses, Seen
from tests.support.launching import records

_AFTER_END_S = 15.0
"""How long processes may take to be gone after the end of their run."""
_DELAYS: dict[Moment, float] = {"starting": 1.0, "loading": 4.0, "training": 0.3, "saving": 0.15}
"""The longest random delay after the begin of a moment, in seconds."""


def reference(folder: Path) -> dict[int, frozenset[str]]:
    """Train a run that nothing disturbs, and return its losses. Raises NeverCameError if it does not finish."""
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
    """Let a run meet the fault, and return the moment. Raises NeverCameError if it came too late."""
    if kind.begin == "stopped":
        shutil.copytree(stopped, scene.runs_dir, dirs_exist_ok=True)
        kind.inject(scene, chance)
        return {"moment": "stopped"}
    if kind.needs_shim and scene.shim is None:
        raise NeverCameError("there is no C compiler for the library of faults")
    moment, step, delay = chance.choice(kind.moments), chance.randrange(2, STEPS - 4), chance.random()
    scene.start(kind.how)
    scene.wait_for(moment, step)
    delay *= _DELAYS[moment]
    time.sleep(delay)
    found: dict[str, object] = {"moment": moment, "delay_s": round(delay, 3), "step": scene.trained()}
    kind.inject(scene, chance)
    return found


def observe(kind: Kind, scene: Scene) -> Seen:
    """Wait for the end of the attempt, resume the run as its user would, and return what was seen."""
    scene.settle()
    orphans = _orphans(scene)
    reported = str(scene.reported().get("state", ""))
    state = scene.state()
    recorded: Told = (state.state, state.code) if state is not None and state.state in FINAL_STATES else ("", "")
    locks = scene.held_locks() if not orphans else ()
    refused: tuple[str, ...] = ()
    if reported != "finished":
        refused = _resume(scene)
        if kind.remedy is not None:
            kind.remedy(scene)
            _resume(scene)
    end = str(scene.reported().get("state", ""))
    orphans += _orphans(scene)
    return Seen(
        reported=reported,
        recorded=recorded,
        refused=refused,
        end=end,
        losses=losses(scene.run),
        orphans=orphans,
        shared_memory=processes.shared_memory_of(scene.roles.pids),
        locks=locks or (scene.held_locks() if not orphans else ()),
        partial=tuple(path.name for path in scene.run.checkpoints_dir.glob("*.partial")),
        tracebacks=tracebacks(scene),
        starter_exit=_starter_exit(scene),
    )


def expected_of(kind: Kind, undisturbed: Losses) -> Expected:
    """Return what is right after a fault of this kind."""
    return Expected(kind.told, kind.refusals, undisturbed, kind.loses_records, kind.starter_exit)


def losses(run: RunDirectory) -> dict[int, frozenset[str]]:
    """Return every recorded loss by step. Records that are damaged are left out."""
    found: dict[int, set[str]] = {}
    with contextlib.suppress(FileNotFoundError):
        for record in records(run):
            if isinstance(record, StepRecord):
                found.setdefault(record.step, set()).add(record.loss.hex())
    return {step: frozenset(values) for step, values in found.items()}


def tracebacks(scene: Scene) -> tuple[str, ...]:
    """Return where Python tracebacks were shown to a user or left by a supervisor."""
    shown = [f"command {index}" for index, done in enumerate(scene.transcript) if "Traceback" in done.err + done.out]
    logs = [path for path in scene.run.path.glob("attempts/*/supervisor.*.log") if "Traceback" in path.read_text(errors="replace")]
    return (*shown, *(str(path.relative_to(scene.run.path)) for path in logs))


def _resume(scene: Scene) -> tuple[str, ...]:
    """Resume the run, and return why that was refused, or why the attempt failed; empty if it finished."""
    done = scene.resume()
    if done.exit_code == 0:
        return ()
    scene.settle()
    state = scene.state()
    return done.codes or ((state.code,) if state is not None and state.code else ("no-code",))


def _orphans(scene: Scene) -> tuple[str, ...]:
    """Return processes that outlive the run. The command that started it ends by itself, and a screen stays until its user leaves."""
    scene.roles.scan()
    deadline = time.monotonic() + _AFTER_END_S
    while time.monotonic() < deadline:
        left = processes.marked(scene.mark)
        if scene.starter is not None and (scene.starter.poll() is not None or scene.terminal is not None):
            left.pop(scene.starter.pid, None)
        if not left:
            return ()
        time.sleep(0.1)
    return tuple(f"{pid} {command[:120]}" for pid, command in left.items())


def _starter_exit(scene: Scene) -> int | None:
    return scene.starter.poll() if scene.starter is not None else None
