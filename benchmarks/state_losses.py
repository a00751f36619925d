"""Compare losses with each format of the moments (``offload.states``), over several seeds, through
the whole program.

    PYTHONPATH=.:trainer python benchmarks/state_losses.py ROWS --out losses.json --shape 0.6b
        --steps 200 --seeds 2
    PYTHONPATH=.:trainer python benchmarks/state_losses.py --out losses.json --table

ROWS: instruction data in the Alpaca layout, JSON. Weights are random. Each seed has its own weights
and order of the data, so that the spread over the seeds shows how much losses differ anyway. Rows
are appended to the file; existing ones are not measured again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any, get_args

import msgspec

from benchmarks.planner_settings import SHAPES
from so_tui.launch.launch import prepare_again
from so_tui.launch.probe import run_to_end
from so_tui.machine import inspect_machine
from so_tui.machine.types import Machine
from so_tui.runs.records import StepRecord
from so_tui.spec import find_preset, with_values
from so_tui.spec.run_spec import RunSpec, StatesFormat

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "trainer")]


FORMATS: tuple[StatesFormat, ...] = get_args(StatesFormat)
LAST = 20
"""Steps at the end whose mean loss is compared."""


def main() -> int:
    """Measure what is missing and print the table; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, nargs="?", help="JSON file of Alpaca rows")
    parser.add_argument("--out", type=Path, required=True, help="file of the results")
    parser.add_argument("--shape", choices=["tiny", "0.6b"], default="tiny")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=1024)
    parser.add_argument("--table", action="store_true", help="print what was measured so far")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = (
        json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    )
    if arguments.table:
        print(table(rows))
        return 0
    if arguments.rows is None:
        parser.error("name a JSON file with instruction data")
    machine = inspect_machine()
    for seed in range(arguments.seeds):
        for states in FORMATS:
            if any(
                (row["states"], row["seed"], row["shape"]) == (states, seed, arguments.shape)
                for row in rows
            ):
                continue
            losses = losses_of(spec_of(arguments, states, seed), machine)
            rows.append(
                {
                    "states": states,
                    "seed": seed,
                    "shape": arguments.shape,
                    "steps": arguments.steps,
                    "losses": losses,
                }
            )
            arguments.out.write_text(json.dumps(rows))
            print(
                f"{states}, seed {seed}: {len(losses)} steps, last {LAST}: {end(rows[-1]):.4f}",
                flush=True,
            )
    print(table(rows))
    return 0


def losses_of(spec: RunSpec, machine: Machine) -> list[float | None]:
    """Train and return the loss of each step."""
    losses: list[float | None] = []

    def tell(record: Any) -> None:
        if isinstance(record, StepRecord):
            losses.append(record.loss)

    scratch = Path(tempfile.mkdtemp(prefix="so-tui-losses-"))
    try:
        run_to_end(prepare_again(spec, machine), scratch, tell, limit_s=600)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return losses


def spec_of(arguments: argparse.Namespace, states: StatesFormat, seed: int) -> RunSpec:
    """Return the spec of one run; the parameter table is made from the shape on meta tensors."""
    from so_tui_trainer.tools.presets import parameter_table

    values = {
        "data.source": str(arguments.rows.resolve()),
        "data.format": "alpaca",
        "data.sequence_length": str(arguments.sequence_length),
        "train.micro_batch": str(arguments.micro_batch),
        "train.steps": str(arguments.steps),
        "train.learning_rate": "1e-3" if arguments.shape == "tiny" else "3e-4",
        "train.warmup_ratio": "0.1",
        "train.seed": str(seed),
        "offload.mode": "superoffload",
        "offload.ratio": "1.0",
        "offload.states": states,
        "benchmark.warmup_steps": "0",
        "benchmark.measured_steps": "0",
    }
    if arguments.shape == "tiny":
        return with_values(find_preset("tiny").spec, values)
    spec = with_values(find_preset("qwen3-4b-random").spec, values)
    model = msgspec.structs.replace(
        spec.model, config=spec.model.config | SHAPES[arguments.shape], parameters=()
    )
    return msgspec.structs.replace(
        spec,
        name=f"losses-{states}",
        model=msgspec.structs.replace(model, parameters=parameter_table(model)),
    )


def end(row: dict[str, Any]) -> float:
    """Return the mean loss of a run's last steps."""
    return float(mean(loss for loss in row["losses"][-LAST:] if loss is not None))


def table(rows: list[dict[str, Any]]) -> str:
    """Return each format's losses and their difference from fp32, as Markdown."""
    lines = [
        (
            "| shape | `offload.states` | mean loss of the last 20 steps, by seed | minus that "
            "with `fp32` |"
        ),
        "|---|---|---|---|",
    ]
    for shape in dict.fromkeys(row["shape"] for row in rows):
        exact = {
            row["seed"]: end(row)
            for row in rows
            if (row["shape"], row["states"]) == (shape, "fp32")
        }
        for states in FORMATS:
            found = {
                row["seed"]: end(row)
                for row in rows
                if (row["shape"], row["states"]) == (shape, states)
            }
            less = ", ".join(
                f"{loss - exact[seed]:+.4f}" for seed, loss in found.items() if seed in exact
            )
            lines.append(
                f"| {shape} | `{states}` | {', '.join(f'{loss:.4f}' for loss in found.values())} | "
                f"{less} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
