"""Pretrain a small model on free text, export it, and fine-tune the export on instructions.

    python benchmarks/free_text.py text.jsonl  # the documentation that Debian's packages install
    python benchmarks/own_model.py text.jsonl [--size small] [--instructions rows.json] >
        own-model.json

Prints JSON: the loss on held-out instructions before and after the fine-tuning, that of the same
fine-tuning of random weights, and what the model answers before and after. Everything is done by
the commands that users have.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from so_tui.runs import RunDirectory
from so_tui.runs.results import read_all, read_answers
from so_tui.spec import find_preset

TOKENIZER = Path(__file__).resolve().parents[1] / "presets" / "tiny"
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "small": {
        "hidden_size": 448,
        "intermediate_size": 1280,
        "num_hidden_layers": 10,
        "num_attention_heads": 7,
        "num_key_value_heads": 7,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
}
"""Changes to the embedded model's config: 3 and 26 million parameters."""
QUESTIONS = (
    "What is a leap year?",
    "Explain what a kernel is.",
    "Name three colors.",
    "Give an example of a metaphor.",
    "Describe the role of the heart.",
)
_MOST_STEPS = 1_000_000


class Laboratory:
    """A folder with a preset, a model and its runs, all made by the commands that users have.

    Args:
        folder: Where all of it is kept.
        size: Which of ``SIZES`` the model has.
        settings: Keys of the spec for every run.
    """

    def __init__(self, folder: Path, size: str, settings: dict[str, object]) -> None:
        self.runs, self._settings = folder / "runs", settings
        self._environment = os.environ | {"XDG_CONFIG_HOME": str(folder / "config")}
        self.runs.mkdir(parents=True, exist_ok=True)
        random = folder / "random"
        random.mkdir(exist_ok=True)
        (random / "config.json").write_text(
            json.dumps(find_preset("tiny").spec.model.config | SIZES[size])
        )
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TOKENIZER / name, random)
        self.so_tui("presets", "add", str(random), "--name", "own")

    def so_tui(self, *argv: str) -> None:
        """Call a command; what it prints goes to stderr."""
        subprocess.run(
            [sys.executable, "-m", "so_tui", *argv],
            check=True,
            stdout=sys.stderr,
            env=self._environment,
        )

    def trained(self, *changes: Mapping[str, object]) -> RunDirectory:
        """Train with more keys of the spec, and return the run."""
        settings = dict(self._settings)
        for more in changes:
            settings |= more
        sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        before = set(self.runs.iterdir())
        self.so_tui("run", "own", "--plain", "--runs-dir", str(self.runs), *sets)
        (run,) = set(self.runs.iterdir()) - before
        return RunDirectory(run)


def figures(run: RunDirectory) -> dict[str, Any]:
    """Return what a run trained on, and its last losses."""
    reader = read_all(run)
    steps, evaluation = reader.recent(_MOST_STEPS), reader.events.evaluations[-1]
    tokens = sum(record.useful_tokens for record in steps)
    return {
        "steps": len(steps),
        "tokens": tokens,
        "held_out_loss": evaluation.loss,
        "held_out_tokens": evaluation.tokens,
    }


def main() -> None:
    """Do everything and print the figures."""
    given = _parser().parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(given.folder or made)
        shape = {
            "gpus": given.gpus,
            "data.sequence_length": given.length,
            "train.micro_batch": given.micro_batch,
        }
        laboratory = Laboratory(folder, given.size, shape | {"checkpoint.at_end": "false"})
        trained, model = laboratory.trained, folder / "model"
        random = {"model.weights": "random"}
        text = {"data.source": given.text, "data.format": "text", "data.held_out": 0.01}
        long = {
            "train.steps": given.pretrain_steps,
            "train.learning_rate": given.learning_rate,
            "checkpoint.at_end": "true",
        }
        pretrained = trained(random, text, long)
        laboratory.so_tui("export", str(pretrained.path), "--to", str(model))
        base = {"model.id": model, "model.weights": "pretrained"}
        rows = {"data.source": given.instructions, "data.held_out": 0.1}
        tuning = {
            "train.steps": given.tune_steps,
            "train.learning_rate": given.learning_rate / 4,
            "train.micro_batch": given.tune_micro_batch,
        }
        after = trained(
            base, rows, tuning, {"prompts.texts": json.dumps(QUESTIONS), "prompts.max_tokens": 60}
        )
        scratch = trained(random, rows, tuning)
        first, *_, last = read_answers(after).asked
        answers = [
            {"prompt": one.prompt, "before": one.text, "after": other.text}
            for one, other in zip(first.answers, last.answers, strict=True)
        ]
        tuned = {
            "before": read_all(after).events.evaluations[0].loss,
            "after": figures(after),
            "from_random_weights": figures(scratch),
        }
        found = {
            "text_bytes": given.text.stat().st_size,
            "size": given.size,
            "pretraining": figures(pretrained),
            "instructions": tuned,
            "answers": answers,
        }
        print(json.dumps(found, indent=1))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path, help="rows to pretrain on, in JSONL with `text`")
    parser.add_argument("--size", choices=list(SIZES), default="tiny")
    parser.add_argument(
        "--instructions",
        default="builtin:tiny/rows.jsonl",
        help="rows to fine-tune on, in Alpaca's layout",
    )
    parser.add_argument("--pretrain-steps", type=int, default=2000)
    parser.add_argument("--tune-steps", type=int, default=120)
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--tune-micro-batch", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument(
        "--gpus", type=int, default=1, help="ranks; without GPUs, processes on the CPU"
    )
    parser.add_argument(
        "--folder", help="where runs and models are kept (default: a folder that is removed)"
    )
    return parser


if __name__ == "__main__":
    main()
