"""Checkpoints converted between ours and DeepSpeed's, in a helper process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from so_tui.launch.helpers import stream_tool
from so_tui.runs import RunDirectory, create_run, delete_run
from so_tui.runs.outcome import OutcomeCode
from so_tui.runs.records import RunState
from so_tui.runs.state import write_state_even_if_full
from so_tui.runs.unobserved import EXIT_CODES
from so_tui.spec import RunSpec

Tell = Callable[[str], None]


def to_deepspeed(run: RunDirectory, folder: Path, tell: Tell) -> None:
    """Write a run's newest checkpoint in DeepSpeed's universal format.

    Args:
        run: The run.
        folder: Where to; an older conversion or export is replaced.
        tell: Receives what is done, in words.

    Raises:
        InputError: The run has no checkpoint, or the folder holds something else.
        ToolError: It cannot be read or written.
    """
    _answer({"run": str(run.path), "to": str(folder)}, tell)


def from_deepspeed(source: Path, spec: RunSpec, runs_dir: Path | None, tell: Tell) -> RunDirectory:
    """Make a run that has stopped where DeepSpeed's ZeRO-3 saved a checkpoint, so that ``resume`` continues from there.

    Args:
        source: The folder given to DeepSpeed's ``save_checkpoint``, or that of a step in it.
        spec: What the run trains; of the model of the checkpoint.
        runs_dir: Folder of the run; the default folder if absent.
        tell: Receives what is done, in words.

    Raises:
        InputError: The folder has no such checkpoint, or one of another model; no run is left behind.
        ToolError: It cannot be read or written; no run is left behind.
    """
    run = create_run(spec, runs_dir)
    try:
        step = int(_answer({"deepspeed": str(source), "run": str(run.path)}, tell)["step"])
    except BaseException:
        delete_run(run)
        raise
    now = time.time()
    state = RunState(
        name=run.name,
        state="stopped",
        code=OutcomeCode.STOPPED,
        exit_code=EXIT_CODES["stopped"],
        step=step,
        total_steps=spec.train.steps,
        saved_step=step,
        saved_at=now,
        started=now,
        ended=now,
    )
    write_state_even_if_full(run, state)
    return run


def _answer(request: dict[str, Any], tell: Tell) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    for answer in stream_tool("convert", request):
        if message := answer.get("message"):
            tell(str(message))
    return answer
