"""Choose the sequences of a step and make tensors of them.

The order of all sequences is a pure function of seed and epoch. A step takes the next sequences of
that order and the ranks share them, whole ones or, with sequence parallelism, a part of each: the
number of ranks does not change what is trained next. Every rank computes the token counts of the
whole step, of all ranks and gradient accumulation steps, from the document lengths: the exact
weight of a token in the loss takes no communication and no wait for the GPU.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from so_tui.model.flops import computed_tokens
from so_tui.spec import ModelSpec, RunSpec
from so_tui.spec.errors import reject
from so_tui.spec.model_table import layer_kinds, recurrent_kinds
from so_tui_trainer.data.documents import Documents, Int64s, fill, row_widths

# Where packed documents are as rows of their own, for layers that carry a state from token to
# token.
#
# Such a layer starts each row with an empty state. So each document is a row, and documents of
# similar lengths are computed together: few calls, and little padding, which lies behind a
# document's end, where none of its tokens sees it.


_LEAST_SHARE = 0.75
"""Of the longest document of a group: shorter ones begin another."""
_SHORT = 64
"""Tokens up to which documents are one group, whatever their shares: a kernel's block is no
shorter.
"""


def _rows_apart(boundaries: npt.NDArray[np.int32]) -> tuple[Tensor, ...]:
    """Lay out the documents of a micro-batch as rows.

    Args:
        boundaries: Cumulative lengths of the documents over the flattened tokens, [documents + 1].

    Returns:
        The place of each token, in its row, in all groups end to end, [tokens] int64. Then for each
        group the flattened tokens of its rows, [documents, tokens of the longest] int64; beyond a
        document's end its last token.
    """
    lengths = np.diff(boundaries).astype(np.int64)
    starts = boundaries[:-1].astype(np.int64)
    places = np.empty(int(lengths.sum()), dtype=np.int64)
    groups: list[Int64s] = []
    before = 0
    for members in _groups(lengths):
        columns = np.arange(lengths[members[0]])
        tokens = starts[members, None] + np.minimum(columns, lengths[members, None] - 1)
        inside = columns < lengths[members, None]
        places[tokens[inside]] = before + np.flatnonzero(inside)
        before += tokens.size
        groups.append(tokens)
    return (torch.from_numpy(places), *map(torch.from_numpy, groups))


def _groups(lengths: Int64s) -> Iterator[Int64s]:
    """Yield indices of documents that are computed together, the longest first."""
    left = np.argsort(-lengths, kind="stable")
    left = left[lengths[left] > 0]
    while len(left):
        longest = int(lengths[left[0]])
        least = 0.0 if longest <= _SHORT else _LEAST_SHARE * longest
        count = int(np.count_nonzero(lengths[left] >= least))
        yield left[:count]
        left = left[count:]


@dataclass(frozen=True)
class StepCounts:
    """Token and document counts of a step, over all ranks and gradient accumulation steps."""

    useful_tokens: int
    trained_tokens: int
    document_lengths: Int64s
    """[documents]"""
    computed_tokens: int
    """Useful tokens and padding."""
    sequences: int


_TENSORS = ("input_ids", "position_ids", "real", "boundaries", "predictors", "targets")


@dataclass(frozen=True)
class Batch:
    """The tensors of one micro-batch of one rank: ``rows`` x ``width`` tokens, documents end to end
    in each row, padding at its end.

    Each sequence is a row, or all of them are one row (``Batches.end_to_end``), of which a rank may
    have a part (``part``). Padding is a document of its own: no token attends to it, and it carries
    no loss.
    """

    input_ids: Tensor
    """[rows, width] int64"""
    position_ids: Tensor
    """[rows, width] int64; restarts at every document"""
    real: Tensor
    """[rows, width] bool; False in padding"""
    boundaries: Tensor
    """[documents + 1] int32; cumulative document lengths over the flattened rows, padding
    included
    """
    predictors: Tensor
    """[trained] int64; indices into the flattened rows whose next token carries loss"""
    targets: Tensor
    """[trained] int64; those next tokens"""
    longest: int
    """Tokens of the longest document. The attention kernels need it on the host."""
    apart: tuple[Tensor, ...] = ()
    """The documents as rows of their own (``_rows_apart``), if the model has layers that need
    them
    """
    is_part: bool = False
    """Whether other ranks hold the rest of the row. ``boundaries`` and ``longest`` are those of the
    whole row.
    """
    start: int = 0
    """First token of a part, in the whole row."""
    padded: bool = False
    """Whether padding belongs to the document before it: it carries loss, and its attention is that
    of padding in transformers.
    """
    counts: StepCounts = StepCounts(0, 0, np.zeros(0, dtype=np.int64), 0, 0)
    """Counts of the whole training step that the micro-batch belongs to."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the batch."""
        return *(getattr(self, name) for name in _TENSORS), *self.apart

    def to(self, device: torch.device) -> Batch:
        """Copy the batch to a device, without waiting for the copy."""
        return self._with(lambda tensor: tensor.to(device, non_blocking=True))

    def untrained(self) -> Batch:
        """Return the same rows without tokens that carry loss."""
        return replace(self, predictors=self.predictors[:0], targets=self.targets[:0])

    def part(self, position: int, parts: int) -> Batch:
        """Return one of as many equal parts of a batch of one row.

        A part has the predictors that lie in it; their targets may lie in the next. Positions go on
        from part to part.
        """
        if parts == 1:
            return self
        each = self.input_ids.shape[1] // parts
        start = position * each
        inside = (self.predictors >= start) & (self.predictors < start + each)
        ids, positions, real = (
            tensor[:, start : start + each].contiguous()
            for tensor in (self.input_ids, self.position_ids, self.real)
        )
        return replace(
            self,
            input_ids=ids,
            position_ids=positions,
            real=real,
            predictors=self.predictors[inside] - start,
            targets=self.targets[inside],
            apart=(),
            is_part=True,
            start=start,
        )

    def document_lengths(self) -> Tensor:
        """Return the length of each token's document, [rows, width] int32, whichever part of it is
        here. Does not wait for the GPU.
        """
        tokens = torch.arange(
            self.start,
            self.start + self.input_ids.numel(),
            dtype=torch.int32,
            device=self.boundaries.device,
        )
        documents = torch.bucketize(tokens, self.boundaries, right=True) - 1
        return self.boundaries.diff()[documents].view_as(self.input_ids)

    def pinned(self) -> Batch:
        """Return the batch in pinned memory, from which ``to`` copies without waiting."""
        return self._with(Tensor.pin_memory)

    def _with(self, change: Callable[[Tensor], Tensor]) -> Batch:
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in _TENSORS}
        return replace(self, apart=tuple(map(change, self.apart)), **changed)


class Batches:
    """Cuts the sequences of a data set into steps. They are shuffled anew every epoch; a step may
    span two epochs.
    """

    def __init__(
        self,
        documents: Documents,
        spec: RunSpec,
        rank: int,
        *,
        members: Int64s | None = None,
        pin: bool = False,
    ) -> None:
        """Pack the documents of an epoch.

        Args:
            documents: The tokenised data.
            spec: The run's spec.
            rank: The rank whose micro-batches are made.
            members: Indices of an epoch's documents; by default ``documents.epoch``.
            pin: Whether batches are made in pinned memory.
        """
        self._documents = documents
        self._lengths = documents.lengths
        epoch = documents.epoch(spec.train.seed) if members is None else members
        self.sequences = fill(self._lengths, epoch, spec.data)
        self._useful = self.sequences.sums(self._lengths)
        self._trained = self.sequences.sums(documents.trained_lengths)
        self.trained_tokens = int(self._trained.sum())
        """Tokens that carry loss, in an epoch."""
        self.spec, self._pin = spec, pin
        self._apart = needs_rows_apart(spec.model)
        if documents.padding is not None and self._apart:
            raise reject(
                "data-padded-layers",
                "data.loss",
                spec.data.loss,
                "trains padding, which layers of this model with a state from token to token do "
                "not compute",
                "Set `data.loss=all`.",
            )
        # Which of the groups of ranks that share sequences, and which part of them is this rank's.
        self.replica, self._part = divmod(rank, spec.train.sequence_parallel)
        self.sequences_per_step = (
            spec.train.micro_batch * spec.gradient_accumulation_steps * spec.replicas
        )
        self._epoch_order = lru_cache(maxsize=2)(self._shuffled)
        self.end_to_end = False
        """Whether the sequences of a micro-batch are one row, so that little padding is computed.
        Only attention that takes boundaries can do without a row for each: a mask would have all
        pairs of the micro-batch.
        """
        self._step_before, self._consumed_before = 0, 0

    def resume_at(self, step: int, consumed: int) -> None:
        """Continue after step ``step``, with ``consumed`` sequences of the order trained, whatever
        the size of the steps so far.
        """
        self._step_before, self._consumed_before = step, consumed

    def consumed(self, step: int) -> int:
        """Return how many sequences have been trained after step ``step``, counted over epochs and
        ranks.
        """
        return self._consumed_before + (step - self._step_before) * self.sequences_per_step

    def total_steps(self) -> int:
        """Return the optimizer steps of the run, from whichever of steps, epochs and tokens the
        spec sets; at least one.

        Raises:
            InputError: None of them is set.
        """
        train, benchmark = self.spec.train, self.spec.benchmark
        if benchmark.measured_steps:
            return benchmark.warmup_steps + benchmark.measured_steps
        if train.steps:
            return train.steps
        if train.epochs:
            return self._steps_for(math.ceil(train.epochs * len(self.sequences)))
        if train.tokens:
            return self._steps_for(math.ceil(train.tokens / float(self._useful.mean())))
        raise reject(
            "run-length-missing",
            "train.steps",
            "0",
            "the run has no length",
            "Set one of `train.steps`, `train.epochs`, `train.tokens`.",
        )

    def _steps_for(self, sequences: int) -> int:
        """Return the step that completes ``sequences``, counted from the start of the run."""
        left = max(0, sequences - self._consumed_before)
        return max(1, self._step_before + math.ceil(left / self.sequences_per_step))

    def counts(self, step: int) -> StepCounts:
        """Return the counts of step ``step`` (from 1)."""
        indices = self._indices(self.consumed(step - 1), self.sequences_per_step)
        micro_batches = indices.reshape(-1, self.spec.train.micro_batch)
        return StepCounts(
            useful_tokens=int(self._useful[indices].sum()),
            trained_tokens=int(self._trained[indices].sum()),
            document_lengths=np.concatenate(
                [self._lengths[self.sequences.of(int(index))] for index in indices]
            ),
            computed_tokens=sum(
                len(rows) * width for rows, width in map(self._rows, micro_batches)
            ),
            sequences=len(indices),
        )

    def micro_batches(self, step: int) -> Iterator[Batch]:
        """Yield this rank's micro-batches of a step."""
        size, replicas = self.spec.train.micro_batch, self.spec.replicas
        for accumulation_step in range(self.spec.gradient_accumulation_steps):
            first = (accumulation_step * replicas + self.replica) * size
            yield self.batch(self._indices(self.consumed(step - 1) + first, size))

    def batch(self, indices: Int64s) -> Batch:
        """Return this rank's part of a micro-batch of these sequences."""
        rows, width = self._rows(indices)
        documents = self._documents
        parts = [
            [
                slice(documents.offsets[document], documents.offsets[document + 1])
                for sequence in row
                for document in self.sequences.of(int(sequence))
            ]
            for row in rows
        ]
        batch = lay_out(
            [[documents.tokens[part] for part in row] for row in parts], width, apart=self._apart
        )
        if documents.padding is not None:
            batch = _padded(batch, documents.padding.token)
            return batch.pinned() if self._pin else batch
        trained = np.concatenate([documents.trained[part] for row in parts for part in row])
        # A document's first token is never trained, so the token before a trained one is always in
        # the same document.
        predicted = np.flatnonzero(batch.real.numpy())[trained]
        batch = replace(
            batch,
            predictors=torch.from_numpy(predicted - 1),
            targets=torch.from_numpy(batch.input_ids.numpy().ravel()[predicted]),
        ).part(self._part, self.spec.train.sequence_parallel)
        return batch.pinned() if self._pin else batch

    def iterate(self, first_step: int, last_step: int) -> Iterator[Batch]:
        """Yield this rank's micro-batches of several steps, with the steps' counts."""
        for step in range(first_step, last_step + 1):
            counts = self.counts(step)
            for batch in self.micro_batches(step):
                yield replace(batch, counts=counts)

    def _indices(self, first: int, count: int) -> Int64s:
        """Return the indices of the next ``count`` sequences from position ``first`` of the
        order.
        """
        places = (divmod(at, len(self.sequences)) for at in range(first, first + count))
        return np.array([self._epoch_order(epoch)[index] for epoch, index in places], np.int64)

    def _shuffled(self, epoch: int) -> Int64s:
        return np.random.default_rng((self.spec.train.seed, epoch)).permutation(len(self.sequences))

    def _rows(self, indices: Int64s) -> tuple[Int64s, int]:
        """Return the sequences of each row of a micro-batch, [rows, sequences], and the rows'
        width.
        """
        if self._documents.padding is not None:
            return indices[:, None], self._documents.padding.length
        rows = indices[None] if self.end_to_end else indices[:, None]
        return rows, _width(self._useful[indices], self.spec, end_to_end=self.end_to_end)


def needs_rows_apart(model: ModelSpec) -> bool:
    """Return whether a model has layers that carry a state from token to token."""
    return bool(recurrent_kinds(layer_kinds(model.config)))


def _width(lengths: Int64s, spec: RunSpec, *, end_to_end: bool) -> int:
    """Return the columns of a micro-batch. Few different numbers spare the allocator new sizes.

    End to end, all useful tokens, rounded up. Otherwise packed sequences are nearly full and always
    have the full width, and the longest of others decides.

    Args:
        lengths: Useful tokens of each sequence, [sequences].
        spec: The run's spec.
        end_to_end: Whether the sequences are one row.
    """
    length = spec.data.sequence_length
    if end_to_end:
        return computed_tokens(
            int(lengths.sum()), spec.train.micro_batch * length, spec.train.sequence_parallel
        )
    if spec.data.packing:
        return length
    return int(row_widths(lengths.max(keepdims=True), length)[0])


def lay_out(rows: Sequence[Sequence[npt.ArrayLike]], width: int, *, apart: bool = False) -> Batch:
    """Make a micro-batch in which no token carries loss.

    Args:
        rows: The tokens of each document of each row.
        width: Columns.
        apart: Whether the model needs the documents as rows of their own, too.
    """
    ids = np.zeros((len(rows), width), dtype=np.int64)
    positions, real = np.zeros_like(ids), np.zeros(ids.shape, dtype=np.bool_)
    lengths: list[int] = []
    for number, row in enumerate(rows):
        column = 0
        for document in map(np.asarray, row):
            columns = slice(column, column + len(document))
            ids[number, columns], positions[number, columns] = document, np.arange(len(document))
            lengths.append(len(document))
            column = columns.stop
        real[number, :column] = True
        if column < width:  # padding is a document of its own
            positions[number, column:] = np.arange(width - column)
            lengths.append(width - column)
    boundaries = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    none = torch.zeros(0, dtype=torch.int64)
    return Batch(
        torch.from_numpy(ids),
        torch.from_numpy(positions),
        torch.from_numpy(real),
        torch.from_numpy(boundaries),
        none,
        none,
        max(lengths),
        _rows_apart(boundaries) if apart else (),
    )


_PADDING_BLOCK = 128
"""Tokens of a document of padding, at most: a kernel's block is about as long."""


def _padded(batch: Batch, token: int) -> Batch:
    """Fill the rows of a batch up with a token, and train all but each row's first.

    Positions go on in the padding. Kernels that take boundaries get it in short documents, which
    cost next to nothing: their results are not used.
    """
    rows, width = batch.input_ids.shape
    columns = torch.arange(width)
    starts = ~batch.real & (columns % _PADDING_BLOCK == 0)
    starts[:, 1:] |= batch.real[:, :-1] & ~batch.real[:, 1:]
    starts[:, 0] = True
    ends = torch.tensor([rows * width])
    boundaries = torch.cat((starts.flatten().nonzero().flatten(), ends)).to(torch.int32)
    ids = batch.input_ids.masked_fill(~batch.real, token)
    return replace(
        batch,
        input_ids=ids,
        position_ids=columns.repeat(rows, 1),
        boundaries=boundaries,
        predictors=(columns[:-1] + width * torch.arange(rows)[:, None]).flatten(),
        targets=ids[:, 1:].flatten(),
        longest=int(boundaries.diff().max()),
        padded=True,
    )


# Prepare batches in a thread and copy them to the device while the step before is computed.


PREFETCH_DEPTH = 2
"""Batches that wait: one for the next forward pass, and one more in case a batch takes long to
make.
"""


_CLOSE_TIMEOUT_S = 10.0
"""How long ``close`` waits for the thread."""


class Prefetcher:
    """Iterates over ``source`` in a thread of its own, and yields its batches on ``device`` in the
    same order.

    On a GPU the copies run on a separate stream, and the compute stream waits for them; the host
    never does. An exception in ``source`` is raised when its batch would have been returned. Call
    ``close``, unless all are taken.
    """

    def __init__(self, source: Iterator[Batch], device: torch.device) -> None:
        self._source = source
        self._device = device
        self._stream = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._queue: queue.Queue[tuple[Batch, torch.cuda.Event | None] | BaseException] = (
            queue.Queue(PREFETCH_DEPTH)
        )
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="prefetcher", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Return the next batch, ready for the current stream.

        Raises:
            StopIteration: There are no more; raised again by later calls.
        """
        found = self._queue.get()
        if isinstance(found, BaseException):
            self._queue.put(found)
            raise found
        batch, copied = found
        if copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(copied)
            # Allocated on one stream, used on another: the allocator must not reuse it too early.
            for tensor in batch.tensors:
                tensor.record_stream(stream)
        return batch

    def close(self) -> None:
        """Stop the thread and drop waiting batches. Gives up on a thread that hangs while reading
        from disk. Safe to call twice.
        """
        self._closing.set()
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            try:
                self._queue.get(timeout=0.01)
            except queue.Empty:
                continue

    def _fill(self) -> None:
        try:
            if self._stream is not None:
                # Each thread has a current device; pinning would open a context on GPU 0.
                torch.cuda.set_device(self._device)
            for batch in self._source:
                if self._closing.is_set():
                    return
                self._queue.put(self._moved(batch))
        except Exception as error:  # noqa: BLE001 -- raised where the batch is asked for
            self._queue.put(error)
        else:
            self._queue.put(StopIteration())

    def _moved(self, batch: Batch) -> tuple[Batch, torch.cuda.Event | None]:
        if self._stream is None:
            return batch, None
        with torch.cuda.stream(self._stream):
            return batch.to(self._device), self._stream.record_event()
