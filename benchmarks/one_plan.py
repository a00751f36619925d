"""Measure one preset through the whole program, random weights and embedded rows, beside its plan.

    PYTHONPATH=.:trainer python benchmarks/one_plan.py qwen3-30b-a3b --set offload.states=int8-moments train.gradient_clipping=1000 \\
        --out moe.json
    PYTHONPATH=.:trainer python benchmarks/one_plan.py qwen3-30b-a3b --layers 24 --set gpus=2                # the first 24 layers
    PYTHONPATH=.:trainer python benchmarks/one_plan.py qwen3-30b-a3b --machine h200-x4.json --set gpus=4     # only the plan, elsewhere

The row has the plan's figures, the measured ones and every step. With ``--out`` it is appended to a file. A plan that does not fit is a row
with its reasons.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.speed import with_layers
from so_tui.launch.launch import prepare_again
from so_tui.launch.probe import measured_of, predicted_of, probe_spec, run_to_end, settings_text
from so_tui.machine import inspect_machine
from so_tui.machine.types import Machine
from so_tui.plan.plan import Plan
from so_tui.plan.planner import make_plan
from so_tui.runs.records import MetricRecord, StepRecord
from so_tui.spec import SoTuiError, find_preset, with_values
from so_tui.spec.run_spec import RunSpec

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "trainer")]


_PER_STEP = (
    "step_s",
    "forward_s",
    "backward_s",
    "exposed_optimizer_s",
    "adam_busy_s",
    "adam_bytes_per_s",
    "kept_steps",
    "redone_steps",
    "loss",
)


def main() -> int:
    """Plan and measure; return the exit code."""
    arguments = _arguments()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), str(ROOT / "trainer"), os.environ.get("PYTHONPATH")])
    )
    machine = (
        msgspec.json.decode(arguments.machine.read_bytes(), type=Machine)
        if arguments.machine
        else inspect_machine()
    )
    values = dict(setting.split("=", 1) for setting in arguments.set)
    spec = probe_spec(
        with_values(_preset(arguments), values), "random", measured_steps=arguments.steps
    )
    plan = make_plan(spec, machine, probed=False)
    row: dict[str, Any] = {
        "preset": arguments.preset,
        "layers": arguments.layers,
        "set": arguments.set,
        "settings": settings_text(plan),
        "plan": _planned(plan),
    }
    print(json.dumps(row["plan"], indent=1), flush=True)
    if plan.fits and not arguments.machine:
        row |= _measured(spec, plan, machine, arguments.limit_s)
    if arguments.out:
        rows = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
        arguments.out.write_text(json.dumps([*rows, row], indent=1) + "\n")
    print(json.dumps({key: value for key, value in row.items() if key != "plan"}), flush=True)
    return int("error" in row)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("preset")
    parser.add_argument(
        "--layers", type=int, help="use only this many layers, the first ones (default: all)"
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="A.B=VALUE", help="keys of the spec"
    )
    parser.add_argument(
        "--machine", type=Path, help="plan for this machine file and measure nothing"
    )
    parser.add_argument(
        "--steps", type=int, default=5, help="measured steps, after two that do not count"
    )
    parser.add_argument("--out", type=Path, help="file of the results")
    parser.add_argument("--limit-s", type=float, default=600.0)
    return parser.parse_args()


def _preset(arguments: argparse.Namespace) -> RunSpec:
    spec = find_preset(arguments.preset).spec
    return (
        msgspec.structs.replace(spec, model=with_layers(spec.model, arguments.layers))
        if arguments.layers
        else spec
    )


def _planned(plan: Plan) -> dict[str, Any]:
    return {
        "verdict": plan.verdict,
        "reasons": plan.reason_texts,
        "gpus": plan.gpus,
        "gpu_bytes": plan.gpu_bytes,
        "host_bytes": sum(plan.host_bytes_per_node.values()),
        "host_capacity_bytes": sum(plan.host_capacity_bytes_per_node.values()),
        "second_states_bytes": sum(
            term.bytes for term in plan.breakdown if term.kind == "second-states"
        ),
        "step": msgspec.to_builtins(plan.step),
        "step_s": plan.step_s,
        "tokens_per_step": plan.tokens_per_step,
    }


def _measured(spec: RunSpec, plan: Plan, machine: Machine, limit_s: float) -> dict[str, Any]:
    begun, steps = time.monotonic(), list[dict[str, Any]]()

    def tell(record: MetricRecord) -> None:
        if isinstance(record, StepRecord):
            steps.append({name: getattr(record, name) for name in _PER_STEP})
            print(
                f"  step {record.step}: {record.step_s:.3f} s after "
                f"{time.monotonic() - begun:.0f} s",
                file=sys.stderr,
                flush=True,
            )

    scratch = Path(tempfile.mkdtemp(prefix="so-tui-one-plan-"))
    try:
        measured = measured_of(
            run_to_end(prepare_again(spec, machine), scratch, tell, limit_s=limit_s), plan
        )
        predicted = predicted_of(spec, machine, measured.workload)[1]
    except SoTuiError as error:
        logs = "\n".join(
            path.read_text(errors="replace")[-3000:]
            for path in scratch.glob("*/attempts/*/output.*.log")
        )
        print(logs, flush=True)
        return {"error": str(error), "steps": steps}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return {
        "measured": msgspec.to_builtins(measured),
        "predicted": msgspec.to_builtins(predicted),
        "steps": steps,
        "gpus": [{"name": gpu.name, "uuid": gpu.uuid} for gpu in machine.gpus],
        "wall_s": round(time.monotonic() - begun, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
