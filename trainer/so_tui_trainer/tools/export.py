"""Export a run's newest checkpoint as a Hugging Face folder.

``{"run": path, "to": path}`` in; ``{"progress": {"doing", "done_bytes", "total_bytes", ...}}`` out
while tensors are read and files written, then ``{"folder", "bytes", "step", "done"}``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from so_tui_trainer.hub import stay_offline_when_cut_off
from so_tui_trainer.tools.channel import Answer, serve, with_newest

if TYPE_CHECKING:
    from so_tui_trainer.export import Stage


def _export_run(request: Answer) -> Iterator[Answer]:
    """Export the newest readable checkpoint.

    Yields:
        Messages and progress, then the answer.

    Raises:
        InputError: The run has no checkpoint, the target is not an export, or tokenizer or
            configuration cannot be loaded.
    """
    stay_offline_when_cut_off()
    from so_tui.runs import RunDirectory, read_spec
    from so_tui.trust.folders import is_shared
    from so_tui_trainer.export import Stage, export, target_of

    run = RunDirectory(Path(request["run"]))
    folder = target_of(request.get("to") or run.path / "export")
    if request.get("to"):
        folder.parent.mkdir(
            parents=True, exist_ok=True
        )  # But never recreate a run's own folder that somebody has deleted.
    spec = read_spec(run)
    stage = Stage()
    shared = not request.get("to") and is_shared(run.path)
    step, size = yield from with_newest(
        run,
        spec,
        "exporting",
        lambda found: (
            found.manifest.step,
            export(found.path, folder, run.name, spec, stage, shared=shared),
        ),
        lambda: _progress(stage),
    )
    yield {"folder": str(folder), "bytes": size, "step": step, "done": True}


def _progress(stage: Stage) -> Answer:
    if not stage.total_bytes:
        return {}
    return {
        "progress": {
            "doing": stage.doing,
            "done_bytes": stage.done_bytes(),
            "total_bytes": stage.total_bytes,
            "done_tensors": stage.done_tensors,
            "total_tensors": stage.total_tensors,
        }
    }


if __name__ == "__main__":
    sys.exit(serve(_export_run))
