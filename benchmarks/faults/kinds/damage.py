"""Files that are torn, flipped, truncated, renamed or missing when a run is resumed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

from benchmarks.faults.kind import STOPPED, Kind, Told, told
from benchmarks.faults.scene import NeverCameError, Scene

Harm = Callable[[Path, Random], None]
Find = Callable[[Scene], Path]


def tear(path: Path, chance: Random) -> None:
    """Cut a file off at a random place."""
    os.truncate(path, chance.randrange(path.stat().st_size))


def empty(path: Path, _chance: Random) -> None:
    """Leave nothing of a file but its name, as after a power failure."""
    os.truncate(path, 0)


def flip(path: Path, chance: Random) -> None:
    """Flip one bit."""
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def spoil(path: Path, chance: Random) -> None:
    """Flip the highest bit of a character, which leaves no valid JSON: a flipped digit would be
    another loss.
    """
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 0x80
    path.write_bytes(content)


def remove(path: Path, _chance: Random) -> None:
    """Remove a file or a folder."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def checkpoints(scene: Scene) -> list[Path]:
    """Return the run's checkpoints, the oldest first."""
    found = sorted(
        path for path in scene.run.checkpoints_dir.glob("step-*") if path.name[5:].isdigit()
    )
    if len(found) < 2:
        raise NeverCameError(f"{len(found)} checkpoints")
    return found


def newest(name: str) -> Find:
    """Return how to find a file of the newest checkpoint."""
    return lambda scene: checkpoints(scene)[-1] / name


def of_run(pattern: str) -> Find:
    """Return how to find the last file of the run that matches a pattern."""
    return lambda scene: max(scene.run.path.glob(pattern))


def harmed(find: Find, harm: Harm) -> Callable[[Scene, Random], None]:
    """Return the effect of a harm to a file, of which a copy is set aside."""

    def inject(scene: Scene, chance: Random) -> None:
        path = find(scene)
        scene.set_aside(path)
        harm(path, chance)

    return inject


def harm_all_checkpoints(scene: Scene, chance: Random) -> None:
    """Tear the states of every checkpoint."""
    for checkpoint in checkpoints(scene):
        scene.set_aside(checkpoint)
        tear(checkpoint / "optimizer" / "rank_00000.states", chance)


def rename_newest(scene: Scene, _chance: Random) -> None:
    """Rename the newest checkpoint, so that its name and its manifest disagree about the step."""
    path = checkpoints(scene)[-1]
    scene.set_aside(path)
    path.rename(path.with_name("step-000099"))


def plain_file(scene: Scene, _chance: Random) -> None:
    """Put a plain file among the checkpoints that is named like a later one."""
    (scene.run.checkpoints_dir / "step-000099").write_text("not a checkpoint\n")


def half_a_record(scene: Scene, chance: Random) -> None:
    """Leave half a record at the end of the metrics, as a full disk or a killed rank does."""
    path = max(scene.run.metrics_dir.glob("*.jsonl"))
    line = path.read_bytes().splitlines()[-1]
    with path.open("ab") as file:
        file.write(line[: chance.randrange(1, len(line))])


def partial_left(scene: Scene, chance: Random) -> None:
    """Leave a checkpoint that was being written."""
    newest_ = checkpoints(scene)[-1]
    partial = newest_.with_name("step-000098.partial")
    shutil.copytree(newest_, partial)
    tear(partial / "optimizer" / "rank_00001.states", chance)


def _nothing(_scene: Scene) -> None:
    """Leave everything as it is."""


def _kind(
    name: str,
    what: str,
    inject: Callable[[Scene, Random], None],
    *,
    right: frozenset[Told] = told(STOPPED),
    refusals: tuple[str, ...] = (),
    loses_records: bool = False,
    loses_checkpoint: bool = False,
    starts_over: bool = False,
) -> Kind:
    return Kind(
        name,
        "damage",
        what,
        inject,
        right,
        begin="stopped",
        moments=("stopped",),
        refusals=frozenset(refusals),
        remedy=(_nothing if starts_over else Scene.put_back) if refusals else None,
        starts_over=starts_over,
        loses_records=loses_records,
        loses_checkpoint=loses_checkpoint,
    )


_HARMS: dict[str, Harm] = {"torn": tear, "empty": empty, "flipped": flip, "missing": remove}
_CHECKPOINT = {
    "states": "optimizer/rank_00001.states",
    "states-manifest": "optimizer/rank_00000.json",
    "manifest": "checkpoint.json",
}


def _checkpoint_files() -> tuple[Kind, ...]:
    return tuple(
        _kind(
            f"checkpoint-{part}-{how}",
            f"{name} of the newest checkpoint is {how}",
            harmed(newest(name), harm),
            loses_checkpoint=True,
        )
        for part, name in _CHECKPOINT.items()
        for how, harm in _HARMS.items()
    )


def _run_files() -> tuple[Kind, ...]:
    """Files of the run that a resume needs, or does without."""
    lost = told(("lost", ""))
    state = tuple(
        _kind(
            f"state-{how}",
            f"state.json is {how}",
            harmed(of_run("state.json"), harm),
            right=lost,
            refusals=("missing" if how == "missing" else "unreadable-state",),
        )
        for how, harm in _HARMS.items()
        if how != "flipped"  # a flipped digit may leave a state that can be read
    )
    spec = tuple(
        _kind(
            f"spec-{how}",
            f"spec.json is {how}",
            harmed(of_run("spec.json"), harm),
            refusals=("missing" if how == "missing" else "unreadable-spec",),
        )
        for how, harm in (("torn", tear), ("empty", empty))
    )
    metrics = tuple(
        _kind(
            f"metrics-{how}",
            f"the metrics are {how}",
            harmed(of_run("metrics/*.jsonl"), harm),
            loses_records=True,
        )
        for how, harm in (_HARMS | {"flipped": spoil}).items()
    )
    attempt = tuple(
        _kind(
            f"{name}-{how}",
            f"{name}.json of the last attempt is {how}",
            harmed(of_run(f"attempts/*/{name}.json"), harm),
        )
        for name in ("launch", "command")
        for how, harm in (("torn", tear), ("missing", remove))
    )
    return (*state, *spec, *metrics, *attempt)


def _missing_folder(scene: Scene, chance: Random) -> None:
    harmed(lambda scene: scene.run.checkpoints_dir, remove)(scene, chance)


KINDS = (
    *_checkpoint_files(),
    *_run_files(),
    _kind(
        "checkpoints-all-torn",
        "every checkpoint is torn",
        harm_all_checkpoints,
        refusals=("checkpoints-unreadable",),
    ),
    _kind(
        "checkpoints-missing",
        "the folder of the checkpoints is gone",
        _missing_folder,
        refusals=("checkpoint-missing",),
    ),
    _kind(
        "checkpoints-missing-start-over",
        "the folder of the checkpoints is gone, and the run starts over",
        _missing_folder,
        refusals=("checkpoint-missing",),
        starts_over=True,
    ),
    _kind(
        "checkpoint-newest-missing",
        "the newest checkpoint is gone",
        harmed(newest(""), remove),
        loses_checkpoint=True,
    ),
    _kind(
        "checkpoint-renamed",
        "name and manifest of the newest checkpoint disagree",
        rename_newest,
        loses_checkpoint=True,
    ),
    _kind("checkpoint-plain-file", "a plain file is named like a later checkpoint", plain_file),
    _kind("half-a-record", "half a record ends the metrics", half_a_record),
    _kind("partial-left", "a partial checkpoint was left", partial_left),
)
