"""A run's newest checkpoint as a Hugging Face folder: ``{"run": path, "to": path}`` in, ``{"folder", "bytes", "step", "done"}`` out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from so_tui_trainer.tools.channel import Answer, serve


def export_run(request: Answer) -> Iterator[Answer]:
    """Raises InputError when the run has no checkpoint, something else than an export lies at the target, or tokenizer or configuration
    cannot be had.
    """
    from so_tui.runs import RunDirectory, read_spec
    from so_tui.spec import InputError, Problem
    from so_tui_trainer.checkpoint import folder_of, newest
    from so_tui_trainer.export import export, refuse_foreign

    run = RunDirectory(Path(request["run"]))
    found = newest(folder_of(run, read_spec(run)))
    if found is None:
        remedy = "Resume it and let it save one: at its end, on stop, every `checkpoint.every_steps` or `every_minutes`."
        raise InputError([Problem(field="run", value=run.name, message="has no checkpoint to export", remedy=remedy)])
    checkpoint, manifest = found.path, found.manifest
    folder = Path(request.get("to") or run.path / "export").expanduser().resolve()
    refuse_foreign(folder)
    yield {"message": f"exporting step {manifest.step} of {run.name}"}
    yield {"folder": str(folder), "bytes": export(checkpoint, folder, run.name), "step": manifest.step, "done": True}


if __name__ == "__main__":
    sys.exit(serve(export_run))
