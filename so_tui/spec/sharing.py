"""What speaks against ranks that share sequences, in a spec."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from so_tui.spec.errors import Problem
from so_tui.spec.fields import field_index
from so_tui.spec.layers import layer_kinds, mixing_kinds, recurrent_kinds
from so_tui.spec.wording import shown


def sharing_problems(
    model: dict[str, Any], data: dict[str, Any], train: dict[str, Any], gpus: Any
) -> Iterator[Problem]:
    """Yield what speaks against ``train.sequence_parallel``, from sections of a plain tree, of whose types nothing is known."""
    ranks, length = (
        train.get("sequence_parallel", 1),
        data.get("sequence_length", field_index()["data.sequence_length"].default),
    )
    if not isinstance(ranks, int) or ranks < 2:
        return
    count = len(gpus) if isinstance(gpus, list | tuple) else gpus
    config = model.get("config")
    field, value = "train.sequence_parallel", shown(ranks)
    if isinstance(count, int) and count % ranks:
        message, remedy = (
            f"ranks cannot share each sequence: gpus = {count} is no multiple of it",
            "Choose a divisor of the number of GPUs.",
        )
        yield Problem(
            code="sequence-parallel-gpus", field=field, value=value, message=message, remedy=remedy
        )
    elif isinstance(length, int) and length % ranks:
        message, remedy = (
            f"cannot divide data.sequence_length = {length}",
            "Choose a divisor of the sequence length.",
        )
        yield Problem(
            code="sequence-parallel-length",
            field=field,
            value=value,
            message=message,
            remedy=remedy,
        )
    elif train.get("router_loss_coefficient"):
        message = "cannot be combined with a router loss, which is computed over whole sequences"
        remedy = "Set train.sequence_parallel to 1, or train.router_loss_coefficient to 0."
        yield Problem(
            code="sequence-parallel-router",
            field=field,
            value=value,
            message=message,
            remedy=remedy,
        )
    elif problem := sharing_problem(layer_kinds(config if isinstance(config, dict) else {}), ranks):
        yield problem


def sharing_problem(kinds: Iterable[str], ranks: int) -> Problem | None:
    """Return why ranks cannot share the sequences of a model with layers of these kinds; None if they can."""
    whole = sorted({*mixing_kinds(kinds), *recurrent_kinds(kinds)})
    if ranks == 1 or not whole:
        return None
    message = f"the model has layers of {', '.join(whole)}, which would see only a rank's part of a sequence"
    field, remedy = "train.sequence_parallel", "Set it to 1."
    return Problem(
        code="sequence-parallel-layers",
        field=field,
        value=str(ranks),
        message=message,
        remedy=remedy,
    )
