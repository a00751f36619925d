"""Compare useful tokens per second of so-tui with other trainers, at one shape, on the same rows,
in one run.

    PYTHONPATH=.:trainer python benchmarks/compare.py ROWS --original PATH/finetune_zero3.py --out
        compare.json
    PYTHONPATH=.:trainer python benchmarks/compare.py ROWS --original ... --out compare.json --only
        ours original
    PYTHONPATH=.:trainer python benchmarks/compare.py --out compare.json --table
        # results so far, as Markdown

ROWS: instruction data in the Alpaca layout, JSON or JSONL. The original is DeepSpeedExamples'
training/DeepSpeed-SuperOffload, with its shell scripts next to the Python file, unchanged. Every
part runs in processes of its own, so that a failing part does not affect others. Rows are appended
to the file; existing ones are measured again only with ``--again``. ``--shape tiny`` runs the same
code on a machine without GPU, as a test. The method is described in docs/comparison.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.comparison import figures, ground, original, ours, processes
from benchmarks.comparison.ground import Ground
from benchmarks.comparison.parts import BY_NAME, DEFAULT, SHAPES, Part, Shape
from benchmarks.comparison.processes import Ended
from so_tui.launch.command import valid_arch_list
from so_tui.machine import inspect_machine

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "trainer")]


_SHORTEST_S = 45.0
"""A part is not started with less time left, as it would not reach its first step."""


def main() -> int:
    """Measure the parts and print the table; return the exit code."""
    arguments = _arguments()
    rows: list[dict[str, Any]] = (
        json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    )
    if arguments.table:
        print(figures.table(rows, arguments.shape))
        return 0
    if arguments.rows is None:
        print(
            "compare.py: no rows given: name a JSON or JSONL file with instruction data",
            file=sys.stderr,
        )
        return 2
    deadline = time.monotonic() + arguments.budget_s
    arguments.work.mkdir(parents=True, exist_ok=True)
    laid = ground.lay(arguments.work, arguments.rows, SHAPES[arguments.shape])
    failed, left = [], []
    for part in (BY_NAME[name] for name in arguments.only or DEFAULT):
        if not arguments.again and part.name in figures.newest(rows, arguments.shape):
            print(f"{part.name}: already measured", flush=True)
            continue
        limit_s = min(part.limit_s, deadline - time.monotonic())
        if limit_s < _SHORTEST_S:
            left.append(part.name)
            continue
        row = _row(part, laid, arguments, limit_s)
        rows.append(row)
        failed += [part.name] if "error" in row else []
        _write(arguments.out, rows)
        shown = (
            "error",
            "useful_tokens_per_s",
            "step_s",
            "padding",
            "started_s",
            "wall_s",
            "micro_batch",
            "model_tflops_per_gpu",
        )
        print(
            f"{part.name}: {json.dumps({key: row[key] for key in shown if key in row})}", flush=True
        )
    print(figures.table(rows, arguments.shape))
    if left:
        print(f"\nno time left for {', '.join(left)}: run it again with the same --out to continue")
    return int(bool(failed or left))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "rows", type=Path, nargs="?", help="instruction data, JSON or JSONL, in Alpaca's layout"
    )
    parser.add_argument(
        "--original", type=Path, help="the original finetune_zero3.py, its shell scripts beside it"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("compare.json"), help="file to which rows are appended"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(BY_NAME),
        help=f"what to measure, in this order (default: {' '.join(DEFAULT)})",
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-4b")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()) / "so-tui-compare",
        help="folder for data, model, runs, logs",
    )
    parser.add_argument(
        "--budget-s",
        type=float,
        default=480,
        help="no part runs longer than this, counted from the start (default 480)",
    )
    parser.add_argument(
        "--set",
        metavar="A.B=VALUE",
        action="append",
        default=[],
        help="change a key of so-tui's own runs, as `so-tui run` does",
    )
    parser.add_argument(
        "--again", action="store_true", help="measure again what is already in the file"
    )
    parser.add_argument(
        "--table", action="store_true", help="print the results in the file and exit"
    )
    return parser.parse_args()


def _row(part: Part, laid: Ground, arguments: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    begin = time.monotonic()
    known = {
        "part": part.name,
        "shape": arguments.shape,
        "warmup": part.warmup,
        "begun": time.time(),
        "machine": _machine(),
    }
    known |= {"data": laid.facts, "versions": _versions()}
    row = _measured(part, SHAPES[arguments.shape], laid, arguments, limit_s)
    row |= {"wall_s": round(time.monotonic() - begin, 1)}
    if "steps" in row:
        row |= figures.measured(row["steps"], part.warmup)
    whole = known | row | {"versions": known["versions"] | row.get("versions", {})}
    if "steps" in row and part.trainer == "original":
        whole["at_mean_row"] = figures.at_mean_row(whole, SHAPES[arguments.shape].sequence_length)
    return whole


def _measured(
    part: Part, shape: Shape, laid: Ground, arguments: argparse.Namespace, limit_s: float
) -> dict[str, Any]:
    """Return the row of a part, or its error."""
    work, environment = arguments.work, _environment(shape)
    if part.trainer == "so-tui":
        changes = dict(change.split("=", 1) for change in arguments.set)
        return ours.measure(
            part, shape, laid, ours.Job(work / "runs", environment, limit_s, changes)
        )
    if part.trainer == "trl" and find_spec("trl") is None:
        return {"error": "TRL is not installed"}
    if part.trainer != "trl" and arguments.original is None:
        return {"error": "--original was not given"}
    script = "" if arguments.original is None else str(arguments.original.resolve())
    job = {
        "part": part.name,
        "shape": arguments.shape,
        "ground": laid.as_json(),
        "script": script,
        "steps": part.steps,
    }
    child = partial(_child, job=job, environment=environment, logs=work / "logs")
    if part.trainer != "original":
        return processes.row_of(
            child("packed" if part.trainer == "original-packed" else "trl_sft", limit_s=limit_s),
            limit_s,
        )
    begin = time.monotonic()
    prepared = processes.row_of(child("original_ground", limit_s=limit_s), limit_s)
    if "error" in prepared:
        return prepared
    left_s = limit_s - (time.monotonic() - begin)
    ended = original.measure(part, shape, laid, arguments.original, work, environment, left_s)
    _log(work / "logs", part.name, ended)
    return original.row(ended, part, shape, prepared["tokens"], left_s) | {
        "model_folder_s": round(limit_s - left_s, 1)
    }


def _child(
    module: str, *, job: dict[str, Any], environment: dict[str, str], logs: Path, limit_s: float
) -> Ended:
    own = environment | {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    own["MASTER_PORT"] = str(processes.free_port())
    command = [sys.executable, "-m", f"benchmarks.comparison.{module}", json.dumps(job)]
    ended = processes.run(command, own, limit_s, processes.says_row)
    _log(logs, f"{job['part']}-{module}", ended)
    return ended


def _environment(shape: Shape) -> dict[str, str]:
    """Return the environment of all trainers: no threads are bound from outside, and no allocator
    is tuned.
    """
    paths = [str(ROOT), str(ROOT / "trainer"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
    }
    for variable in ("OMP_NUM_THREADS", "KMP_AFFINITY", "WORLD_SIZE", "RANK", "LOCAL_RANK"):
        environment.pop(variable, None)
    if given := environment.get("TORCH_CUDA_ARCH_LIST"):
        environment["TORCH_CUDA_ARCH_LIST"] = valid_arch_list(
            given
        )  # DeepSpeed cannot parse every value that images set.
    if not shape.cuda:
        environment["DS_ACCELERATOR"] = "cpu"
    return environment


def _machine() -> dict[str, Any]:
    machine = inspect_machine()
    return {
        "host": machine.hostname,
        "cpu": machine.cpu_name,
        "cores": len(machine.allowed_cpus),
        "gpus": [gpu.name for gpu in machine.gpus],
    }


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "deepspeed", "transformers", "datasets")}


def _log(folder: Path, name: str, ended: Ended) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.log").write_text("".join(f"{line.text}\n" for line in ended.lines))


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_file = path.with_suffix(".partial")
    partial_file.write_text(json.dumps(rows, indent=1))
    partial_file.replace(path)


if __name__ == "__main__":
    sys.exit(main())
