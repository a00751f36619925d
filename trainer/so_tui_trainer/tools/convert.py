"""Convert checkpoints between ours and DeepSpeed's.

``{"run": path, "to": path}`` writes a run's newest checkpoint in DeepSpeed's universal format, and
answers ``{"folder", "step", "done"}``. ``{"deepspeed": path, "run": path}`` makes what DeepSpeed
saved the first checkpoint of a new run, and answers ``{"step", "moments", "done"}``.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import asdict

from so_tui.spec.errors import reject
from so_tui.units import plural, thousands
from so_tui_trainer.tools.channel import Answer, serve

if TYPE_CHECKING:
    from so_tui.spec import RunSpec
    from superoffload import DeepSpeedStates, Progress


_STATES_BYTES = 12
"""Bytes of a checkpoint per parameter."""
_Count = Annotated[int, Meta(ge=0)]


class _Extra(Struct, frozen=True, kw_only=True):
    """Our additions to DeepSpeed's checkpoint; one that another trainer wrote has none."""

    data: str = ""
    useful_tokens: _Count = 0
    trained_tokens: _Count = 0


def convert(request: Answer) -> Iterator[Answer]:
    """Convert in the direction that the request has.

    Raises:
        InputError: The run has no checkpoint; the target has something else; the source is no
            checkpoint of DeepSpeed's ZeRO-3 (codes of ``superoffload.deepspeed_states``), or one of
            another model (``checkpoint-differs``).
        OffloadError: A file of the checkpoint is missing or damaged.
    """
    run = Path(request["run"])
    return (
        _from_deepspeed(Path(request["deepspeed"]), run)
        if "deepspeed" in request
        else _to_deepspeed(run, Path(request["to"]))
    )


def _to_deepspeed(path: Path, folder: Path) -> Iterator[Answer]:
    import so_tui
    import superoffload
    from so_tui.runs import RunDirectory, read_spec
    from so_tui_trainer.checkpoint_folder import Found, optimizer_folder
    from so_tui_trainer.export import ExportMarker, refuse_without_room, replacing, target_of
    from so_tui_trainer.model.trained import PREFIX
    from so_tui_trainer.tools.channel import with_newest

    run, folder = RunDirectory(path), target_of(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    spec = read_spec(run)
    refuse_without_room(
        folder,
        _STATES_BYTES * spec.model.parameter_count,
    )

    def write(found: Found) -> int:
        manifest = found.manifest
        extra = _Extra(
            data=manifest.data,
            useful_tokens=manifest.useful_tokens,
            trained_tokens=manifest.trained_tokens,
        )
        progress = superoffload.Progress(manifest.step, manifest.consumed_sequences, asdict(extra))
        with replacing(
            folder, ExportMarker(run=run.name, step=manifest.step, version=so_tui.__version__)
        ) as partial:
            superoffload.write_universal(
                optimizer_folder(found.path),
                partial,
                progress,
                lambda name: name.removeprefix(PREFIX),
            )
        return manifest.step

    step = yield from with_newest(run, spec, "converting", write)
    yield {"folder": str(folder), "step": step, "done": True}


def _from_deepspeed(source: Path, path: Path) -> Iterator[Answer]:
    import superoffload
    from so_tui.model.profile import profile_of
    from so_tui.runs import RunDirectory, read_spec
    from so_tui.runs.directory import run_id
    from so_tui_trainer import checkpoint_folder
    from so_tui_trainer.model.trained import PREFIX

    run = RunDirectory(path)
    spec = read_spec(run)
    found = _read(source.expanduser())
    parameters = profile_of(spec.model).trainable
    wanted = {parameter.name: parameter.numel for parameter in parameters}
    if differing := sorted({name for name, _ in wanted.items() ^ found.numels.items()}):
        names = f"{', '.join(differing[:3])}{' ...' if len(differing) > 3 else ''}"
        raise reject(
            "checkpoint-differs",
            "checkpoint",
            str(source),
            f"is not of the model of {spec.label}: {len(differing)} parameters differ in name or "
            f"size: {names}",
            "Name the preset of its model with --as.",
        )
    yield {
        "message": (
            f"converting step {thousands(found.progress.step)}, "
            f"{plural(len(found.numels), 'parameter')}"
        )
    }
    folder = checkpoint_folder.claim(run, spec)
    try:
        field = "checkpoint.folder" if spec.checkpoint.folder else "--runs-dir"
        checkpoint_folder.make_room(folder, _STATES_BYTES * sum(found.numels.values()), field)
        partial = checkpoint_folder.begin(folder, found.progress.step)
        superoffload.write_states(
            found, checkpoint_folder.optimizer_folder(partial), lambda name: PREFIX + name
        )
        checkpoint_folder.complete(partial, _manifest(run_id(run), found.progress, spec))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # the run is new, and nothing else is in it
        raise
    yield {"step": found.progress.step, "moments": found.moments, "done": True}


def _read(source: Path) -> DeepSpeedStates:
    import superoffload

    try:
        return superoffload.deepspeed_states(source)
    except superoffload.OffloadError as error:
        raise reject(
            error.code,
            "checkpoint",
            str(source),
            str(error).rstrip("."),
            "Name the folder that was given to DeepSpeed's save_checkpoint, or that of a step in "
            "it.",
        ) from error


def _manifest(run: str, progress: Progress, spec: RunSpec) -> Any:
    from so_tui_trainer.checkpoint_folder import Manifest

    extra = _Extra()
    with suppress(msgspec.ValidationError):  # another trainer wrote it
        extra = msgspec.convert(progress.extra, _Extra)
    return Manifest(
        run=run,
        step=progress.step,
        total_steps=spec.train.steps,
        ranks=1,
        consumed_sequences=progress.samples,
        last_loss=None,
        spec=spec,
        **asdict(extra),
    )


if __name__ == "__main__":
    sys.exit(serve(convert))
