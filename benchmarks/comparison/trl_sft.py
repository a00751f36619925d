"""Train with TRL's SFTTrainer: packed (best-fit-decreasing, padding-free), DeepSpeed ZeRO-3 with
the optimizer on the CPU.

    python -m benchmarks.comparison.trl_sft JOB

Packing, collator, loss and loop are TRL's own. Attention is torch's variable-length kernel, the one
so-tui uses: TRL's collator passes the document boundaries, and flash-attn, which TRL's
documentation asks for, is not always installed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.comparison.parts import BY_NAME, SEQUENCES, SHAPES, Part, Shape
from benchmarks.comparison.processes import tell


def main() -> None:
    """Measure and print the row."""
    job = json.loads(sys.argv[1])
    tell(measure(BY_NAME[job["part"]], SHAPES[job["shape"]], job["ground"]))
    os._exit(0)


def measure(part: Part, shape: Shape, ground: dict[str, Any]) -> dict[str, Any]:
    """Return the part's row."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    from benchmarks.comparison.model import packed_attention, random_model

    begun = time.perf_counter()
    implementation = packed_attention(shape)
    model = random_model(
        shape, implementation
    )  # Before the config exists, which would shard it while it is built, slowly.
    rows = [
        prompt_and_completion(json.loads(line))
        for line in Path(ground["rows"]).read_text(encoding="utf-8").splitlines()
    ]
    config = SFTConfig(
        output_dir=f"{ground['model']}-trl",
        max_steps=part.steps,
        per_device_train_batch_size=SEQUENCES,
        gradient_accumulation_steps=part.accumulation,
        max_length=shape.sequence_length,
        packing=True,
        packing_strategy="bfd",
        learning_rate=1e-5,
        bf16=True,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=42,
        use_cpu=not shape.cuda,
        deepspeed=ds_config(shape),
    )
    timer = _timer()
    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(rows * part.accumulation),
        processing_class=AutoTokenizer.from_pretrained(ground["tokenizer"]),
        callbacks=[timer],
    )
    needed = part.steps * part.accumulation * SEQUENCES
    if (
        len(trainer.train_dataset) < needed
    ):  # The last step of an epoch has fewer micro-batches, which would be counted wrongly.
        raise ValueError(
            f"the rows fill {len(trainer.train_dataset)} sequences, and {needed} are needed: give "
            "more rows"
        )
    counts = _count_tokens(trainer)
    trainer.train()
    times, micro = timer.times, part.accumulation
    tokens = [sum(counts[at : at + micro]) for at in range(0, part.steps * micro, micro)]
    return {
        "steps": [
            {"step_s": after - before, "useful_tokens": useful, "positions": useful}
            for before, after, useful in zip(times, times[1:], tokens, strict=False)
        ],
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "started_s": times[0] - begun,
        "gpu_reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if shape.cuda else None,
        "attention": implementation,
        "versions": {name: version(name) for name in ("trl", "accelerate")},
    }


def ds_config(shape: Shape) -> dict[str, Any]:
    """Return ZeRO-3 with the optimizer on the CPU, and the defaults of DeepSpeed and the
    Trainer.
    """
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": shape.cuda},
        },
    }


def prompt_and_completion(row: dict[str, str]) -> dict[str, str]:
    """Return a row in so-tui's layout for a tokenizer without a chat template, with loss on the
    response only.
    """
    context = f"\n\n{row['input']}" if row["input"].strip() else ""
    return {
        "prompt": f"### Instruction:\n{row['instruction']}{context}\n\n### Response:\n",
        "completion": row["output"],
    }


def _timer() -> Any:
    import torch
    from transformers import TrainerCallback

    class Timer(TrainerCallback):
        """``times``: the start, then the end of each step, with the GPU waited for."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self._mark()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self._mark()

        def _mark(self) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.times.append(time.perf_counter())

    return Timer()


def _count_tokens(trainer: Any) -> list[int]:
    """Return a list that collects the tokens of each micro-batch as the collator makes them;
    padding-free batches have no others.
    """
    counts: list[int] = []
    collate = trainer.data_collator

    def counting(examples: Any) -> Any:
        batch = collate(examples)
        counts.append(batch["input_ids"].numel())
        return batch

    trainer.data_collator = counting
    return counts


if __name__ == "__main__":
    main()
