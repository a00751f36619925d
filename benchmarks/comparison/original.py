"""Run the original script, unchanged, through DeepSpeed's launcher: its arguments, and its steps
from the lines it prints.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.comparison import processes
from benchmarks.comparison.figures import Step
from benchmarks.comparison.ground import Ground
from benchmarks.comparison.parts import SEQUENCES, Part, Shape, published_ds_config
from benchmarks.comparison.processes import Ended, Line

SHELL = "finetune_qwen3-14b_1gpu.sh"
"""The published one-GPU script of the nearest model."""
_STEP = re.compile(
    r"Step\s+(\d+) \| Loss: (\S+) \| Time:\s*(\d+)ms(?: \| TFLOPS:\s*(\S+) \| Tokens/s:\s*(\S+))?"
)


def measure(
    part: Part,
    shape: Shape,
    ground: Ground,
    script: Path,
    folder: Path,
    environment: dict[str, str],
    limit_s: float,
) -> Ended:
    """Run the script; ``row`` makes the row from its output."""
    config = folder / f"{part.name}_config.json"
    config.write_text(
        json.dumps(published_ds_config((script.parent / SHELL).read_text(), SEQUENCES, 1, shape))
    )
    last = re.compile(rf"Step\s+{part.steps} \|")
    # The stub comes last, so that an installed wandb is used.
    paths = [environment.get("PYTHONPATH", ""), ground.stubs]
    own = environment | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HF_DATASETS_CACHE": str(folder / "datasets"),
    }
    return processes.run(
        argv(part, shape, ground, script, config, folder),
        own,
        limit_s,
        lambda text: last.search(text) is not None,
    )


def argv(
    part: Part, shape: Shape, ground: Ground, script: Path, config: Path, folder: Path
) -> list[str]:
    """Return the published command with our model folder, all of our rows, no flash-attn, and the
    part's number of steps.
    """
    return [
        *(
            sys.executable,
            "-m",
            "deepspeed.launcher.runner",
            "--num_gpus=1",
            f"--master_port={processes.free_port()}",
        ),
        str(script.resolve()),
        f"--deepspeed_config={config}",
        *("--model_name", ground.model),
        *("--num_train_epochs", "1"),
        *("--lr", "1e-5"),
        *("--batch_size", str(SEQUENCES)),
        *("--weight_decay", "0.01"),
        *("--output_dir", str(folder / "original_output")),
        *("--seed", "42"),
        *("--max_length", str(shape.sequence_length)),
        *("--log_interval", "1"),
        *("--dataset_name", ground.rows_folder),
        *("--dataset_percentage", "100"),
        *("--bench_steps", str(part.steps)),
        *("--warmup_steps", "20"),
        *("--attn_implementation", "sdpa"),
        "--activation_checkpointing",
    ]


def row(
    ended: Ended, part: Part, shape: Shape, tokens: Sequence[int], limit_s: float
) -> dict[str, Any]:
    """Return the row of a part.

    Args:
        ended: The process.
        part: The part.
        shape: The shape.
        tokens: Useful tokens of each step, in order.
        limit_s: Time limit, for the error message.
    """
    # Each line comes twice, from the script's own handler and the root logger's. The first one
    # counts.
    by_number = {
        int(match[1]): (line, match)
        for line in reversed(ended.lines)
        if (match := _STEP.search(line.text))
    }
    found = [by_number[number] for number in sorted(by_number)]
    if len(found) < part.steps:
        return {"error": ended.tail(limit_s)}
    printed = [int(match[3]) / 1000 for _, match in found]
    return {
        "steps": steps(
            [line for line, _ in found], tokens, SEQUENCES * shape.sequence_length, printed[0]
        ),
        "losses": [float(match[2]) for _, match in found],
        "reported": {
            "step_s": printed,
            "tflops": [float(match[4]) for _, match in found if match[4]],
            "tokens_per_s": [float(match[5]) for _, match in found if match[5]],
        },
    }


def steps(
    lines: Sequence[Line], tokens: Sequence[int], positions: int, first_s: float
) -> list[Step]:
    """Return the steps, each from one step's line to the next: the script's own clock stops before
    the GPU is done, and excludes data loading.

    The first step has no line before it, so the script's own time is used.
    """
    times = [first_s, *(after.at_s - before.at_s for before, after in pairwise(lines))]
    return [
        Step(step_s=time, useful_tokens=useful, positions=positions)
        for time, useful in zip(times, tokens, strict=True)
    ]
