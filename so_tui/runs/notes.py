"""A user's own words about a run: ``notes.json`` in its folder, written by its owner, replaced atomically.

Problem codes:
    invalid-tag, too-many-tags, note-too-long: A note or tag is none that is kept.
    notes-not-writable: The file cannot be written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from so_tui.runs.directory import RunDirectory
from so_tui.runs.files import write_run_file
from so_tui.runs.own import refuse_another_users
from so_tui.spec.errors import InputError, Problem
from so_tui.spec.wording import shown
from so_tui.structs import prepare
from so_tui.trust.decoding import decode_json
from so_tui.trust.reading import read_bounded

_LARGEST_BYTES = 1 << 14
LONGEST_NOTE = 2000
MOST_TAGS = 16
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")


class RunNotes(Struct, frozen=True, kw_only=True):
    """Content of ``notes.json``."""

    v: int = 1
    note: str = ""
    tags: tuple[str, ...] = ()


prepare(RunNotes)


def read_notes(run: RunDirectory) -> RunNotes:
    """Return the notes of a run; none if there is no such file, or it is damaged. Tags are checked, the note is any text."""
    try:
        found = decode_json(read_bounded(run.notes_path, _LARGEST_BYTES), RunNotes)
    except (OSError, msgspec.DecodeError):
        return RunNotes()
    return RunNotes(
        note=found.note[:LONGEST_NOTE],
        tags=tuple(tag for tag in found.tags[:MOST_TAGS] if _TAG.fullmatch(tag)),
    )


def write_notes(run: RunDirectory, notes: RunNotes) -> None:
    """Replace the notes of a run of this user.

    Raises:
        Refused: It is another user's run.
        InputError: The note or a tag cannot be kept, or the file cannot be written.
    """
    if len(notes.note) > LONGEST_NOTE:
        message, remedy = f"has more than {LONGEST_NOTE} characters", "Shorten it."
        raise InputError(
            [Problem(code="note-too-long", field="note", value="", message=message, remedy=remedy)]
        )
    if len(notes.tags) > MOST_TAGS:
        message, remedy = f"are more than {MOST_TAGS}", "Remove some."
        raise InputError(
            [Problem(code="too-many-tags", field="tags", value="", message=message, remedy=remedy)]
        )
    for tag in notes.tags:
        if not _TAG.fullmatch(tag):
            message, remedy = (
                "is not a tag",
                "Use up to 32 letters, digits, '.', '_' and '-', starting with a letter or digit.",
            )
            raise InputError(
                [
                    Problem(
                        code="invalid-tag",
                        field="tag",
                        value=shown(tag),
                        message=message,
                        remedy=remedy,
                    )
                ]
            )
    refuse_another_users(run)
    try:
        write_run_file(run, run.notes_path, msgspec.json.encode(notes))
    except OSError as error:
        message, remedy = (
            f"cannot be written: {error.strerror}",
            "Check the disk and the rights of the run's folder.",
        )
        raise InputError(
            [
                Problem(
                    code="notes-not-writable",
                    field="notes",
                    value=str(run.path),
                    message=message,
                    remedy=remedy,
                )
            ]
        ) from None


def changed_tags(notes: RunNotes, add: Iterable[str] = (), remove: Iterable[str] = ()) -> RunNotes:
    """Return notes with tags added and removed, each once, in their order."""
    gone = set(remove)
    return replace(
        notes, tags=tuple(dict.fromkeys(tag for tag in (*notes.tags, *add) if tag not in gone))
    )
