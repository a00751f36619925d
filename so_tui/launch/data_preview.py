"""A typed preview of the data as the model will see it, made by a helper process."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise

import msgspec
from msgspec import Struct, field

from so_tui.launch.helpers import Cancel, stream_tool
from so_tui.spec import RunSpec, spec_tree
from so_tui.spec.local_paths import with_absolute_paths
from so_tui.structs import prepare
from so_tui.units import plural, thousands

LOSS_WORDS = {
    "assistant": "every answer of the assistant is trained",
    "last-turn": "the last answer of each row is trained",
    "all": "every token is trained, prompts too",
}

_PICTURES = (
    {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
    | {0x7F: "\u2421"}
    | dict.fromkeys(range(0x80, 0xA0), "\ufffd")
)


class Progress(Struct, frozen=True):
    """The helper's progress. ``total_rows`` is 0 until the rows are counted."""

    message: str
    done_rows: int = 0
    total_rows: int = 0


class Sample(Struct, frozen=True):
    """A document as pieces of text, each with whether it is trained."""

    source: str
    row: int
    tokens: int
    trained_tokens: int
    pieces: tuple[tuple[str, bool], ...]

    @property
    def visible(self) -> Iterator[tuple[str, bool]]:
        """The pieces with symbols in place of control characters, which a terminal would obey."""
        return ((text.translate(_PICTURES), trained) for text, trained in self.pieces)


class Bin(Struct, frozen=True):
    """The documents of ``first`` to ``last`` tokens, and their tokens in total."""

    first: int = field(name="from")
    last: int = field(name="to")
    documents: int
    tokens: int

    @property
    def label(self) -> str:
        return f"{self.first}-{self.last}" if self.last > self.first else f"{self.first}"


class Tally(Struct, frozen=True, kw_only=True):
    """What became of the rows of a source, or of all sources."""

    rows: int
    documents: int
    tokens: int
    trained_tokens: int
    truncated: int
    dropped: int
    dropped_too_long: int
    cut: int


class SourceView(Tally, frozen=True, kw_only=True):
    """A source of the mixture. It is the fraction ``share`` of an epoch, which repeats each of its documents ``times_an_epoch``."""

    source: str
    format: str
    weight: float
    share: float
    times_an_epoch: float


class Held(Struct, frozen=True):
    """A document in a packed sequence."""

    source: str
    row: int
    tokens: int


class PackedSequence(Struct, frozen=True):
    documents: tuple[Held, ...]
    tokens: int


class DataPreview(Tally, frozen=True, kw_only=True):
    held_out: int
    """Documents for evaluation; the counts include them."""
    longest: int
    mean_length: float
    sequence_length: int
    packing: bool
    sequences: int
    packing_efficiency: float
    layout: str
    loss: str
    histogram: tuple[Bin, ...]
    sources: tuple[SourceView, ...]
    sequence: PackedSequence
    samples: tuple[Sample, ...]
    warnings: tuple[str, ...]

    @property
    def how(self) -> str:
        """How rows become text, and which part of it is trained."""
        return f"{self.layout}; {LOSS_WORDS[self.loss]}"

    def facts(self) -> list[tuple[str, str, str]]:
        """Return name, figure and meaning of each count."""
        share = self.trained_tokens / self.tokens
        used = self.rows - self.dropped
        too_long = (
            f", {thousands(self.dropped_too_long)} of them because the prompt alone fills a sequence"
            if self.dropped_too_long
            else ""
        )
        met = sum(part.documents * part.times_an_epoch for part in self.sources)
        held = f"{met / self.sequences:.1f} documents each" if self.packing else "one document each"
        filled = f"{100 * self.packing_efficiency:.1f} % full"
        purpose = "have trained tokens" if self.held_out else "are trained on"
        return [
            ("rows", thousands(self.rows), f"{thousands(used)} {purpose}"),
            *(
                [
                    (
                        "held out",
                        thousands(self.held_out),
                        "documents for evaluation; the others are trained on",
                    )
                ]
                if self.held_out
                else []
            ),
            (
                "tokens",
                thousands(self.tokens),
                f"{thousands(self.trained_tokens)} of them trained ({100 * share:.0f} %)",
            ),
            (
                "lengths",
                thousands(round(self.mean_length)),
                f"tokens on average, {thousands(self.longest)} the longest",
            ),
            (
                "sequences",
                thousands(self.sequences),
                f"of {thousands(self.sequence_length)} tokens, {filled}, {held}",
            ),
            (
                "truncated",
                thousands(self.truncated),
                "rows longer than a sequence, which lose their end",
            ),
            ("dropped", thousands(self.dropped), f"rows without a trained token{too_long}"),
            *(
                [("cut", thousands(self.cut), "rows of plain text that became several documents")]
                if self.cut
                else []
            ),
        ]

    @property
    def padding(self) -> int:
        """Padding tokens of the shown sequence."""
        return self.sequence_length - self.sequence.tokens

    def sequence_cells(self, width: int) -> list[int]:
        """Return the cells of each document of the shown sequence, and of its padding, in a bar of ``width`` cells."""
        ends = list(accumulate(document.tokens for document in self.sequence.documents))
        edges = [0, *(round(end * width / self.sequence_length) for end in ends), width]
        return [stop - start for start, stop in pairwise(edges)]

    def sequence_words(self) -> str:
        """Return a heading: ``a packed sequence: 3 documents that do not see each other``."""
        count = len(self.sequence.documents)
        return f"a packed sequence: {plural(count, 'document')}{' that do not see each other' if count > 1 else ''}"

    def sequence_sum(self) -> str:
        """Return a sum: ``44 + 36 + 12 padding = 92 tokens``."""
        parts = [thousands(document.tokens) for document in self.sequence.documents]
        padding = [f"{thousands(self.padding)} padding"] if self.padding else []
        return f"{' + '.join([*parts, *padding])} = {thousands(self.sequence_length)} tokens"

    def histogram_cells(self, width: int) -> list[int]:
        """Return the cells of each bin's bar: ``width`` for the fullest, and at least one for any that is not empty."""
        most = max(entry.documents for entry in self.histogram)
        return [
            max(1, round(width * entry.documents / most)) if entry.documents else 0
            for entry in self.histogram
        ]


prepare(Progress, DataPreview)


def preview_data(
    spec: RunSpec, rows: int, cancel: Cancel | None = None
) -> Iterator[Progress | DataPreview]:
    """Yield progress, then the preview with ``rows`` sample rows.

    A cancelled preview just ends. Raises the errors of ``call_tool``.
    """
    for answer in stream_tool(
        "data", {"spec": spec_tree(with_absolute_paths(spec)), "rows": rows}, cancel
    ):
        if answer.get("done"):
            if "problems" not in answer:  # else the helper's exit raises them
                yield msgspec.convert(answer, DataPreview)
        else:
            yield msgspec.convert(answer, Progress)
