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
    from so_tui.spec import RunSpec
    from so_tui_trainer.checkpoint import Found


def export_run(request: Answer) -> Iterator[Answer]:
    """Export the newest readable checkpoint.

    Yields:
        Messages, then the answer.

    Raises:
        InputError: The run has no checkpoint, the target is not an export, or tokenizer or configuration cannot be loaded.
    """
    stay_offline_when_cut_off()
    from so_tui.runs import RunDirectory, read_spec
    from so_tui_trainer.export import export, refuse_foreign
    from superoffload import OffloadError

    run = RunDirectory(Path(request["run"]))
    folder = Path(request.get("to") or run.path / "export").expanduser().resolve()
    refuse_foreign(folder)
    if request.get("to"):
        folder.parent.mkdir(parents=True, exist_ok=True)  # But never recreate a run's own folder that somebody has deleted.
    spec = read_spec(run)
    refuse_code_of_others(run, spec)
    while True:
        found = _newest(run, spec)
        for damage in found.damaged:
            yield {"message": f"{damage.path.name} cannot be used ({damage.reason}); exporting an older one"}
        yield {"message": f"exporting step {found.manifest.step} of {run.name}"}
        try:
            size = export(found.path, folder, run.name, spec)
        except (OSError, OffloadError):
            if found.path.is_dir():
                raise
            continue  # The run is still going, and has replaced it by a newer one.
        yield {"folder": str(folder), "bytes": size, "step": found.manifest.step, "done": True}
        return


def refuse_code_of_others(run: RunDirectory, spec: RunSpec) -> None:
    """Refuse to run a model's code because of a spec that this user did not write.

    Raises:
        InputError: ``model.trust_remote_code`` is set in the spec of another user, or in one that others can write (``not-your-spec``).
    """
    from so_tui.spec import InputError, Problem
    from so_tui.trust.ownership import distrust_of_file

    if spec.model.trust_remote_code and (distrust := distrust_of_file(run.spec_path)) is not None:
        message = f"asks to run the model's code, but {run.spec_path} is not a file that only you can write ({distrust})"
        remedy = "Copy the run, read its spec.json, and export the copy."
        raise InputError([Problem(code="not-your-spec", field="model.trust_remote_code", value="true", message=message, remedy=remedy)])


def _newest(run: RunDirectory, spec: RunSpec) -> Found:
    from so_tui.runs.checkpoints import checkpoints_folder
    from so_tui.runs.manifest import run_id
    from so_tui.spec import InputError, Problem
    from so_tui_trainer.checkpoint import newest
    from so_tui_trainer.failures import TrainingError

    try:
        found = newest(checkpoints_folder(run, spec), run_id(run))
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
