"""How a helper process answers: a request on stdin, or one in each line; lines of JSON on stdout,
everything else on stderr.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import traceback
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from so_tui.spec import InputError, Problem, RunSpec, SoTuiError, first_line
from so_tui.spec.errors import reject
from so_tui.units import thousands
from so_tui_trainer import step_limits
from so_tui_trainer.failures import ALLOCATION_FAILED
from superoffload.errors import OffloadError

if TYPE_CHECKING:
    from so_tui.runs import RunDirectory
    from so_tui_trainer.checkpoint_folder import Found


Answer = dict[str, Any]
Item = TypeVar("Item")
Other = TypeVar("Other")
Result = TypeVar("Result")


def serve(work: Callable[[Answer], Iterator[Answer]]) -> int:
    """Answer the request on stdin.

    Problems that a user can solve are an answer too: ``{"problems": [...], "done": true}``, with
    exit code 2 (or the error's own).

    Args:
        work: Yields the answers to a request.

    Returns:
        The exit code.
    """
    return serve_lines(lambda lines: work(json.loads("".join(lines))))


def serve_lines(work: Callable[[Iterator[str]], Iterator[Answer]]) -> int:
    """Answer requests on stdin as they come, one in each line; otherwise like ``serve``."""
    # Libraries print to stdout, which is reserved for answers.
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    code = 0
    step_limits.begin()
    try:
        for answer in work(iter(sys.stdin.readline, "")):
            stream.write(json.dumps(answer) + "\n")
            stream.flush()
    except (KeyboardInterrupt, SystemExit, ModuleNotFoundError):
        raise
    except BaseException as error:  # noqa: BLE001 - panics of packages in Rust are no Exception
        problems = error.problems if isinstance(error, InputError) else (_problem(error),)
        stream.write(json.dumps({"problems": msgspec.to_builtins(problems), "done": True}) + "\n")
        code = error.exit_code if isinstance(error, SoTuiError) else 1
        with suppress(OSError):  # the disk that has stderr may be the one that is full
            if not isinstance(error, SoTuiError):
                traceback.print_exc()
            print(error, file=sys.stderr)
    stream.close()
    return code


def _problem(error: BaseException) -> Problem:
    """Return the problem of an error that names none itself."""
    where = next(iter(getattr(error, "__notes__", ())), f"tools.{Path(sys.argv[0]).stem}")
    if isinstance(error, SoTuiError | OffloadError):
        return Problem(
            (isinstance(error, OffloadError) and error.code) or "error",
            where,
            "",
            str(error).removesuffix("."),
            "",
        )
    if isinstance(error, MemoryError) or any(words in str(error) for words in ALLOCATION_FAILED):
        return Problem(
            "helper-out-of-memory",
            where,
            "",
            "needs more memory than the system gives",
            "Correct or remove it, or free some memory.",
        )
    if isinstance(error, RecursionError):
        return Problem(
            "helper-too-deep", where, "", "is nested too deeply", "Correct or remove it."
        )
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return Problem(
            "file-size-limit",
            where,
            "",
            "would write a file beyond the largest size allowed",
            "Raise the limit of this shell or job (`ulimit -f`).",
        )
    return Problem(
        "helper-failed",
        where,
        "",
        f"fails ({type(error).__name__}: {first_line(error)})",
        "Correct or remove it; `so-tui --verbose` with the same command shows where it fails.",
    )


def changed(
    steps: Generator[Item, None, Result], change: Callable[[Item], Other]
) -> Generator[Other, None, Result]:
    """Yield what ``steps`` yields, changed, and return what it returns."""
    while True:
        try:
            item = next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result
        yield change(item)


# The newest checkpoint of a run, for helpers that make a whole model of it.


_PROGRESS_S = 0.5
"""Between two answers that say how far the work is."""


def with_newest(
    run: RunDirectory,
    spec: RunSpec,
    doing: str,
    work: Callable[[Found], Result],
    progress: Callable[[], Answer] = dict,
) -> Generator[Answer, None, Result]:
    """Call ``work`` with the newest readable checkpoint; again with a newer one if the run, which
    may be going on, replaces it meanwhile.

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
        InputError: The run has no checkpoint that can be read (``checkpoint-missing``,
            ``checkpoints-unreadable``).
    """
    from superoffload import OffloadError

    while True:
        found = _newest(run, spec)
        for damage in found.damaged:
            yield {
                "message": (
                    f"{damage.path.name} cannot be used ({damage.reason}); {doing} an older one"
                )
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
    """Do work in a thread; yield its progress meanwhile, whenever it has changed, and at the end.
    Return what the work returns.
    """
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


def _newest(run: RunDirectory, spec: RunSpec) -> Found:
    from so_tui.runs.directory import checkpoints_folder, missing_checkpoints, run_id
    from so_tui.runs.state import read_state
    from so_tui.trust.text import so_tui_command
    from so_tui_trainer.checkpoint_folder import newest
    from so_tui_trainer.failures import TrainingError

    try:
        identity = run_id(run)
    except (OSError, msgspec.DecodeError) as error:
        raise reject(
            "unreadable-run",
            "run",
            run.name,
            f"its checkpoints cannot be told from another's: run.json cannot be read ({error})",
            "Check that this is the folder of a run, and that its file system answers.",
        ) from error
    try:
        found = newest(checkpoints_folder(run, spec), identity, run.name)
    except TrainingError as error:
        raise reject(
            error.code,
            "run",
            run.name,
            error.reason,
            error.suggestion,
        ) from error
    if found is None:
        if (missing := missing_checkpoints(run, spec, read_state(run))) is not None:
            raise InputError([missing])
        raise reject(
            "checkpoint-missing",
            "run",
            run.name,
            "has no checkpoint yet",
            "It saves one on stop, every `checkpoint.every_steps` or `every_minutes`, and at its "
            f"end. If it has ended without: "
            f"`{so_tui_command('resume', run.name, '--set', 'checkpoint.at_end=true')}`, and more "
            "`train.steps` if it finished.",
        )
    return found
