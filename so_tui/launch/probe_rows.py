"""Rows for a probe without data of its own: documents as long as the plan takes them to be, made of the embedded rows' words.

The embedded rows themselves are short and few. They would fill a part of a long sequence, and attention would be much cheaper than planned.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import chain, cycle, islice
from pathlib import Path

import msgspec

from so_tui.plan.workload import Workload
from so_tui.spec import RunSpec, resolve_source
from so_tui.trust.decoding import decode_json

EMBEDDED_ROWS = "builtin:tiny/rows.jsonl"
_CHARACTERS_PER_TOKEN = 3.6
"""Of the embedded tokenizer in the embedded rows."""
_ROOM = 1.25
"""A document that is to fill a sequence is longer, and is cut."""
_MOST_CHARACTERS = 32 << 20
"""In the file; its documents are trained several times if a step needs more."""


class Row(msgspec.Struct, frozen=True):
    """A row in the Alpaca format."""

    instruction: str
    output: str
    input: str = ""


def write_rows(spec: RunSpec, workload: Workload, folder: Path) -> Path:
    """Write the rows for a probe of a spec.

    Args:
        spec: What is probed.
        workload: What is known of the spec's data.
        folder: Where to write; the file is named by its content.

    Raises:
        OSError: The file cannot be written.
    """
    text = b"".join(msgspec.json.encode(row) + b"\n" for row in rows_for(spec, workload))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"rows-{hashlib.sha256(text).hexdigest()[:16]}.jsonl"
    path.write_bytes(text)
    return path


def rows_for(spec: RunSpec, workload: Workload) -> Iterator[Row]:
    """Yield enough documents for a step, each of as many tokens as attention's cost of the data follows; of a whole sequence if unknown."""
    length = spec.data.sequence_length
    tokens = min(length, round(workload.attended_tokens) or length)
    characters = round(tokens * _CHARACTERS_PER_TOKEN * (_ROOM if tokens == length else 1))
    wanted = (
        spec.ranks * spec.train.micro_batch * spec.gradient_accumulation_steps * length // tokens
        + 1
    )
    prompt = round(characters * (1 - min(1.0, workload.trained_share / workload.useful_share)))
    words = _words()
    for _ in range(max(1, min(wanted, _MOST_CHARACTERS // characters))):
        yield Row(_text(words, prompt) or "Write.", _text(words, characters - prompt))


def _words() -> Iterator[str]:
    """Yield the words of the embedded rows, over and over."""
    lines = Path(resolve_source(EMBEDDED_ROWS)).read_bytes().splitlines()
    rows = [decode_json(line, Row) for line in lines]
    return cycle(
        list(chain.from_iterable(f"{row.instruction} {row.output}".split() for row in rows))
    )


def _text(words: Iterator[str], characters: int) -> str:
    """Return the next words, with this many characters in all."""
    # Each word and its space take two characters at least.
    return " ".join(islice(words, (characters + 1) // 2))[:characters]
