"""Measures the offload engines at one shape: Qwen3-4B, random weights, random tokens, full
activation checkpointing, SDPA.

    PYTHONPATH=.:trainer python benchmarks/offload.py --out offload.json
        # the minimal set, most important first
    PYTHONPATH=.:trainer python benchmarks/offload.py --out offload.json --only floor ours
    PYTHONPATH=.:trainer python benchmarks/offload.py --out offload.json --ranks 2 --only floor ours
    PYTHONPATH=.:trainer python benchmarks/offload.py --out offload.json --table
        # what was measured so far, as Markdown

Every configuration runs in a process of its own, so that one that fails or runs out of memory does
not affect the others. Rows are appended to the file as they are measured, and configurations that
are already in it are skipped unless ``--again`` is given. ``--shape tiny`` runs the same code on a
machine without a GPU, to try it out.

A row has every step of every rank, warm-up included: its times on the GPU, how long the host took
to launch each part, page faults, preemptions, garbage collection, growth of the GPU's memory and
time that the hypervisor took (``step_counters``). ``--steps`` shows them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from benchmarks.offload_kernels import kernel_rows
from benchmarks.offload_rank import CONFIGURATIONS, MARK, MINIMAL, measure


def main() -> int:
    arguments = _arguments()
    if arguments.rank is not None:
        measure(arguments)
        return 0
    rows: list[dict[str, Any]] = (
        json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    )
    if arguments.table:
        print(_table(rows))
        return 0
    if arguments.steps:
        print(_steps_table(rows))
        return 0
    if arguments.kernel:
        rows += kernel_rows(arguments.kernel)
        _write(arguments.out, rows)
        return 0
    failed = 0
    for name in arguments.only or MINIMAL:
        if not arguments.again and any(_same(row, name, arguments) for row in rows):
            print(f"{name}: already measured", flush=True)
            continue
        row = _run(name, arguments)
        failed += "error" in row
        rows.append(row)
        _write(arguments.out, rows)
        print(
            json.dumps(
                {
                    key: value
                    for key, value in row.items()
                    if key not in ("steps", "losses", "steps_of_others")
                }
            ),
            flush=True,
        )
    print(_table(rows))
    return min(failed, 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("offload.json"), help="file to which rows are appended"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[configuration.name for configuration in CONFIGURATIONS],
        help="what to measure",
    )
    parser.add_argument(
        "--ranks", type=int, default=1, help="GPUs, or processes on a machine without a GPU"
    )
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences of one micro-batch")
    parser.add_argument("--length", type=int, default=4096, help="tokens per sequence")
    parser.add_argument("--shape", choices=["qwen3-4b", "tiny"], default="qwen3-4b")
    parser.add_argument(
        "--limit-s", type=float, default=240, help="longest time for one configuration"
    )
    parser.add_argument("--sub-group-size", type=int, default=100_000_000)
    parser.add_argument(
        "--warmup",
        type=int,
        metavar="STEPS",
        help="steps before those, instead of each configuration's number",
    )
    parser.add_argument(
        "--measured",
        type=int,
        default=0,
        metavar="STEPS",
        help="steps to measure, instead of each configuration's number",
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="measure configurations again that are already in the file",
    )
    parser.add_argument(
        "--table", action="store_true", help="print the rows in the file as a table"
    )
    parser.add_argument(
        "--steps", action="store_true", help="print every step in the file, of the slowest rank"
    )
    parser.add_argument(
        "--kernel",
        type=int,
        default=0,
        metavar="PARAMETERS",
        help="measure only the Adam kernels, on this machine's cores",
    )
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    return parser.parse_args()


def _same(row: dict[str, Any], name: str, arguments: argparse.Namespace) -> bool:
    here = {"name": name, **_size(arguments)}
    return all(row.get(key) == value for key, value in here.items()) and "error" not in row


def _size(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what distinguishes two measurements of the same configuration."""
    return {key: getattr(arguments, key) for key in ("ranks", "shape", "micro_batch", "length")}


def _run(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one configuration in processes of its own and return its row, which has an ``error``
    if that failed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "WORLD_SIZE": str(arguments.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCH_CUDA_ARCH_LIST": "9.0",
        "NCCL_NVLS_ENABLE": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTHONUNBUFFERED": "1",
    }
    for variable in ("OMP_NUM_THREADS", "KMP_AFFINITY"):
        environment.pop(variable, None)
    if arguments.shape == "tiny":
        environment["DS_ACCELERATOR"] = "cpu"
    begin = time.monotonic()
    with ExitStack() as files:
        # Files instead of pipes, because DeepSpeed's own worker can outlive its rank and would keep
        # a pipe open.
        outputs = [
            files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(arguments.ranks)
        ]
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:], "--name", name, "--rank", str(rank)],
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for rank, output in enumerate(outputs)
        ]
        for rank in ranks:
            with suppress(subprocess.TimeoutExpired):
                rank.wait(max(1.0, arguments.limit_s - (time.monotonic() - begin)))
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()
        for output in outputs:
            output.seek(0)
        texts = [output.read() for output in outputs]
    rows = [
        json.loads(line.removeprefix(MARK))
        for text in texts
        for line in text.splitlines()
        if line.startswith(MARK)
    ]
    identity = {"name": name, **_size(arguments), "wall_s": round(time.monotonic() - begin, 1)}
    if len(rows) < arguments.ranks:
        timeout = (
            [f"took longer than {arguments.limit_s:.0f} s"]
            if time.monotonic() - begin >= arguments.limit_s
            else []
        )
        tail = "\n".join([*timeout, *(text[-3000:] for text in texts)])
        print(tail, flush=True)
        return identity | {"error": tail[-1500:]}
    slowest: dict[str, Any] = max(rows, key=lambda row: float(row["step_s"]))
    others = [row["steps"] for row in rows if row is not slowest]
    return (
        identity
        | slowest
        | {
            "gpus": [row["gpu"] for row in rows],
            "sub_group_size": arguments.sub_group_size,
            "steps_of_others": others,
        }
    )


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(rows, indent=1))
    partial.replace(path)


def _table(rows: list[dict[str, Any]]) -> str:
    """Format the last row of each configuration as a Markdown table."""
    floors = {
        (row["ranks"], row["accumulation"]): row["step_s"]
        for row in rows
        if row.get("mode") == "gpu" and "error" not in row
    }
    lines = [
        (
            "| configuration | GPUs | s/step | x floor | tokens/s per GPU | forward | backward | "
            "optimizer | exposed wait | Adam busy |"
            " to host | to GPU | GPU memory | first and last loss |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in {(row["name"], row.get("ranks")): row for row in rows}.values():
        if "error" in row or "step_s" not in row:
            continue
        floor = floors.get((row["ranks"], row["accumulation"]))
        lines.append(
            (
                f"| {row['name']} | {row['ranks']} | {row['step_s']:.2f} | "
                f"{row['step_s'] / floor:.2f} |"
            )
            if floor
            else f"| {row['name']} | {row['ranks']} | {row['step_s']:.2f} | |"
        )
        lines[-1] += (
            f" {row['tokens_per_s_per_gpu']:.0f} | {row['forward_s']:.2f} | "
            f"{row['backward_s']:.2f} | {row['optimizer_s']:.2f} |"
            f" {row['exposed_wait_s']:.2f} | {row['adam_busy_s']:.2f} | "
            f"{row['to_host_gb_per_s']:.0f} GB/s |"
            f" {row['to_gpu_gb_per_s']:.0f} GB/s | {row['gpu_peak_gib']:.0f} GiB | "
            f"{row['losses'][0]:.3f}, {row['losses'][-1]:.3f} |"
        )
    return "\n".join(lines)


def _steps_table(rows: list[dict[str, Any]]) -> str:
    """Format every step of each configuration's last row, one on a line; those that count are
    marked with a star.
    """
    lines = []
    for row in {(row["name"], row.get("ranks")): row for row in rows}.values():
        if "steps" not in row:
            continue
        lines.append(f"{row['name']}, {row['ranks']} ranks")
        for number, step in enumerate(row["steps"]):
            shown = " ".join(
                f"{name}={value:.3g}"
                for name, value in step.items()
                if value and name != "gradient_norm"
            )
            lines.append(
                f"  {number + 1:3}{'*' if number >= row.get('warmup', 0) else ' '} {shown}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
