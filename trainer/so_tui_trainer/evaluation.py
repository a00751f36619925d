"""Evaluate the loss on documents that are never trained on, and choose those documents."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

import numpy as np
import torch
from msgspec.structs import replace

from so_tui.runs.records import EvaluationRecord
from so_tui.spec import RunSpec
from so_tui.spec.errors import reject
from so_tui.units import thousands
from so_tui_trainer.data.batches import Batch, Batches, Prefetcher
from so_tui_trainer.data.documents import Documents, Int64s
from so_tui_trainer.failures import NonFiniteError
from so_tui_trainer.ranks import Ranks


class _HeldOutSplit(NamedTuple):
    """Indices of documents, ascending and disjoint."""

    training: Int64s
    held_out: Int64s


def divide(documents: Documents, spec: RunSpec) -> _HeldOutSplit:
    """Split the documents into those to train on and those to hold out. It depends only on the
    seed, so all ranks and attempts agree.

    All documents of a row are held out together.

    Raises:
        InputError: Nothing would be left on one of the sides.
    """
    row_of = _rows(documents)
    rows = int(row_of[-1]) + 1
    count = held_out_rows(spec, rows)
    out = np.zeros(rows, dtype=np.bool_)
    out[np.random.default_rng((spec.train.seed, rows)).permutation(rows)[:count]] = True
    return _HeldOutSplit(np.flatnonzero(~out[row_of]), np.flatnonzero(out[row_of]))


def held_out_rows(spec: RunSpec, rows: int) -> int:
    """Return how many of ``rows`` rows are held out.

    Raises:
        InputError: Nothing would be left on one of the sides.
    """
    wanted = spec.data.held_out
    count = round(wanted * rows) if wanted < 1 else int(wanted)
    if wanted and not 0 < count < rows:
        raise reject(
            "held-out-out-of-range",
            "data.held_out",
            f"{wanted:g}",
            f"would hold out {thousands(count)} of {thousands(rows)} rows",
            "Set a share below 1, or a count that leaves rows on both sides.",
        )
    return count


def _rows(documents: Documents) -> Int64s:
    """Return the row of each document, counted over all sources, [documents]. Documents of a row
    are adjacent.
    """
    begins = np.diff(documents.rows, prepend=documents.rows[0] - 1) != 0
    begins[documents.source_starts[:-1]] = True  # Row numbers restart in every source.
    return np.cumsum(begins) - 1


def trained_fingerprint(fingerprint: str, spec: RunSpec) -> str:
    """Return a fingerprint of the trained documents: that of all documents, and what is held
    out.
    """
    if not spec.data.held_out:
        return fingerprint
    return hashlib.sha256(
        f"{fingerprint} {spec.data.held_out} {spec.train.seed}".encode()
    ).hexdigest()[:32]


def evaluation_spec(spec: RunSpec) -> RunSpec | None:
    """Return the spec of separate evaluation data; None if there are none."""
    data = spec.data
    if not data.evaluation and not data.evaluation_split:
        return None
    split = data.evaluation_split or data.split
    if data.evaluation:
        return spec.changed("data", source=data.evaluation, subset="", split=split)
    # The split of the section then applies to all sources, including those that train on a split of
    # their own.
    sources = (
        tuple(replace(part, split="") for part in data.source)
        if isinstance(data.source, tuple)
        else data.source
    )
    return spec.changed("data", source=sources, split=split)


def evaluate(
    batches: Batches, model: torch.nn.Module, ranks: Ranks, *, attempt: int, step: int
) -> EvaluationRecord:
    """Measure the mean loss over all tokens, independent of batches and ranks. All ranks must
    call it, between two steps.

    Training is not affected: no gradients are computed and no random numbers drawn.

    Args:
        batches: The documents to evaluate, for this rank.
        model: The model.
        ranks: The process group.
        attempt: The attempt, for the record.
        step: The last completed step, for the record.

    Raises:
        NonFiniteError: The loss is not finite; raised on all ranks.
    """
    began, tokens = time.monotonic(), batches.trained_tokens
    total = torch.zeros((), dtype=torch.float64, device=ranks.device)
    training = model.training
    model.eval()
    try:
        prefetched = Prefetcher(_micro_batches(batches, ranks.size), ranks.device)
        with torch.no_grad(), closing(prefetched):
            for batch in prefetched:
                total += model(batch, 1.0)
    finally:
        model.train(training)
    loss = sum(row[0] for row in ranks.all_gather_row([float(total)])) / tokens
    if not math.isfinite(loss):
        raise NonFiniteError(step, "evaluation loss")
    return EvaluationRecord(
        attempt=attempt,
        time=time.time(),
        step=step,
        loss=loss,
        perplexity=math.exp(min(loss, 700.0)),
        tokens=tokens,
        seconds=time.monotonic() - began,
    )


def _micro_batches(batches: Batches, ranks: int) -> Iterator[Batch]:
    """Yield this rank's micro-batches.

    Every rank yields the same number, since all take part in the all-gathers of the weights;
    some batches have no trained tokens.
    """
    size = batches.spec.train.micro_batch
    parts = batches.spec.train.sequence_parallel
    order = np.arange(len(batches.sequences))
    for first in range(0, len(order), size * (ranks // parts)):
        begin = first + batches.replica * size
        mine = order[begin : begin + size]
        yield batches.batch(mine) if len(mine) else batches.batch(order[:1]).untrained()
