"""The variant of a preset with the settings of DeepSpeed's SuperOffload examples: ``PRESET:as-published``."""

from __future__ import annotations

from msgspec.structs import replace

from so_tui.spec.errors import InputError, Problem
from so_tui.spec.types import RunSpec

AS_PUBLISHED = ":as-published"
"""Ends the name of the variant."""
EXAMPLE_SEQUENCES = 4
"""``train_batch_size`` of the examples."""


def as_published(spec: RunSpec) -> RunSpec:
    """Return a spec with the settings of the script that DeepSpeed's SuperOffload examples have for its model.

    Sizes of models without a script are those of the others. The examples train 4 sequences a step on all GPUs together, with HF's own
    kernels. Model, data and the number of GPUs stay.

    Raises:
        InputError: The 4 sequences cannot be divided among the GPUs (code ``not-as-published``).
    """
    if EXAMPLE_SEQUENCES % spec.ranks:
        message, remedy = (
            "does not divide the 4 sequences of a step in DeepSpeed's examples",
            "Use 1, 2 or 4 GPUs.",
        )
        raise InputError(
            [
                Problem(
                    code="not-as-published",
                    field="gpus",
                    value=str(spec.ranks),
                    message=message,
                    remedy=remedy,
                )
            ]
        )
    large = spec.name.startswith("gpt-oss")
    offload = replace(
        spec.offload,
        mode="superoffload",
        engine="deepspeed",
        config="published",
        ratio=0.8 if spec.name.startswith("llama-3.1-8b") else 0.9,
        cpu_adam_cores_fraction=0.9,
        sub_group_size=800_000_000 if large else 400_000_000,
        states="fp32",
    )
    train = replace(
        spec.train,
        micro_batch=EXAMPLE_SEQUENCES // spec.ranks,
        gradient_accumulation=1,
        tokens_per_step=0,
        learning_rate=1e-5,
    )
    return replace(
        spec,
        name=f"{spec.name}-as-published",
        title=f"{spec.label}, as published",
        offload=offload,
        train=train,
        model=replace(spec.model, activation_checkpointing="full", kernels="plain"),
        data=replace(spec.data, sequence_length=8192 if large else 4096),
    )
