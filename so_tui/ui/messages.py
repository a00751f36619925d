"""Messages from workers to screens: posted from a thread, handled in the event loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from textual.message import Message
from textual.worker import Worker, WorkerState, get_current_worker

if TYPE_CHECKING:
    from textual.app import App
    from textual.dom import DOMNode
    from textual.message_pump import MessagePump

    from so_tui.runs import RunDirectory
    from so_tui.spec import SoTuiError


def answer(to: MessagePump, take: Callable[..., object], *results: object) -> None:
    """Have the event loop take a worker's results, unless the worker was cancelled: the thread of
    an exclusive worker runs on after another has replaced it.
    """
    if not get_current_worker().is_cancelled:
        to.call_later(take, *results)


class Offer(NamedTuple):
    """An action that is offered where something failed."""

    text: str
    action: Callable[[], None]


@dataclass
class Failed(Message):
    """A worker failed; ``title`` names what was tried, and ``offer`` is what the user can do about
    it at once.
    """

    title: str
    lines: tuple[str, ...]
    _: KW_ONLY
    offer: Offer | None = None


def failure(title: str, error: SoTuiError) -> Failed:
    """Return the message that something was refused, with its reasons."""
    return Failed(title, tuple(str(error).splitlines()))


def code_refused(
    app: App[None], title: str, error: SoTuiError, proceed: Callable[[], object]
) -> Failed | None:
    """Return the message that a model's code was refused because the user has not allowed it, with
    the offer to do so and to ``proceed``; None if something else was refused. Takes a while.
    """
    from so_tui.launch.helper_jobs import refused_code
    from so_tui.spec.consents import allow

    codes = refused_code(error)
    if not codes:
        return None

    def trust() -> None:
        with reporting(app, "The code", "trusted"):
            for code in codes:
                allow(code)
            proceed()

    lines = tuple(line for code in codes for line in code.lines())
    return Failed(
        title, (*lines, "Trust it only if you have read it."), offer=Offer("Trust this code", trust)
    )


@contextmanager
def reporting(app: App[None], subject: str, done: str, path: Path | str = "") -> Iterator[None]:
    """Tell the user if ``subject`` was not ``done``, since that was refused or a file could not be
    read or written, such as ``path``.
    """
    from so_tui.spec.errors import SoTuiError

    try:
        yield
    except SoTuiError as error:
        app.post_message(failure(f"{subject} was not {done}", error))
    except OSError as error:
        app.post_message(
            Failed(
                f"{subject} could not be {done}", (f"{error.filename or path}: {error.strerror}",)
            )
        )


def in_thread(node: DOMNode, work: Callable[[], object], name: str, *, group: str) -> None:
    """Run ``work`` in a thread; the application tells the user if it fails unexpectedly."""
    node.run_worker(work, name=name, group=group, thread=True, exit_on_error=False)


def is_working(node: DOMNode, group: str) -> bool:
    """Return whether a worker of a group has been started and has not ended."""
    return any(worker.group == group and not worker.is_finished for worker in node.workers)


def unexpected_error(event: Worker.StateChanged) -> str:
    """Return the error with which a worker has ended unexpectedly; empty if it has not."""
    error = event.worker.error
    return f"{type(error).__name__}: {error}" if event.state is WorkerState.ERROR else ""


@dataclass
class NotLaunched(Failed):
    """A launch was refused, or failed before its run was in a supervisor's hands."""

    error: SoTuiError


@dataclass
class Launched(Message):
    """A run was started and is in the supervisor's hands."""

    run: RunDirectory
