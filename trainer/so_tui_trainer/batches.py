"""Which sequences a step trains on, as tensors. A pure function of (seed, step, micro-step, rank): the position in the data is the step.

Every rank knows the counts of the whole step, all ranks and micro-batches, from the lengths alone: the exact weight of a token in the
loss needs no communication, and no wait for the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from so_tui.spec import InputError, Problem, RunSpec
from so_tui_trainer.packing import Sequences, one_each, pack
from so_tui_trainer.tokens import Documents

_PADDING_MULTIPLE = 8


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank; ``rows`` x ``width`` tokens, documents end to end in each row, padding at its end.

    Padding is a document of its own: nothing attends to it, and it carries no loss.
    """

    input_ids: Tensor
    """[rows, width] int64"""
    position_ids: Tensor
    """[rows, width] int64, restarting at every document"""
    boundaries: Tensor
    """[documents + 1] int32: cumulative document lengths over the flattened rows, padding included"""
    predictors: Tensor
    """[trained] int64: places in the flattened rows whose next token carries loss. Found on the host: the device need not be asked."""
    targets: Tensor
    """[trained] int64: these next tokens"""
    longest: int
    """Tokens of the longest document: the kernels want it on the host."""

    def to(self, device: torch.device) -> Batch:
        """The batch on a device; does not wait for the copy."""
        return Batch(
            self.input_ids.to(device, non_blocking=True),
            self.position_ids.to(device, non_blocking=True),
            self.boundaries.to(device, non_blocking=True),
            self.predictors.to(device, non_blocking=True),
            self.targets.to(device, non_blocking=True),
            self.longest,
        )

    def pinned(self) -> Batch:
        """The batch in page-locked memory, from which ``to`` copies without waiting."""
        return Batch(
            self.input_ids.pin_memory(),
            self.position_ids.pin_memory(),
            self.boundaries.pin_memory(),
            self.predictors.pin_memory(),
            self.targets.pin_memory(),
            self.longest,
        )


@dataclass(frozen=True)
class Work:
    """What a step works on, all ranks and micro-batches together."""

    useful_tokens: int
    trained_tokens: int
    document_lengths: npt.NDArray[np.int64]
    computed_tokens: int
    """With the padding that is really there."""
    sequences: int


class Batches:
    """The sequences of a data set, cut into steps. Shuffled anew every epoch; a step may span two epochs."""

    def __init__(self, documents: Documents, spec: RunSpec, rank: int, *, padding_id: int = 0, pin: bool = False) -> None:
        self._documents = documents
        self._lengths = documents.lengths
        self.sequences: Sequences = pack(self._lengths, spec.data.sequence_length) if spec.data.packing else one_each(len(self._lengths))
        self._useful = self.sequences.sums(self._lengths)
        self._trained = self.sequences.sums(documents.trained_lengths)
        self._spec, self._rank, self._padding_id, self._pin = spec, rank, padding_id, pin
        self.sequences_per_step = spec.train.micro_batch * spec.micro_steps * spec.ranks
        self._epoch_order = lru_cache(maxsize=2)(self._shuffled)

    @property
    def packing_efficiency(self) -> float:
        """Share of useful tokens among the positions of all sequences."""
        return float(self._useful.sum()) / (len(self.sequences) * self._spec.data.sequence_length)

    def total_steps(self) -> int:
        """Optimizer steps of the run, from whichever of steps, epochs and tokens the spec gives; at least one."""
        train, benchmark = self._spec.train, self._spec.benchmark
        if benchmark.measured_steps:
            return benchmark.warmup_steps + benchmark.measured_steps
        if train.steps:
            return train.steps
        if train.epochs:
            return max(1, math.ceil(train.epochs * len(self.sequences) / self.sequences_per_step))
        if train.tokens:
            return max(1, math.ceil(train.tokens / (float(self._useful.mean()) * self.sequences_per_step)))
        remedy = "Set one of `train.steps`, `train.epochs`, `train.tokens`."
        raise InputError([Problem(field="train.steps", value="0", message="the run has no length", remedy=remedy)])

    def work(self, step: int) -> Work:
        """What step ``step`` (from 1) works on."""
        indices = self._indices((step - 1) * self.sequences_per_step, self.sequences_per_step)
        micro_batches = indices.reshape(-1, self._spec.train.micro_batch)
        return Work(
            useful_tokens=int(self._useful[indices].sum()),
            trained_tokens=int(self._trained[indices].sum()),
            document_lengths=np.concatenate([self._lengths[self.sequences.of(int(index))] for index in indices]),
            computed_tokens=sum(len(micro_batch) * self._width(micro_batch) for micro_batch in micro_batches),
            sequences=len(indices),
        )

    def micro_batches(self, step: int) -> Iterator[Batch]:
        """This rank's micro-batches of step ``step`` (from 1), on the CPU."""
        micro_batch, ranks = self._spec.train.micro_batch, self._spec.ranks
        for micro_step in range(self._spec.micro_steps):
            turn = ((step - 1) * self._spec.micro_steps + micro_step) * ranks + self._rank
            yield self._batch(self._indices(turn * micro_batch, micro_batch))

    def _indices(self, first: int, count: int) -> npt.NDArray[np.int64]:
        positions = np.arange(first, first + count)
        epochs, places = np.divmod(positions, len(self.sequences))
        return np.array([self._epoch_order(int(epoch))[place] for epoch, place in zip(epochs, places, strict=True)], dtype=np.int64)

    def _shuffled(self, epoch: int) -> npt.NDArray[np.int64]:
        return np.random.default_rng((self._spec.train.seed, epoch)).permutation(len(self.sequences))

    def _batch(self, indices: npt.NDArray[np.int64]) -> Batch:
        width = self._width(indices)
        ids = np.full((len(indices), width), self._padding_id, dtype=np.int64)
        positions = np.zeros_like(ids)
        trained = np.zeros(ids.shape, dtype=np.bool_)
        lengths: list[int] = []
        for row, sequence in enumerate(indices):
            column = 0
            for document in self.sequences.of(int(sequence)):
                start, stop = self._documents.offsets[document], self._documents.offsets[document + 1]
                place = slice(column, column + int(stop - start))
                ids[row, place] = self._documents.tokens[start:stop]
                trained[row, place] = self._documents.trained[start:stop]
                positions[row, place] = np.arange(stop - start)
                lengths.append(int(stop - start))
                column = place.stop
            if column < width:
                positions[row, column:] = np.arange(width - column)
                lengths.append(width - column)
        # A document's first token is never trained, so the token before a trained one is always in the same document.
        predicted = np.flatnonzero(trained)
        boundaries = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        batch = Batch(
            torch.from_numpy(ids),
            torch.from_numpy(positions),
            torch.from_numpy(boundaries),
            torch.from_numpy(predicted - 1),
            torch.from_numpy(ids.ravel()[predicted]),
            max(lengths),
        )
        return batch.pinned() if self._pin else batch

    def _width(self, indices: npt.NDArray[np.int64]) -> int:
        """Packed sequences are nearly full and keep one width, which the allocator likes; others end with the longest of the batch."""
        if self._spec.data.packing:
            return self._spec.data.sequence_length
        longest = int(self._useful[indices].max())
        return min(self._spec.data.sequence_length, -(-longest // _PADDING_MULTIPLE) * _PADDING_MULTIPLE)
