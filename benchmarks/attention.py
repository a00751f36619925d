"""Measure attention backends: their kernels alone, and whole steps in which every sequence is one
document or holds many.

    PYTHONPATH=.:trainer python benchmarks/attention.py --out attention.json kernels
    PYTHONPATH=.:trainer python benchmarks/attention.py --out attention.json steps --shapes 4x4096
        1x65536
    PYTHONPATH=.:trainer python benchmarks/attention.py --out attention.json table
        # or: planned, steps beside their plans

Kernels: causal attention in bf16 over packed documents, 32 query and 8 key heads of 128, each
backend that can be used here. Steps: a preset's shape with random weights and random tokens,
SuperOffload at a ratio of 0.9, the backends one after the other in the same engine.
``--documents N`` cuts each sequence into documents of N tokens, ``--set`` sets other keys of the
preset. Rows are appended to the file. ``--tiny`` runs the same code on small sizes, also without a
GPU, as a test.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

PACKS: dict[str, tuple[int, ...]] = {
    "1 x 65,536": (65_536,),
    "32,768 + 16,384 + 2 x 8,192": (32_768, 16_384, 8_192, 8_192),
    "1 x 16,384": (16_384,),
    "4 x 4,096": (4_096,) * 4,
    "16 x 1,024": (1_024,) * 16,
    "64 x 256": (256,) * 64,
    "100 of 60 to 260": tuple(60 + 2 * number for number in range(100)),
}
LONG_TOKENS = 32_768
ROUNDS, RUNS = 5, 3


def main() -> int:
    """Measure what was asked for; return the exit code."""
    arguments = _arguments()
    if arguments.what in ("table", "planned"):
        print((table if arguments.what == "table" else planned_table)(_rows(arguments.out)))
        return 0
    if arguments.what == "kernels":
        _append(arguments.out, _kernels(tiny=arguments.tiny))
        return 0
    if arguments.alone:
        rows = _steps(arguments)
        if os.environ["RANK"] == "0":
            _append(arguments.out, rows)
        sys.stdout.flush()
        os._exit(0)  # DeepSpeed's exit handlers may crash.
    from benchmarks.speed import one_rank

    environment = (
        os.environ
        | one_rank(cpu=arguments.tiny)
        | {"PYTHONUNBUFFERED": "1", "WORLD_SIZE": str(arguments.gpus)}
    )
    environment["LOCAL_SIZE"] = environment["WORLD_SIZE"]
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(arguments.gpus)]
    ranks = [
        subprocess.Popen([sys.executable, *sys.argv, "--alone"], env=environment | place)
        for place in places
    ]
    return max(rank.wait() for rank in ranks)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["kernels", "steps", "table", "planned"])
    parser.add_argument(
        "--out", type=Path, default=Path("attention.json"), help="file to which rows are appended"
    )
    parser.add_argument("--preset", default="qwen3-4b-random", help="whose shape steps have")
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["4x4096", "1x65536"],
        metavar="SEQUENCESxTOKENS",
        help="micro-batches of the steps",
    )
    parser.add_argument("--gpus", type=int, default=1, help="GPUs that steps run on")
    parser.add_argument(
        "--documents",
        type=int,
        default=0,
        metavar="TOKENS",
        help="length of documents (default: that of the sequences)",
    )
    parser.add_argument("--policy", default="full", help="activation checkpointing")
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="further keys of the preset, for steps",
    )
    parser.add_argument(
        "--backends", nargs="+", help="only these (default: all that can be used here)"
    )
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument(
        "--count",
        type=int,
        default=3,
        help="measured steps; of micro-batches beyond 32,768 tokens one",
    )
    long_help = (
        "steps before that one; with 0, name a shorter shape first, whose steps build the kernels"
    )
    parser.add_argument("--long-warmup", type=int, default=1, help=long_help)
    parser.add_argument(
        "--tiny", action="store_true", help="small sizes, also on the CPU, as a test"
    )
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _rows(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text()) if path.exists() else []


def _append(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text(json.dumps([*_rows(path), *rows], indent=1) + "\n")


def _host() -> dict[str, Any]:
    """Return where rows were measured."""
    import torch

    from so_tui.machine.software import package_version

    cuda = torch.cuda.is_available()
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
    }
    found["versions"] = {
        name: package_version(name) for name in ("flash-attn", "flash-attn-4", "nvidia-cutlass-dsl")
    }
    return found | ({"gpu_uuid": str(torch.cuda.get_device_properties(0).uuid)} if cuda else {})


# -- kernels ---------------------------------------------------------------------------------------


def _kernels(*, tiny: bool) -> list[dict[str, Any]]:
    """Return a row for each backend and pack."""
    import torch

    from so_tui_trainer.tools.gpu_rates import flops_per_s, usable_backends

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for backend, kernels in usable_backends(device).items():
        for pack, lengths in PACKS.items():
            kept = [min(length, 64) for length in lengths[:4]] if tiny else list(lengths)
            forward, backward = flops_per_s(kernels, kept, device, _seconds)
            row: dict[str, Any] = {
                "what": "kernel",
                "backend": backend,
                "pack": pack,
                "lengths": kept,
            }
            row |= {"forward_tflops": forward / 1e12, "backward_tflops": backward / 1e12, **_host()}
            rows.append(row)
            print(
                f"{backend}, {pack}: {row['forward_tflops']:.0f} / {row['backward_tflops']:.0f} "
                "TFLOPS",
                flush=True,
            )
    return rows


def _seconds(run: Callable[[], object]) -> float:
    """Return the median time of a run on the GPU, launches not included: a long product keeps the
    GPU busy while runs are queued.
    """
    import torch

    run()
    busy = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    event: Any = torch.cuda.Event
    times: list[float] = []
    for _ in range(ROUNDS):
        begin, end = (event(enable_timing=True) for _ in range(2))
        for _ in range(20):
            busy @ busy
        begin.record()
        for _ in range(RUNS):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1000 / RUNS)
    return statistics.median(times)


# -- steps -----------------------------------------------------------------------------------------


def _steps(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each shape and backend."""
    from so_tui.launch.launch import prepare_again
    from so_tui.machine import inspect_machine
    from so_tui_trainer import binding

    machine = inspect_machine()
    shapes = [tuple(map(int, shape.split("x"))) for shape in arguments.shapes]
    launch = prepare_again(
        _spec(arguments, *max(shapes, key=lambda shape: shape[0] * shape[1])), machine, force=True
    )
    rank = int(os.environ["RANK"])
    mine = launch.plan.binding[rank]
    binding.bind(mine)  # Before torch starts its threads.

    import torch

    import superoffload
    from benchmarks.speed import steps_of
    from so_tui.plan.planner import make_plan
    from so_tui.plan.workload import Workload
    from so_tui.spec import with_values
    from so_tui_trainer.engine_settings import engine_settings
    from so_tui_trainer.model import attention
    from so_tui_trainer.model.build import build
    from so_tui_trainer.model.trained import parameter_groups
    from so_tui_trainer.ranks import join
    from so_tui_trainer.tools.gpu_rates import usable_backends

    ranks = join(use_gpu=not arguments.tiny)
    torch.manual_seed(0)
    spec = launch.plan.spec
    model = build(spec, ranks.device, launch.ds_config)
    engine, *_ = superoffload.initialize(
        model, parameter_groups(model, spec), engine_settings(spec, mine), launch.ds_config
    )
    binding.apply_main_cores(mine)
    group = attention.sequence_group(spec.train.sequence_parallel)
    chosen: dict[str, str] = {
        "offload.parameters": spec.offload.parameters,
        "model.tiled_mlp": spec.model.tiled_mlp,
    }
    chosen["model.activation_offload"] = spec.model.activation_offload
    rows = []
    for sequences, tokens in shapes:
        used = with_values(
            _spec(arguments, sequences, tokens), chosen
        )  # what the largest shape's plan chose holds for all
        document = min(arguments.documents or tokens, tokens)
        batches = _batches(used, document, ranks, end_to_end=not arguments.tiny)
        usable: dict[str, Any] = {
            str(name): kernels for name, kernels in usable_backends(ranks.device).items()
        }
        for backend, kernels in (usable or {"": None}).items():
            if arguments.backends and backend not in arguments.backends:
                continue
            if kernels is not None:
                attention.register(kernels, group)
            plan = make_plan(
                used, machine, workload=Workload(attended_tokens=float(document)), probed=False
            )
            row = {
                "what": "step",
                "preset": arguments.preset,
                "backend": backend or model.attention,
                "micro_batch": sequences,
            }
            row |= {
                "sequence_length": tokens,
                "document": document,
                "policy": arguments.policy,
                "set": arguments.set,
                "chosen": chosen,
                "gpus": arguments.gpus,
            }
            row |= {
                "planned_step_s": plan.step_s,
                "planned_reserved_gib": plan.gpu_reserved_bytes / 2**30,
            }
            row |= {
                "planned": msgspec.to_builtins(plan.step),
                "speed_source": msgspec.to_builtins(plan.speed_source),
            }
            long = sequences * tokens > LONG_TOKENS
            warmup, count = (
                (arguments.long_warmup, 1) if long else (arguments.warmup, arguments.count)
            )
            row |= {"warmup": warmup, "count": count}
            row |= (
                steps_of(engine, batches, used, ranks.device, warmup=warmup, count=count) | _host()
            )
            rows.append(row)
            if ranks.first:
                print(json.dumps(row), flush=True)
                _append(arguments.out.with_suffix(".partial.json"), [row])
    superoffload.close(engine)
    return rows


def _spec(arguments: argparse.Namespace, sequences: int, tokens: int) -> Any:
    from so_tui.spec import find_preset, with_values

    changes = {
        "offload.mode": "superoffload",
        "offload.ratio": "0.9",
        "gpus": str(arguments.gpus),
        "train.micro_batch": str(sequences),
        "train.gradient_accumulation": "1",
        "train.gradient_clipping": "0",
        "data.sequence_length": str(tokens),
        "model.activation_checkpointing": arguments.policy,
    }
    changes |= dict(change.split("=", 1) for change in arguments.set)
    return with_values(find_preset("tiny" if arguments.tiny else arguments.preset).spec, changes)


def _batches(spec: Any, document: int, ranks: Any, *, end_to_end: bool) -> Any:
    """Return batches of random tokens in documents of one length."""
    import numpy as np

    from so_tui_trainer.data.batches import Batches
    from so_tui_trainer.data.documents import Counts, Documents

    count = spec.train.micro_batch * spec.replicas * spec.data.sequence_length // document * 2
    offsets = np.arange(count + 1) * document
    random = np.random.default_rng(0)
    tokens = random.integers(1, 2000, size=offsets[-1]).astype(np.int32)
    trained = np.arange(offsets[-1]) % document > 0
    batches = Batches(
        Documents(tokens, trained, offsets, Counts(count, 0, 0), "random", np.arange(count)),
        spec,
        ranks.rank,
        pin=ranks.device.type == "cuda",
    )
    batches.end_to_end = end_to_end
    return batches


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as Markdown: kernels by pack, then steps."""
    kernels = [row for row in rows if row["what"] == "kernel"]
    steps = [row for row in rows if row["what"] == "step"]
    backends = list(dict.fromkeys(row["backend"] for row in kernels))
    found = {
        (row["pack"], row["backend"]): f"{row['forward_tflops']:.0f} / {row['backward_tflops']:.0f}"
        for row in kernels
    }
    lines = ["| documents | " + " | ".join(backends) + " |", "|---|" + "---|" * len(backends)]
    lines += [
        f"| {pack} | " + " | ".join(found.get((pack, backend), "") for backend in backends) + " |"
        for pack in PACKS
    ]
    lines += [
        "",
        (
            "| micro-batch | document | recomputed | backend | step | model TFLOPS | forward | "
            "backward | exposed optimizer |"
        ),
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    lines += [
        (
            f"| {row['micro_batch']} x {row['sequence_length']:,} | {row['document']:,} | "
            f"{row['policy']} | {row['backend']} |"
            f" {row['step_s']:.2f} s | {row['model_tflops']:.0f} | {row['forward_s']:.2f} s | "
            f"{row['backward_s']:.2f} s |"
            f" {row['optimizer_s']:.2f} s |"
        )
        for row in steps
    ]
    return "\n".join(lines)


def planned_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return steps beside their plans as Markdown, without those of reports that have no plans."""
    lines = [
        (
            "| tokens | documents | backend | recomputed, and other settings | s/step | planned | "
            "GPU memory | planned | model TFLOPS |"
        )
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    lines += [
        (
            f"| {row['sequence_length']:,} | {row['document']:,} | {row['backend']} | "
            f"{', '.join([row['policy'], *row['set']])} |"
            f" {row['step_s']:.2f} | {row['planned_step_s']:.2f} | {row['gpu_reserved_gib']:.1f} "
            f"GiB | {row['planned_reserved_gib']:.1f} |"
            f" {row['model_tflops']:.0f} |"
        )
        for row in rows
        if row["what"] == "step" and "planned_step_s" in row
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
