"""A training loop of one's own on so-tui's SuperOffload engine: ``superoffload.initialize`` instead
of ``deepspeed.initialize``.

    deepspeed --num_gpus 1 --bind_cores_to_rank examples/own_loop.py
        # random weights of a small shape, random tokens
    DS_ACCELERATOR=cpu python examples/own_loop.py  # the same without a GPU

The engine needs neither a run directory nor a plan. Everything but the lines marked ``engine`` is
what any DeepSpeed script has.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from transformers import AutoConfig, AutoModelForCausalLM

import superoffload

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def ds_config(mode: str, clipping: float) -> dict[str, Any]:
    """Return the DeepSpeed config of a published SuperOffload script, with small buckets for the
    small shape.
    """
    offload = {
        "device": "cpu",
        "ratio": 0.9,
        "super_offload": mode == "superoffload",
        "pin_memory": True,
    }
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": clipping,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 50_000,
            "reduce_bucket_size": 50_000,
            **({} if mode == "gpu" else {"offload_optimizer": offload}),
        },
    }


def train(
    steps: int, *, mode: str = "superoffload", clipping: float = 1.0, checkpoint: Path | None = None
) -> list[float]:
    """Train on random tokens, from the checkpoint if there is one, and save one at the end; return
    the losses.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", **SHAPE)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.to(get_accelerator().current_device_name())
    settings = superoffload.Settings(
        mode=mode,  # type: ignore[arg-type]
        learning_rate=1e-3,
        weight_decay=0.01,
        speculation_bytes=1 << 40,
    )  # engine
    parameters: list[dict[str, Any]] = [{"params": list(model.parameters())}]
    engine, *_ = superoffload.initialize(  # engine
        model,
        parameters,
        settings,
        ds_config(mode, clipping),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer),
    )
    done = 0
    if checkpoint and checkpoint.exists():
        _, state = engine.load_checkpoint(str(checkpoint))
        done = state["step"]
    losses = []
    for step in range(done, done + steps):
        for micro_batch in range(engine.gradient_accumulation_steps()):
            generator = torch.Generator().manual_seed(1000 * step + micro_batch)
            tokens = torch.randint(0, SHAPE["vocab_size"], (2, 32), generator=generator).to(
                engine.device
            )
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
    if checkpoint:
        engine.save_checkpoint(str(checkpoint), client_state={"step": done + steps})
    superoffload.close(engine)  # engine
    return losses


def join_process_group(local_rank: int) -> None:
    """Join the process group of DeepSpeed's launcher; without the launcher, a group of this process
    alone.
    """
    if "RANK" not in os.environ:
        os.environ.update(
            RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
        )
    get_accelerator().set_device(local_rank)
    superoffload.join_process_group(auto_mpi_discovery=False)


def main() -> None:
    """Train a few steps and print their losses."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--mode", choices=["superoffload", "zerooffload", "gpu"], default="superoffload"
    )
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    arguments = parser.parse_args()
    join_process_group(arguments.local_rank)
    for step, loss in enumerate(
        train(arguments.steps, mode=arguments.mode, checkpoint=arguments.checkpoint), start=1
    ):
        if deepspeed.comm.get_rank() == 0:
            print(f"step {step}  loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
