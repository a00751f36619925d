"""Show what a model will see of its data: ``{"spec": tree, "rows": n, "numbers": [row, ...]}`` in;
progress, then counts, these rows and the first rows out. With ``"check": true`` a verdict instead.

{"message": text, "done_rows": n, "total_rows": n} ... {"rows": n, "trained_tokens": n, ...,
"samples": [...], "done": true}
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from itertools import chain, groupby, islice, pairwise, zip_longest
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from so_tui.spec import RunSpec, check_tree
from so_tui.spec.data_notes import UNPROVEN, outcome, row_missing
from so_tui.units import thousands
from so_tui_trainer.hub import stay_offline_when_cut_off
from so_tui_trainer.tools.channel import Answer, changed, serve

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from so_tui_trainer.data.documents import Documents, Int64s, Sequences


_BINS = 11
"""Bins of equal width in the histogram."""
_USUAL = 0.98
"""Least share of the documents that the bins of equal width cover."""


def _preview(request: Answer) -> Iterator[Answer]:
    """Tokenise the data and describe them.

    Yields:
        Progress, then the description.

    Raises:
        InputError: Data or tokenizer cannot be read.
    """
    yield {"message": "loading the tokenizer and opening the data"}
    stay_offline_when_cut_off()
    from so_tui_trainer.data.chat import chat_of
    from so_tui_trainer.data.documents import fill, read
    from so_tui_trainer.data.tokens import load_tokenizer, preparing
    from so_tui_trainer.evaluation import divide

    spec = check_tree(request["spec"])
    check = bool(request.get("check"))
    folder = yield from changed(preparing(spec, refusing=not check), _progress)
    documents = read(folder, spec.data)
    tokenizer = load_tokenizer(spec.model)
    if check:
        yield _verdict(documents, spec, chat_of(tokenizer).name)
        return
    parts, lengths = divide(documents, spec), documents.lengths
    epoch = documents.epoch(spec.train.seed, parts.training)
    sequences = fill(lengths, epoch, spec.data)
    shown = islice(_in_turn(documents), max(0, int(request.get("rows", 3))))
    numbers = [int(number) for number in request.get("numbers", ())]
    yield {
        **msgspec.to_builtins(documents.counts),
        "documents": len(lengths),
        "held_out": len(parts.held_out),
        "tokens": len(documents.tokens),
        "trained_tokens": int(documents.trained_lengths.sum()),
        "longest": int(lengths.max()),
        "mean_length": float(lengths.mean()),
        "sequence_length": spec.data.sequence_length,
        "packing": spec.data.packing,
        "sequences": len(sequences),
        "packing_efficiency": sequences.efficiency(lengths, spec.data.sequence_length),
        "layout": chat_of(tokenizer).name,
        "loss": spec.data.loss,
        "histogram": _histogram(lengths),
        "sources": _sources(documents, epoch),
        "sequence": _sequence(documents, sequences),
        "samples": [
            *_numbered(documents, spec, tokenizer, numbers),
            *(_sample(documents, tokenizer, index) for index in shown),
        ],
        "warnings": list(documents.warnings),
        "done": True,
    }


def _progress(rows: tuple[int, int]) -> Answer:
    done, total = rows
    return {
        "message": f"tokenised {thousands(done)} of {thousands(total)} rows",
        "done_rows": done,
        "total_rows": total,
    }


def _verdict(documents: Documents, spec: RunSpec, layout: str) -> Answer:
    """Say what happens to the rows of each source."""
    unproven = spec.data.unproven
    return {
        "layout": layout,
        "loss": spec.data.loss,
        "refused": unproven == "refuse" and UNPROVEN in documents.counts.kinds,
        "sources": [
            {
                "source": part.source,
                "format": part.layout,
                "rows": part.counts.rows,
                "documents": part.documents,
                "truncated": part.counts.truncated,
                "kinds": [
                    {
                        "kind": kind,
                        "rows": found.rows,
                        "first": found.first,
                        "outcome": outcome(kind, unproven),
                        "detail": found.detail,
                    }
                    for kind, found in sorted(part.counts.kinds.items())
                ],
                "dropped_rows": msgspec.to_builtins(part.counts.dropped_rows),
                "dropped_numbers": np.setdiff1d(
                    np.arange(1, part.counts.rows + 1), documents.rows[first:end]
                ).tolist(),
            }
            for part, (first, end) in zip(
                documents.parts, pairwise(documents.source_starts), strict=True
            )
        ],
        "warnings": list(documents.warnings),
        "done": True,
    }


def _numbered(
    documents: Documents,
    spec: RunSpec,
    tokenizer: PreTrainedTokenizerBase,
    numbers: Sequence[int],
) -> Iterator[Answer]:
    """Yield these rows of each source that has them: their documents, or why there are none.

    Raises:
        InputError: No source has such a row.
    """
    from so_tui_trainer.data.chat import chat_of
    from so_tui_trainer.data.encoder import encoder_for
    from so_tui_trainer.data.sources import open_sources

    for number in numbers:
        if number > (most := max(part.counts.rows for part in documents.parts)):
            raise row_missing(str(number), most)
        for index, (first, end) in enumerate(pairwise(documents.source_starts)):
            part = documents.parts[index]
            found = first + np.flatnonzero(documents.rows[first:end] == number)
            for at, document in enumerate(found.tolist(), 1):
                yield {
                    **_sample(documents, tokenizer, document),
                    "document": at,
                    "documents": len(found),
                }
            if not len(found) and number <= part.counts.rows:
                opened = open_sources(spec.data)[index]
                encoder = encoder_for(chat_of(tokenizer), spec.data)
                (row,) = encoder.documents(opened, number - 1, number)
                yield {
                    "source": part.source,
                    "row": number,
                    "tokens": 0,
                    "trained_tokens": 0,
                    "pieces": [],
                    "dropped": next(iter(row.counts.dropped_rows)),
                }


def _histogram(lengths: Int64s) -> list[Answer]:
    """Count documents and tokens by length: bins of equal width, and a last one for the few
    documents that are far longer.
    """
    longest = int(lengths.max())
    usual = min(longest, int(np.quantile(lengths, _USUAL)) + 1)
    width = max(1, -(-usual // _BINS))
    bins = np.minimum((lengths - 1) // width, _BINS)
    counts, tokens = np.bincount(bins), np.bincount(bins, weights=lengths)
    return [
        {
            "from": at * width + 1,
            "to": longest if at == _BINS else min((at + 1) * width, longest),
            "documents": int(n),
            "tokens": int(held),
        }
        for at, (n, held) in enumerate(zip(counts, tokens, strict=True))
        if at >= np.flatnonzero(counts)[0]
    ]


def _sources(documents: Documents, epoch: Int64s) -> list[Answer]:
    """Describe each source and its share of ``epoch``, the documents that an epoch trains on."""
    firsts = documents.source_starts
    met = np.bincount(
        np.searchsorted(firsts, epoch, side="right") - 1, minlength=len(documents.parts)
    )
    tokens, trained = (
        np.add.reduceat(lengths, firsts[:-1]).tolist()
        for lengths in (documents.lengths, documents.trained_lengths)
    )
    return [
        {
            **msgspec.to_builtins(part.counts),
            "source": part.source,
            "format": part.layout,
            "weight": part.weight,
            "documents": part.documents,
            "tokens": tokens[index],
            "trained_tokens": trained[index],
            "share": float(met[index] / len(epoch)),
            "unused_columns": list(part.unused),
            "times_an_epoch": float(met[index] / part.documents),
        }
        for index, part in enumerate(documents.parts)
    ]


def _sequence(documents: Documents, sequences: Sequences) -> Answer:
    """Describe a typical sequence (with the median number of documents): its documents in order.
    The rest of it is padding.
    """
    order = np.argsort(np.diff(sequences.offsets), kind="stable")
    held = sequences.of(int(order[len(order) // 2]))
    return {
        "documents": [
            {**_origin(documents, int(index)), "tokens": int(documents.lengths[index])}
            for index in held
        ],
        "tokens": int(documents.lengths[held].sum()),
    }


def _in_turn(documents: Documents) -> Iterator[int]:
    """Return the indices of documents, one of each source in turn."""
    starts = pairwise(documents.source_starts)
    turns = zip_longest(*(range(first, last) for first, last in starts))
    return (index for index in chain.from_iterable(turns) if index is not None)


def _origin(documents: Documents, index: int) -> Answer:
    """Return the source and the row of a document."""
    part = int(np.searchsorted(documents.source_starts, index, side="right")) - 1
    return {"source": documents.parts[part].source, "row": int(documents.rows[index])}


def _sample(documents: Documents, tokenizer: PreTrainedTokenizerBase, index: int) -> Answer:
    """Return a document as pieces of text, each with whether it is trained. They are exactly the
    model's tokens, with the special ones.
    """
    start = int(documents.offsets[index])
    stop = int(documents.offsets[index + 1])
    tokens = zip(
        documents.tokens[start:stop].tolist(), documents.trained[start:stop].tolist(), strict=True
    )
    pieces, answers = [], []
    for trained, run in groupby(tokens, key=lambda item: item[1]):
        ids = [token for token, _ in run]
        pieces.append((str(tokenizer.decode(ids)), trained))
        answers += [len(ids)] if trained else []
    padding = documents.padding
    return {
        **_origin(documents, index),
        "tokens": stop - start,
        "trained_tokens": sum(answers) if padding is None else padding.length - 1,
        "pieces": pieces,
        "answers": answers,
    }


if __name__ == "__main__":
    # The caller may cancel: exit normally, so that partial cache entries are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(serve(_preview))
