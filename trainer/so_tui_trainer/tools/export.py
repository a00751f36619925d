"""Export a run's newest checkpoint as a Hugging Face folder.

``{"run": path, "to": path}`` in, ``{"folder", "bytes", "step", "done"}`` out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from so_tui_trainer.tools.channel import Answer, serve
from so_tui_trainer.tools.checkpoints import refuse_code_of_others, with_newest
from so_tui_trainer.tools.hub import stay_offline_when_cut_off


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

    run = RunDirectory(Path(request["run"]))
    folder = Path(request.get("to") or run.path / "export").expanduser().resolve()
    refuse_foreign(folder)
    if request.get("to"):
        folder.parent.mkdir(parents=True, exist_ok=True)  # But never recreate a run's own folder that somebody has deleted.
    spec = read_spec(run)
    refuse_code_of_others(run, spec)
    step, size = yield from with_newest(
        run, spec, "exporting", lambda found: (found.manifest.step, export(found.path, folder, run.name, spec))
    )
    yield {"folder": str(folder), "bytes": size, "step": step, "done": True}


if __name__ == "__main__":
    sys.exit(serve(export_run))
