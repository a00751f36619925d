"""The loss on documents that are never trained on: which they are, and how it is measured."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace

from so_tui.runs.records import EvaluationRecord
from so_tui.spec import InputError, Problem, RunSpec
from so_tui_trainer.data.batches import Batch, assemble, width
from so_tui_trainer.data.documents import Documents
from so_tui_trainer.data.packing import fill
from so_tui_trainer.data.prefetcher import Prefetcher
from so_tui_trainer.failures import NonFiniteError
from so_tui_trainer.ranks import Ranks


class HeldOutSplit(NamedTuple):
    """Indices of documents, ascending; no document is in both."""

    training: npt.NDArray[np.int64]
    held_out: npt.NDArray[np.int64]


def divide(documents: Documents, spec: RunSpec) -> HeldOutSplit:
    """The documents to train on and those to hold out, by seed alone: every rank and every attempt finds the same.

    A row that was cut into several documents is held out whole. Raises InputError when nothing would be left on one of the sides.
    """
    row_of = _rows(documents)
    rows = int(row_of[-1]) + 1
    count = held_out_rows(spec, rows)
    out = np.zeros(rows, dtype=np.bool_)
    out[np.random.default_rng((spec.train.seed, rows)).permutation(rows)[:count]] = True
    return HeldOutSplit(np.flatnonzero(~out[row_of]), np.flatnonzero(out[row_of]))


def held_out_rows(spec: RunSpec, rows: int) -> int:
    """How many of so many rows are held out. Raises InputError when nothing would be left on one of the sides."""
    wanted = spec.data.held_out
    count = round(wanted * rows) if wanted < 1 else int(wanted)
    if wanted and not 0 < count < rows:
        message = f"would hold out {count} of {rows} rows"
        remedy = "Give a share below 1, or a count that leaves rows on both sides."
        raise InputError([Problem(field="data.held_out", value=f"{wanted:g}", message=message, remedy=remedy)])
    return count


def _rows(documents: Documents) -> npt.NDArray[np.int64]:
    """Of each document, which of all rows it comes from, counted over the sources; a row's documents lie side by side."""
    if documents.rows is None:
        return np.arange(len(documents.offsets) - 1)
    begins = np.diff(documents.rows, prepend=documents.rows[0] - 1) != 0
    begins[np.cumsum([0, *(part.documents for part in documents.parts[:-1])])] = True  # every source numbers its own
    return np.cumsum(begins) - 1


def trained_fingerprint(fingerprint: str, spec: RunSpec) -> str:
    """What is trained on, in a word: the documents' fingerprint, and what of them is held out."""
    if not spec.data.held_out:
        return fingerprint
    return hashlib.sha256(f"{fingerprint} {spec.data.held_out} {spec.train.seed}".encode()).hexdigest()[:32]


def evaluation_spec(spec: RunSpec) -> RunSpec | None:
    """The spec whose data are to be evaluated, where they are other data than those to train on."""
    data = spec.data
    if not data.evaluation and not data.evaluation_split:
        return None
    split = data.evaluation_split or data.split
    if data.evaluation:
        return replace(spec, data=replace(data, source=data.evaluation, subset="", split=split))
    # The split of the section is for all sources then, also for those that train on one of their own.
    sources = tuple(replace(part, split="") for part in data.source) if isinstance(data.source, tuple) else data.source
    return replace(spec, data=replace(data, source=sources, split=split))


class Evaluation:
    """Some documents, packed and shared out over the ranks."""

    def __init__(self, documents: Documents, members: npt.NDArray[np.int64], spec: RunSpec, rank: int, *, pin: bool = False) -> None:
        self._documents, self._spec, self._rank, self._pin = documents, spec, rank, pin
        self._sequences = fill(documents.lengths, members, spec.data)
        self._lengths = self._sequences.sums(documents.lengths)
        self.documents = len(members)
        self.tokens = int(documents.trained_lengths[members].sum())
        """Trained tokens: those whose loss is measured."""

    def measure(self, model: torch.nn.Module, ranks: Ranks, *, attempt: int, step: int) -> EvaluationRecord:
        """Mean loss over all tokens, however they fall on batches and ranks. All ranks call it together, between two steps.

        Nothing of the training changes: no gradient is formed and no random number drawn. Raises NonFiniteError on all ranks alike.
        """
        began = time.monotonic()
        total = torch.zeros((), dtype=torch.float64, device=ranks.device)
        training = model.training
        model.eval()
        try:
            with torch.no_grad(), Prefetcher(self._batches(ranks.size), ranks.device) as batches:
                for batch in batches:
                    total += model(batch, 1.0)
        finally:
            model.train(training)
        loss = sum(row[0] for row in ranks.all_gather_row([float(total)])) / self.tokens
        if not math.isfinite(loss):
            raise NonFiniteError(step, "evaluation loss")
        return EvaluationRecord(
            attempt=attempt,
            time=time.time(),
            step=step,
            loss=loss,
            perplexity=math.exp(min(loss, 700.0)),
            tokens=self.tokens,
            seconds=time.monotonic() - began,
        )

    def _batches(self, ranks: int) -> Iterator[Batch]:
        """This rank's micro-batches. Every rank has as many, since all have to gather the weights together: some without trained tokens."""
        size = self._spec.train.micro_batch
        for first in range(0, len(self._sequences), size * ranks):
            mine = np.arange(first + self._rank * size, min(first + (self._rank + 1) * size, len(self._sequences)))
            indices = mine if len(mine) else np.zeros(1, dtype=np.int64)
            batch = assemble(self._documents, self._sequences, indices, width(self._lengths[indices], self._spec), 0)
            batch = batch if len(mine) else batch.untrained()
            yield batch.pinned() if self._pin else batch
