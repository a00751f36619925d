"""Whether a run is this user's own. What belongs to another user, or can be changed by one, is only read.

Refusal codes:
    not-your-run: Another user owns the folder, or a file in it that decides what happens.
    others-can-write, wrong-kind, missing, unreadable: The run cannot be acted upon for the reason that ``Distrust`` names.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from so_tui.runs.directory import RunDirectory
from so_tui.spec.errors import Refusal, Refused
from so_tui.trust.ownership import Distrust, distrust_of_file, distrust_of_folder
from so_tui.trust.printable import printable_line, quoted

NOT_YOUR_RUN = "not-your-run"


class NotOwn(Struct, frozen=True):
    """The first file or folder of a run that is not this user's own, and why."""

    path: Path
    distrust: Distrust


def not_own(run: RunDirectory, attempt: int | None = None) -> NotOwn | None:
    """Return why a run is not this user's own; None if it is.

    Args:
        run: The run.
        attempt: An attempt whose folder, with every file in it, must be this user's own as well.
    """
    return next(_not_own(run, attempt), None)


def refuse_unless_own(run: RunDirectory, attempt: int | None = None) -> None:
    """Refuse to start processes for a run that is not this user's own.

    Raises:
        Refused: With the code of the first reason.
    """
    if (found := not_own(run, attempt)) is not None:
        raise Refused([_refusal(run, found)])


def refuse_another_users(run: RunDirectory) -> None:
    """Refuse to ask anything of another user's run, or through a link.

    One's own run may be asked even if others can write to it: a request starts nothing.

    Raises:
        Refused: The folder, or its folder of requests, is another user's or a link.
    """
    for folder in (run.path, run.control_dir):
        distrust = distrust_of_folder(folder)
        if distrust in (Distrust.OTHER_OWNER, Distrust.WRONG_KIND):
            raise Refused([_refusal(run, NotOwn(folder, distrust))])


def _not_own(run: RunDirectory, attempt: int | None) -> Iterator[NotOwn]:
    yield from _found(run.path, distrust_of_folder(run.path))
    yield from _found(run.attempts_dir, distrust_of_folder(run.attempts_dir))
    for file in (run.state_path, run.spec_path):
        yield from _found(file, distrust_of_file(file))
    for folder in (run.control_dir, run.metrics_dir):
        yield from _if_there(folder, distrust_of_folder(folder))
    for file in (run.manifest_path, run.supervisor_lock_path):
        yield from _if_there(file, distrust_of_file(file))
    if attempt is not None:
        yield from _attempt_not_own(run.attempt_dir(attempt))


def _attempt_not_own(folder: Path) -> Iterator[NotOwn]:
    distrust = distrust_of_folder(folder)
    yield from _found(folder, distrust)
    if distrust is None:
        try:
            entries = sorted(folder.iterdir())
        except OSError:
            yield NotOwn(folder, Distrust.UNREADABLE)
            return
        for entry in entries:
            is_folder = entry.is_dir() and not entry.is_symlink()
            yield from _if_there(
                entry, distrust_of_folder(entry) if is_folder else distrust_of_file(entry)
            )


def _found(path: Path, distrust: Distrust | None) -> Iterator[NotOwn]:
    if distrust is not None:
        yield NotOwn(path, distrust)


def _if_there(path: Path, distrust: Distrust | None) -> Iterator[NotOwn]:
    """Yield unless the path is missing: it has not been made yet, or was a temporary file."""
    yield from _found(path, None if distrust is Distrust.MISSING else distrust)


def _refusal(run: RunDirectory, found: NotOwn) -> Refusal:
    name, path = printable_line(run.name), printable_line(str(found.path))
    match found.distrust:
        case Distrust.OTHER_OWNER:
            return Refusal(
                NOT_YOUR_RUN,
                f"{name} is not your run: {path} belongs to another user. You can watch it and read its logs",
            )
        case Distrust.OTHERS_CAN_WRITE:
            remedy = f"Check what is in it, then take away the right: `{quoted('chmod', '-R', 'go-w', str(run.path))}`"
            message = f"other users can write {path}, and with it decide what {name} does in your name. {remedy}"
        case Distrust.WRONG_KIND:
            message = f"{path} is a link, or a file where a folder is expected. Name the folder of the run itself"
        case Distrust.MISSING:
            message = f"{path} is missing, so the run cannot be continued. Start a new one"
        case Distrust.UNREADABLE:
            message = f"{path} cannot be read. Check the rights of its folder"
    return Refusal(found.distrust.value, message)
