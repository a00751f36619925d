"""What is compared: the shapes, and the parts of a comparison by importance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Trainer = Literal["so-tui", "original", "original-packed", "trl"]

SEQUENCES = 4
"""Sequences of a micro-batch of trainers that do not choose it themselves: the batch size of the
published scripts.
"""


@dataclass(frozen=True)
class Shape:
    """A model and its sequences."""

    preset: str
    sequence_length: int
    vocabulary: int
    """Size of the tokenizer that is trained on the rows. The model's own vocabulary is the
    preset's.
    """
    sub_group_size: int
    cuda: bool


SHAPES = {
    # 16,384 byte-level tokens split these rows about as finely as the model's own tokenizer splits
    # English: 1.3 tokens a word.
    "qwen3-4b": Shape("qwen3-4b-random", 4096, 16_384, 100_000_000, cuda=True),
    "tiny": Shape("tiny", 256, 2048, 400_000, cuda=False),
}


@dataclass(frozen=True)
class Part:
    """One row of the comparison."""

    name: str
    trainer: Trainer
    title: str
    mode: str = "superoffload"
    accumulation: int = 1
    """Gradient accumulation steps: optimizer steps are this many times as long as the
    original's.
    """
    warmup: int = 3
    measured: int = 5
    limit_s: float = 150.0

    @property
    def steps(self) -> int:
        """Warm-up and measured steps."""
        return self.warmup + self.measured

    def sequences_per_step(self) -> int:
        """Return the sequences of an optimizer step."""
        return SEQUENCES * self.accumulation


PARTS = (
    Part("ours", "so-tui", "**so-tui**, superoffload, ratio 0.9", limit_s=120),
    Part(
        "ours-large",
        "so-tui",
        "**so-tui**, superoffload, ratio 0.9, long steps",
        accumulation=8,
        warmup=1,
        measured=3,
        limit_s=150,
    ),
    # DeepSpeed's engine has two slow steps, in which its memory is faulted in.
    Part(
        "original-packed",
        "original-packed",
        "the original's configuration, fed so-tui's packed batches",
        measured=3,
        limit_s=220,
    ),
    Part("original", "original", "the original script as it is", measured=4, limit_s=300),
    Part("gpu", "so-tui", "so-tui, nothing offloaded", mode="gpu", limit_s=90),
    Part(
        "trl",
        "trl",
        "TRL, packed, ZeRO-3 with CPU optimizer",
        mode="zerooffload",
        measured=4,
        limit_s=220,
    ),
    Part(
        "gpu-large",
        "so-tui",
        "so-tui, nothing offloaded, long steps",
        mode="gpu",
        accumulation=8,
        warmup=1,
        measured=3,
        limit_s=120,
    ),
    Part(
        "original-packed-large",
        "original-packed",
        "the original's configuration, fed so-tui's packed batches, 8 gradient accumulation steps",
        accumulation=8,
        warmup=2,
        measured=3,
        limit_s=240,
    ),
    Part(
        "trl-large",
        "trl",
        "TRL, packed, 8 gradient accumulation steps",
        mode="zerooffload",
        accumulation=8,
        warmup=2,
        measured=3,
        limit_s=240,
    ),
)
DEFAULT = tuple(part.name for part in PARTS[:6])
BY_NAME = {part.name: part for part in PARTS}


def spec_changes(part: Part, shape: Shape, rows: str, tokenizer: str) -> dict[str, str]:
    """Return what turns the shape's preset into this part's run, as ``--set`` takes it, without the
    batch.
    """
    return {
        "gpus": "1",
        "model.tokenizer": tokenizer,
        "data.source": rows,
        "data.format": "alpaca",
        "data.sequence_length": str(shape.sequence_length),
        "offload.mode": part.mode,
        "offload.ratio": "0.9",
        "offload.sub_group_size": str(shape.sub_group_size),
        "train.log_interval": "1",  # every step is timed, as the original prints every step
        "checkpoint.at_end": "false",
        "benchmark.warmup_steps": str(part.warmup),
        "benchmark.measured_steps": str(part.measured),
    }


def published_ds_config(
    script: str, sequences: int, accumulation: int, shape: Shape
) -> dict[str, Any]:
    """Return the SuperOffload configuration in one of the original's shell scripts: the first JSON
    that it writes.

    Changed are only the batch, with gradient accumulation, and on a machine without GPU what needs
    one (SuperOffload asserts CUDA; the README's fallback is ZeRO-Offload).

    Raises:
        ValueError: The script has no such JSON.
    """
    import json

    _, begun, rest = script.partition("<< EOF\n")
    text, ended, _ = rest.partition("\nEOF")
    if not begun or not ended:
        raise ValueError("the shell script writes no DeepSpeed configuration")
    config: dict[str, Any] = json.loads(text.replace("$BATCH_SIZE", str(sequences * accumulation)))
    config["gradient_accumulation_steps"] = accumulation
    if not shape.cuda:
        zero = config["zero_optimization"]
        zero["reduce_bucket_size"] = zero["sub_group_size"] = shape.sub_group_size
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    return config
