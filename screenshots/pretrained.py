"""Record how a pretrained model is fetched from a hub, fine-tuned, and compared with what it was.

    python screenshots/pretrained.py MODEL

``MODEL`` is a folder such as ``benchmarks/own_model.py --size small --folder F`` leaves in
``F/model``. The hub is on loopback and answers the real clients. Writes ``pretrained.cast`` and
``pretrained.svg``, as ``tour.py`` does.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from screenshots.tour import FOLDER, HOME, Terminal, check_tools, record, write  # noqa: E402
from tests.support.hub import loopback_hub  # noqa: E402

NAME = "lab/small-26m"
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
QUESTIONS = ("How do I make a script executable?", "What is a NUMA node?")
STEPS = 60


def session(t: Terminal) -> None:
    """From a hub id to the answers of both models."""
    t.wait(r"^\$$")
    t.pause(0.5)
    t.command(f"so-tui presets add {NAME} --name small", until="^next:")
    t.pause(2.0)
    data = "--set data.source=builtin:tiny/rows.jsonl"
    t.command(f"clear; so-tui fetch small {data}", until="^tokenizer of .*: ready")
    t.pause(2.5)
    sizes = "--set data.sequence_length=256 --set train.micro_batch=2"
    length = f"--set train.epochs=0 --set train.steps={STEPS} --set train.learning_rate=5e-4"
    t.command(
        f"clear; so-tui run small --gpus 2 {data} --set data.held_out=0.1 {sizes} {length}",
        until="● training .* step [2-9] ",
    )
    with t.faster(40.0):
        t.wait(f"finished .* step {STEPS} ")
    t.pause(3.0)
    t.press("q", then=1.0)
    t.wait(r"^\$$")
    questions = " ".join(f"--prompt '{question}'" for question in QUESTIONS)
    t.command(
        f"clear; so-tui generate --compare --max-tokens 40 --temperature 0 {questions}",
        until=r"^\$$",
    )
    t.pause(6.0)


def main(model: Path) -> None:
    """Record the session with a hub that holds ``model``."""
    check_tools()
    with loopback_hub(HOME / "cache") as hub:
        hub.add("models", NAME, {name: (model / name).read_bytes() for name in FILES})
        environment = {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(HOME / "cache"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        write(
            FOLDER / "pretrained.cast",
            "so-tui: fetch, fine-tune, compare",
            record(session, environment),
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
