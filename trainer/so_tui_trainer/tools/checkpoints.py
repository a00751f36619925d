"""The newest checkpoint of a run, for helpers that make a whole model of it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from so_tui.units import thousands
from so_tui_trainer.tools.channel import Answer

if TYPE_CHECKING:
    from so_tui.runs import RunDirectory
    from so_tui.spec import RunSpec
    from so_tui_trainer.checkpoint import Found

Result = TypeVar("Result")
_PROGRESS_S = 0.5
"""Between two answers that say how far the work is."""


def with_newest(
    run: RunDirectory,
    spec: RunSpec,
    doing: str,
    work: Callable[[Found], Result],
    progress: Callable[[], Answer] = dict,
) -> Generator[Answer, None, Result]:
    """Call ``work`` with the newest readable checkpoint; again with a newer one if the run, which may be going on, replaces it meanwhile.

    Args:
        run: The run.
        spec: Its spec.
        doing: What is done with the checkpoint, for the message.
        work: Reads the checkpoint, in a thread.
        progress: Returns an answer that says how far it is; an empty one is left out.

    Yields:
        Messages and progress.

    Returns:
        What ``work`` returns.

    Raises:
        InputError: The run has no checkpoint that can be read (``checkpoint-missing``, ``checkpoints-unreadable``).
    """
    from superoffload import OffloadError

    while True:
        found = _newest(run, spec)
        for damage in found.damaged:
            yield {
                "message": f"{damage.path.name} cannot be used ({damage.reason}); {doing} an older one"
            }
        yield {"message": f"{doing} step {thousands(found.manifest.step)} of {run.name}"}
        try:
            return (yield from _reported(partial(work, found), progress))
        except (OSError, OffloadError):
            if found.path.is_dir():
                raise


def _reported(
    work: Callable[[], Result], progress: Callable[[], Answer]
) -> Generator[Answer, None, Result]:
    """Do work in a thread; yield its progress meanwhile, whenever it has changed, and at the end. Return what the work returns."""
    last: Answer = {}
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        while True:
            wait([future], timeout=_PROGRESS_S)
            ended = future.done()  # asked first, so that what is said last is of the end
            if (now := progress()) != last:
                yield (last := now)
            if ended:
                return future.result()


def refuse_code_of_others(run: RunDirectory, spec: RunSpec) -> None:
    """Refuse to run a model's code because of a spec that this user did not write.

    Raises:
        InputError: ``model.trust_remote_code`` is set in the spec of another user, or in one that others can write (``not-your-spec``).
    """
    from so_tui.spec import InputError, Problem
    from so_tui.trust.ownership import distrust_of_file

    if spec.model.trust_remote_code and (distrust := distrust_of_file(run.spec_path)) is not None:
        message = f"asks to run the model's code, but {run.spec_path} is not a file that only you can write ({distrust})"
        remedy = "Copy the run, read its spec.json, and use the copy."
        raise InputError(
            [
                Problem(
                    code="not-your-spec",
                    field="model.trust_remote_code",
                    value="true",
                    message=message,
                    remedy=remedy,
                )
            ]
        )


def _newest(run: RunDirectory, spec: RunSpec) -> Found:
    from so_tui.runs.checkpoints import checkpoints_folder
    from so_tui.runs.manifest import run_id
    from so_tui.spec import InputError, Problem
    from so_tui_trainer.checkpoint import newest
    from so_tui_trainer.failures import TrainingError

    try:
        found = newest(checkpoints_folder(run, spec), run_id(run))
    except TrainingError as error:
        problem = Problem(
            code=error.code,
            field="run",
            value=run.name,
            message=error.reason,
            remedy=error.suggestion,
        )
        raise InputError([problem]) from error
    if found is None:
        remedy = "Resume it and let it save one: at its end, on stop, every `checkpoint.every_steps` or `every_minutes`."
        problem = Problem(
            code="checkpoint-missing",
            field="run",
            value=run.name,
            message="has no checkpoint yet",
            remedy=remedy,
        )
        raise InputError([problem])
    return found
