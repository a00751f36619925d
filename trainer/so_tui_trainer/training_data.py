"""Read what a rank trains and evaluates on, from the cache that rank 0 fills."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from so_tui.spec import InputError, Problem, RunSpec
from so_tui.units import thousands
from so_tui_trainer.data import cache, tokens
from so_tui_trainer.data.batches import Batches
from so_tui_trainer.data.documents import Documents
from so_tui_trainer.evaluation import Evaluation, divide, evaluation_spec, trained_fingerprint
from so_tui_trainer.failures import TrainingError
from so_tui_trainer.ranks import Ranks

OnProgress = Callable[[str], None]
"""Called with a description of the current work."""
OnWarning = Callable[[str, str, str], None]
"""Called with a code, a message and a suggestion."""


class TrainingData(NamedTuple):
    """The data of one rank."""

    documents: Documents
    batches: Batches
    fingerprint: str
    """Changes if a step would train on other documents."""
    evaluation: Evaluation | None

    def lay_end_to_end(self) -> None:
        """Make each micro-batch one row, for attention that takes boundaries."""
        self.batches.end_to_end = True
        if self.evaluation:
            self.evaluation.end_to_end = True


def read(spec: RunSpec, ranks: Ranks, on_progress: OnProgress, warn: OnWarning) -> TrainingData:
    """Read the spec's data; rank 0 tokenises them if needed.

    Raises:
        InputError: They cannot be read, or nothing would be left to train on.
    """
    documents = _documents(spec, ranks, on_progress, warn)
    training, held_out = divide(documents, spec)
    other = evaluation_spec(spec)
    evaluated = documents if other is None else _documents(other, ranks, on_progress, warn)
    members = held_out if other is None else np.arange(len(evaluated.lengths))
    pin = ranks.device.type == "cuda"
    return TrainingData(
        documents=documents,
        batches=Batches(
            documents, spec, ranks.rank, members=documents.epoch(spec.train.seed, training), pin=pin
        ),
        fingerprint=trained_fingerprint(documents.fingerprint, spec),
        evaluation=Evaluation(evaluated, members, spec, ranks.rank, pin=pin)
        if len(members)
        else None,
    )


def check_sizes(config: Any, documents: Documents, spec: RunSpec, warn: OnWarning) -> None:
    """Compare the documents with the model's shape.

    Args:
        config: The model's configuration.
        documents: The tokenised data.
        spec: The run's spec.
        warn: Called if documents are longer than the model's positions.

    Raises:
        InputError: A token id exceeds the model's vocabulary.
    """
    largest = int(documents.tokens.max())
    if largest >= config.vocab_size:
        raise InputError(
            [
                Problem(
                    code="tokenizer-too-large",
                    field="model.tokenizer",
                    value=spec.model.tokenizer,
                    message=f"has ids up to {largest}, but the model's vocabulary has {config.vocab_size} tokens",
                    remedy="Use the model's own tokenizer.",
                )
            ]
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions and int(documents.lengths.max()) > positions:
        message = f"some documents are longer than the {thousands(positions)} positions that the model supports"
        warn(
            "documents-exceed-positions",
            message,
            "Scale its positions (`model.rope_scaling`), or lower `data.sequence_length`.",
        )


def _documents(spec: RunSpec, ranks: Ranks, on_progress: OnProgress, warn: OnWarning) -> Documents:
    """Tokenise on rank 0, and read on all ranks.

    Raises:
        TrainingError: This rank is on another host than rank 0 and does not see its cache (code ``cache-not-shared``).
    """

    def progress(rows: int, total: int) -> None:
        on_progress(f"tokenising the data, {thousands(rows)} of {thousands(total)} rows")

    folder = ranks.broadcast(
        tokens.prepare(spec, on_progress=progress) if ranks.first else None, Path
    )
    if not folder.is_dir():
        reason = f"the tokenised data in {folder} cannot be seen on {socket.gethostname()}"
        raise TrainingError(
            "cache-not-shared",
            reason,
            "Set XDG_CACHE_HOME to a folder that all nodes share, in the site profile.",
        )
    documents = cache.read(folder, spec.data)
    for warning in documents.warnings:
        warn("data", warning, "")
    return documents
