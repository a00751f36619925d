"""transformers' ``Trainer`` on so-tui's SuperOffload engine, through the Trainer's own DeepSpeed
integration. Needs accelerate.

    PYTHONPATH=. deepspeed --num_gpus 1 --bind_cores_to_rank examples/hf_trainer.py
        # random weights of a small shape, random tokens
    PYTHONPATH=. DS_ACCELERATOR=cpu python examples/hf_trainer.py  # the same without a GPU

Everything but the lines marked ``engine`` is what any script with a Trainer and DeepSpeed has.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

import superoffload
from examples.own_loop import SHAPE, join_process_group

DS_CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "sub_group_size": 50_000,
        "reduce_bucket_size": 50_000,
        "offload_optimizer": {"device": "cpu", "super_offload": True, "pin_memory": True},
    },
}


class RandomTokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of random tokens, the same in every process."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(
            0, SHAPE["vocab_size"], (32,), generator=torch.Generator().manual_seed(row)
        )
        return {"input_ids": tokens, "labels": tokens}


def train(
    folder: Path, steps: int, *, offload: bool = True, clipping: float = 1.0, resume: bool = False
) -> list[float]:
    """Train, save a checkpoint at the end, and return the losses.

    Args:
        folder: Where the Trainer saves.
        steps: All steps, those before a resume included.
        offload: Whether our engine steps the optimizer; otherwise DeepSpeed does, on the GPU.
        clipping: Largest norm of the gradients.
        resume: Whether to continue from the last checkpoint in the folder.
    """
    config = superoffload.engine_config(DS_CONFIG) if offload else _without_offloading()  # engine
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        max_grad_norm=clipping,
        bf16=True,
        logging_steps=1,
        # so that a run that is resumed with more steps goes on as it was
        lr_scheduler_type="constant",
        save_steps=steps,
        report_to="none",
        disable_tqdm=True,
        use_cpu=get_accelerator().device_name() == "cpu",
        deepspeed=config,
    )
    torch.manual_seed(0)
    # After the arguments, whose DeepSpeed config has the weights sharded as they are made.
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("qwen3", **SHAPE), dtype=torch.bfloat16
    )  # type: ignore[no-untyped-call]
    trainer = Trainer(model=model, args=arguments, train_dataset=RandomTokens())
    if offload:
        settings = superoffload.Settings(
            learning_rate=arguments.learning_rate, ratio=0.9, speculation_bytes=1 << 40
        )  # engine
        with superoffload.replacing_optimizers(settings):  # engine
            trainer.train(resume_from_checkpoint=resume)
        superoffload.close(trainer.model_wrapped)  # engine
    else:
        trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _without_offloading() -> dict[str, Any]:
    zero = {
        key: value
        for key, value in DS_CONFIG["zero_optimization"].items()  # type: ignore[attr-defined]
        if key != "offload_optimizer"
    }
    return {**DS_CONFIG, "zero_optimization": zero, "zero_allow_untested_optimizer": True}


def main() -> None:
    """Train a few steps and print their losses."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--folder",
        type=Path,
        help="where checkpoints are saved; several ranks need one (default: a temporary folder)",
    )
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    arguments = parser.parse_args()
    join_process_group(arguments.local_rank)
    with tempfile.TemporaryDirectory() as temporary:
        losses = train(arguments.folder or Path(temporary), arguments.steps)
    if deepspeed.comm.get_rank() == 0:
        for step, loss in enumerate(losses, start=1):
            print(f"step {step}  loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
