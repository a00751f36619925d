"""What a rank trains and evaluates on: read from the cache, which rank 0 fills, and divided by the spec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from so_tui.spec import InputError, Problem, RunSpec
from so_tui_trainer.data import cache, tokens
from so_tui_trainer.data.batches import Batches
from so_tui_trainer.data.documents import Documents
from so_tui_trainer.evaluation import Evaluation, divide, evaluation_spec, trained_fingerprint
from so_tui_trainer.ranks import Ranks

OnProgress = Callable[[str], None]
"""Takes what is being done now."""
OnWarning = Callable[[str, str], None]
"""Takes a message and a suggestion."""


class TrainingData(NamedTuple):
    documents: Documents
    batches: Batches
    fingerprint: str
    """Changes when a step would train on other documents."""
    evaluation: Evaluation | None


def read(spec: RunSpec, ranks: Ranks, on_progress: OnProgress, warn: OnWarning) -> TrainingData:
    """The data of the spec, tokenised by rank 0 where they are not yet. Raises InputError: unreadable, or nothing would be left."""
    documents = _documents(spec, ranks, on_progress, warn)
    training, held_out = divide(documents, spec)
    other = evaluation_spec(spec)
    evaluated = documents if other is None else _documents(other, ranks, on_progress, warn)
    members = held_out if other is None else np.arange(len(evaluated.lengths))
    pin = ranks.device.type == "cuda"
    return TrainingData(
        documents=documents,
        batches=Batches(documents, spec, ranks.rank, members=documents.epoch(spec.train.seed, training), pin=pin),
        fingerprint=trained_fingerprint(documents.fingerprint, spec),
        evaluation=Evaluation(evaluated, members, spec, ranks.rank, pin=pin) if len(members) else None,
    )


def check_sizes(config: Any, documents: Documents, spec: RunSpec, warn: OnWarning) -> None:
    """Hold the documents against the model's shape. Raises InputError when its vocabulary has no room for some token."""
    largest = int(documents.tokens.max())
    if largest >= config.vocab_size:
        message = f"the tokenizer gives ids up to {largest}, and the model's vocabulary has {config.vocab_size}"
        problem = Problem(field="model.tokenizer", value=spec.model.tokenizer, message=message, remedy="Use the model's own tokenizer.")
        raise InputError([problem])
    positions = getattr(config, "max_position_embeddings", None)
    if positions and int(documents.lengths.max()) > positions:
        warn(f"some documents are longer than the {positions} positions the model was made for", "Lower `data.sequence_length`.")


def _documents(spec: RunSpec, ranks: Ranks, on_progress: OnProgress, warn: OnWarning) -> Documents:
    """Tokenised by rank 0, read by all."""

    def progress(rows: int, total: int) -> None:
        on_progress(f"tokenising the data, {rows:,} of {total:,} rows")

    folder = ranks.broadcast(tokens.prepare(spec, on_progress=progress) if ranks.first else None)
    documents = cache.read(folder, spec.data)
    for warning in documents.warnings:
        warn(warning, "")
    return documents
