"""Train with the original's configuration and engine calls on so-tui's packed batches: DeepSpeed's
SuperOffload without padding.

    python -m benchmarks.comparison.packed JOB

The model, its loss over the whole vocabulary, full activation checkpointing, the optimizer and the
DeepSpeed configuration are the original's. The batches, and the attention that keeps documents
apart, are so-tui's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.comparison.original import SHELL
from benchmarks.comparison.parts import (
    BY_NAME,
    SEQUENCES,
    SHAPES,
    Part,
    Shape,
    published_ds_config,
    spec_changes,
)
from benchmarks.comparison.processes import tell

if TYPE_CHECKING:
    from torch import Tensor

    from so_tui_trainer.data.batches import Batch


LEARNING_RATE = 1e-3
"""The script's constant; its ``--lr`` has no effect on the optimizer."""


def main() -> None:
    """Measure and print the row."""
    job = json.loads(sys.argv[1])
    tell(measure(BY_NAME[job["part"]], SHAPES[job["shape"]], job))
    os._exit(0)  # DeepSpeed's exit handlers may crash.


def measure(part: Part, shape: Shape, job: dict[str, Any]) -> dict[str, Any]:
    """Return the part's row."""
    import deepspeed
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    import superoffload
    from benchmarks.comparison.model import device_of, packed_attention, random_model
    from so_tui.spec import find_preset, with_values
    from so_tui_trainer.data import documents, tokens
    from so_tui_trainer.data.batches import Batches
    from so_tui_trainer.model import attention

    begun = time.perf_counter()
    device = device_of(shape)
    superoffload.join_process_group(
        dist_backend="nccl" if shape.cuda else "gloo", auto_mpi_discovery=False, verbose=False
    )
    changes = spec_changes(part, shape, job["ground"]["rows"], job["ground"]["tokenizer"])
    changes |= {
        "train.micro_batch": str(SEQUENCES),
        "train.gradient_accumulation": str(part.accumulation),
    }
    spec = with_values(find_preset(shape.preset).spec, changes)
    batches = Batches(documents.read(tokens.prepare(spec), spec.data), spec, rank=0, pin=shape.cuda)
    implementation = packed_attention(shape)
    model = random_model(shape, implementation)
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=DeepSpeedCPUAdam(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.999)),
        config=published_ds_config(
            (Path(job["script"]).parent / SHELL).read_text(), SEQUENCES, part.accumulation, shape
        ),
    )
    engine.train()
    started_s = time.perf_counter() - begun
    steps, losses = [], []
    last = time.perf_counter()
    for number in range(1, part.steps + 1):
        total = torch.zeros((), device=device)
        for host_batch in batches.micro_batches(number):
            batch = host_batch.to(device)
            keys = attention.arguments(batch, implementation, model.config, torch.bfloat16)
            loss = engine(input_ids=batch.input_ids, labels=labels(batch), **keys).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach() / part.accumulation
        losses.append(total.item())  # Waits for the GPU, as the original does at each step.
        now = time.perf_counter()
        counts = batches.counts(number)
        steps.append(
            {
                "step_s": now - last,
                "useful_tokens": counts.useful_tokens,
                "positions": counts.computed_tokens,
            }
        )
        last = now
    peak = torch.cuda.max_memory_reserved() / 2**30 if shape.cuda else None
    return {
        "steps": steps,
        "losses": losses,
        "started_s": started_s,
        "gpu_reserved_gib": peak,
        "attention": implementation,
    }


def labels(batch: Batch) -> Tensor:
    """Return the labels of a batch for Hugging Face's loss.

    Returns:
        [rows, width] int64; the token itself where it is trained, -100 elsewhere.
    """
    import torch

    flat = torch.full_like(batch.input_ids, -100).flatten()
    flat[batch.predictors + 1] = batch.targets
    return flat.view_as(batch.input_ids)


if __name__ == "__main__":
    main()
