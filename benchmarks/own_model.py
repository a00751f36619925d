"""Pretrain a small model on the documentation that Debian's packages install, export it, and fine-tune the export on instructions.

    python benchmarks/own_model.py [--pretrain-steps 2000] [--tune-steps 120] [--megabytes 24] > own-model.json

Prints JSON: the loss on held-out instructions before and after the fine-tuning, that of the same fine-tuning of random weights, and what
the model answers before and after. Everything is done by the commands that users have.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from so_tui.runs import RunDirectory
from so_tui.runs.answers import read_answers
from so_tui.runs.results import read_all

DOCUMENTATION = Path("/usr/share/doc")
NAMES = re.compile(r"(README|NEWS|FAQ|TODO|HACKING|INSTALL)[^/]*|.*\.(txt|md)", re.IGNORECASE)
QUESTIONS = ("Make a script executable.", "What is a leap year?", "Convert the time to minutes.\n\n3 h", "Which command lists open ports?")
_MOST_STEPS = 1_000_000
NO_LEARNING = "1e-12"
"""A learning rate that moves no weight: the evaluation after such a step is that of the weights before."""


def paragraphs() -> Iterator[str]:
    """Yield paragraphs of prose, each file's once."""
    seen: set[int] = set()
    for path in sorted(DOCUMENTATION.rglob("*")):
        name = path.name.removesuffix(".gz")
        if not NAMES.fullmatch(name) or path.is_symlink() or not path.is_file():
            continue
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        for part in re.split(r"\n\s*\n", content.decode(errors="ignore")):
            text = " ".join(part.split())
            letters = sum(character.isalpha() or character == " " for character in text)
            if 200 <= len(text) <= 4000 and letters > 0.85 * len(text) and hash(text) not in seen:
                seen.add(hash(text))
                yield text


def write_text(path: Path, most_bytes: float) -> int:
    """Write paragraphs as rows, about ``most_bytes`` at most, and return their bytes."""
    total = 0
    with path.open("w") as file:
        for text in paragraphs():
            total += len(text)
            file.write(json.dumps({"text": text}) + "\n")
            if total > most_bytes:
                break
    return total


def so_tui(*argv: str) -> str:
    """Call a command and return what it prints; its errors go to stderr."""
    return subprocess.run([sys.executable, "-m", "so_tui", *argv], check=True, stdout=subprocess.PIPE, text=True).stdout


def trained(folder: Path, gpus: int, **changes: object) -> RunDirectory:
    """Train the embedded preset with changes, and return the run."""
    settings = {"gpus": gpus, "data.held_out": 0.05, "checkpoint.at_end": "false", **changes}
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    before = set(folder.iterdir())
    print(so_tui("run", "tiny", "--plain", "--runs-dir", str(folder), *sets), file=sys.stderr)
    (run,) = set(folder.iterdir()) - before
    return RunDirectory(run)


def figures(run: RunDirectory) -> dict[str, Any]:
    """Return what a run trained on, and its last losses."""
    reader = read_all(run)
    steps, evaluation = reader.recent(_MOST_STEPS), reader.evaluations[-1]
    tokens = sum(record.useful_tokens for record in steps)
    return {"steps": len(steps), "tokens": tokens, "held_out_loss": evaluation.loss, "held_out_tokens": evaluation.tokens}


def main() -> None:
    """Do everything and print the figures."""
    given = _parser().parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(given.folder or made)
        runs = folder / "runs"
        runs.mkdir(parents=True, exist_ok=True)
        text = folder / "text.jsonl"
        size = write_text(text, 1e6 * given.megabytes)
        print(f"{size / 1e6:.1f} MB of text in {text}", file=sys.stderr)
        data = {"data.source": text, "data.format": "text", "data.held_out": 0.02}
        pretrained = trained(runs, given.gpus, **data, **{"train.steps": given.pretrain_steps, "checkpoint.at_end": "true"})
        model = folder / "model"
        so_tui("export", str(pretrained.path), "--to", str(model))
        base = {"model.id": model, "model.weights": "pretrained"}
        tuning = {"train.steps": given.tune_steps, "train.learning_rate": 1e-3}
        asked = {"prompts.texts": json.dumps(QUESTIONS), "prompts.max_tokens": 40}
        before = trained(runs, given.gpus, **base, **{"train.steps": 1, "train.learning_rate": NO_LEARNING})
        after = trained(runs, given.gpus, **base, **tuning, **asked)
        scratch = trained(runs, given.gpus, **tuning)
        first, *_, last = read_answers(after).asked
        answers = [
            {"prompt": one.prompt, "before": one.text, "after": other.text} for one, other in zip(first.answers, last.answers, strict=True)
        ]
        found = {
            "text_bytes": size,
            "pretraining": figures(pretrained),
            "instructions": {"before": figures(before)["held_out_loss"], "after": figures(after), "from_random_weights": figures(scratch)},
            "answers": answers,
        }
        print(json.dumps(found, indent=1))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrain-steps", type=int, default=2000)
    parser.add_argument("--megabytes", type=float, default=24, help="text at most; so small a model learns little from more")
    parser.add_argument("--tune-steps", type=int, default=120)
    parser.add_argument("--gpus", type=int, default=1, help="ranks; without GPUs, processes on the CPU")
    parser.add_argument("--folder", help="where text, runs and the model are kept (default: a folder that is removed)")
    return parser


if __name__ == "__main__":
    main()
