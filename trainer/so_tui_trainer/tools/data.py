"""What a model will see of its data: ``{"spec": tree, "samples": n}`` in, counts and the first rows with their trained tokens out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from so_tui_trainer.tools.channel import Answer, requested_spec, serve

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from so_tui_trainer.tokens import Documents


def preview(request: Answer) -> Iterator[Answer]:
    """Raises InputError when data or tokenizer cannot be read."""
    from so_tui_trainer.batches import Batches
    from so_tui_trainer.tokens import load_tokenizer, prepare, read

    spec = requested_spec(request)
    documents = read(prepare(spec))
    batches = Batches(documents, spec, rank=0)
    tokenizer = load_tokenizer(spec)
    lengths = documents.lengths
    count = min(int(request.get("samples", 3)), len(lengths))
    yield {
        "rows": documents.counts.rows,
        "documents": len(lengths),
        "tokens": len(documents.tokens),
        "trained_tokens": int(documents.trained.sum()),
        "truncated": documents.counts.truncated,
        "dropped": documents.counts.dropped,
        "sequences": len(batches.sequences),
        "packing_efficiency": batches.packing_efficiency,
        "longest": int(lengths.max()),
        "mean_length": float(lengths.mean()),
        "samples": [{"pieces": _pieces(documents, tokenizer, index)} for index in range(count)],
        "done": True,
    }


def _pieces(documents: Documents, tokenizer: PreTrainedTokenizerBase, index: int) -> list[tuple[str, bool]]:
    """A document as runs of text, each with whether it is trained. The model sees exactly these tokens, special ones included."""
    start, stop = int(documents.offsets[index]), int(documents.offsets[index + 1])
    tokens = zip(documents.tokens[start:stop].tolist(), documents.trained[start:stop].tolist(), strict=True)
    return [(str(tokenizer.decode([token for token, _ in run])), trained) for trained, run in groupby(tokens, key=lambda item: item[1])]


if __name__ == "__main__":
    sys.exit(serve(preview))
