"""Prepare the original script's model folder, and count the useful tokens of each of its batches.

    python -m benchmarks.comparison.original_ground JOB

A process of its own, since it needs torch, and the GPU for a while.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

from benchmarks.comparison.parts import SEQUENCES, SHAPES, Shape
from benchmarks.comparison.processes import tell


def main() -> None:
    """Prepare and print the row."""
    job = json.loads(sys.argv[1])
    ground = job["ground"]
    shape = SHAPES[job["shape"]]
    sys.path.append(ground["stubs"])
    tokens = useful_tokens(
        Path(job["script"]),
        Path(ground["rows"]),
        ground["tokenizer"],
        shape.sequence_length,
        job["steps"],
    )
    folder = Path(ground["model"])
    if not folder.exists():
        write_model(shape, Path(ground["tokenizer"]), folder)
    tell({"tokens": tokens})


def useful_tokens(
    script: Path, rows: Path, tokenizer: str, sequence_length: int, steps: int
) -> list[int]:
    """Return the tokens of each step that are not padding, by the script's own preprocessing, in
    the order of DeepSpeed's loader (epoch 0, one rank).
    """
    from torch.utils.data import DistributedSampler
    from transformers import AutoTokenizer

    prepare = _module(script).preprocess_alpaca_example
    content = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    order: list[int] = list(DistributedSampler(content, num_replicas=1, rank=0))[  # type: ignore[arg-type]
        : SEQUENCES * steps
    ]
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    lengths = [
        sum(prepare(content[index], loaded, sequence_length)["attention_mask"]) for index in order
    ]
    return [sum(lengths[at : at + SEQUENCES]) for at in range(0, len(lengths), SEQUENCES)]


def write_model(shape: Shape, tokenizer: Path, folder: Path) -> None:
    """Write a folder for ``from_pretrained``: random weights in bf16, and the tokenizer."""
    from benchmarks.comparison.model import random_model

    model = random_model(shape, "sdpa")
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    for file in tokenizer.iterdir():
        shutil.copy(file, partial / file.name)
    partial.rename(folder)


def _module(script: Path) -> ModuleType:
    """Import the script as a module, without running its main part."""
    spec = importlib.util.spec_from_file_location("original_script", script)
    if spec is None or spec.loader is None:
        raise ValueError(f"{script} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
