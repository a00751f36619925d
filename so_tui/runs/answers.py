"""What the model answered to the prompts of the spec: ``answers.json``, replaced atomically by rank 0. Its size is bounded."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from so_tui.runs.directory import RunDirectory
from so_tui.runs.files import write_run_file
from so_tui.structs import prepare
from so_tui.trust.decoding import decode_json
from so_tui.trust.reading import read_bounded

MOST_ASKED = 100
"""Times asked that are kept: the first, and the newest ones."""
LONGEST_ANSWER = 8_000
_LARGEST_BYTES = 32 << 20


class AnsweredPrompt(Struct, frozen=True, kw_only=True):
    """A prompt and its answer."""

    prompt: str
    text: str
    tokens: int
    """A stop token included."""
    stopped: bool
    """Whether the answer ended by itself."""


class Asked(Struct, frozen=True, kw_only=True):
    """The answers after a step."""

    attempt: int
    time: float
    step: int
    seconds: float
    answers: tuple[AnsweredPrompt, ...]


class Answers(Struct, frozen=True, kw_only=True):
    """Content of ``answers.json``."""

    v: int = 1
    asked: tuple[Asked, ...] = ()
    """In the order of steps."""


prepare(Answers)


def read_answers(run: RunDirectory) -> Answers:
    """Return the answers of a run; none if there is no such file, or it cannot be read."""
    try:
        return _read(run)
    except OSError:
        return Answers()


def add_answers(run: RunDirectory, asked: Asked) -> None:
    """Add the answers after a step, in place of those of this and later steps, which a resumed run takes again.

    Raises:
        OSError: They cannot be written, or the earlier ones, which would be lost, cannot be read.
    """
    earlier = tuple(each for each in _read(run).asked if each.step < asked.step)
    kept = earlier if len(earlier) < MOST_ASKED else (earlier[0], *earlier[2 - MOST_ASKED :])
    write_run_file(run, run.answers_path, msgspec.json.encode(Answers(asked=(*kept, asked))))


def _read(run: RunDirectory) -> Answers:
    """Return the answers of a run; none if there is no such file, or it is damaged. Raises OSError."""
    try:
        return decode_json(read_bounded(run.answers_path, _LARGEST_BYTES), Answers)
    except (FileNotFoundError, msgspec.DecodeError):
        return Answers()
