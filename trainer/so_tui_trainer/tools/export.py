"""Export a run's newest checkpoint as a Hugging Face folder.

``{"run": path, "to": path}`` in, ``{"folder", "bytes", "step", "done"}`` out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from so_tui_trainer.tools.channel import Answer, serve
from so_tui_trainer.tools.hub import stay_offline_when_cut_off

if TYPE_CHECKING:
    from so_tui.runs import RunDirectory
    from so_tui_trainer.checkpoint import Found


def export_run(request: Answer) -> Iterator[Answer]:
    """Export the newest readable checkpoint.

    Yields:
        Messages, then the answer.

    Raises:
        InputError: The run has no checkpoint, the target is not an export, or tokenizer or configuration cannot be loaded.
    """
    stay_offline_when_cut_off()
    from so_tui.runs import RunDirectory
    from so_tui_trainer.export import export, refuse_foreign
    from superoffload import OffloadError

    run = RunDirectory(Path(request["run"]))
    folder = Path(request.get("to") or run.path / "export").expanduser().resolve()
    refuse_foreign(folder)
    if request.get("to"):
        folder.parent.mkdir(parents=True, exist_ok=True)  # But never recreate a run's own folder that somebody has deleted.
    while True:
        found = _newest(run)
        for damage in found.damaged:
            yield {"message": f"{damage.path.name} cannot be read ({damage.reason}); exporting an older one"}
        yield {"message": f"exporting step {found.manifest.step} of {run.name}"}
        try:
            size = export(found.path, folder, run.name)
        except (OSError, OffloadError):
            if found.path.is_dir():
                raise
            continue  # The run is still going, and has replaced it by a newer one.
        yield {"folder": str(folder), "bytes": size, "step": found.manifest.step, "done": True}
        return


def _newest(run: RunDirectory) -> Found:
    from so_tui.runs import read_spec
    from so_tui.spec import InputError, Problem
    from so_tui_trainer.checkpoint import folder_of, newest
    from so_tui_trainer.failures import TrainingError

    try:
        found = newest(folder_of(run, read_spec(run)))
    except TrainingError as error:
        problem = Problem(code=error.code, field="run", value=run.name, message=error.reason, remedy=error.suggestion)
        raise InputError([problem]) from error
    if found is None:
        remedy = "Resume it and let it save one: at its end, on stop, every `checkpoint.every_steps` or `every_minutes`."
        problem = Problem(code="checkpoint-missing", field="run", value=run.name, message="has no checkpoint to export", remedy=remedy)
        raise InputError([problem])
    return found


if __name__ == "__main__":
    sys.exit(serve(export_run))
