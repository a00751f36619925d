"""Measure forward and backward, one optimisation after the other: a preset's shape, random weights,
packed rows, 4 x 4096 tokens.

    PYTHONPATH=.:trainer python benchmarks/speed.py --data rows.json --out speed.jsonl
        # what is not in the file yet
    PYTHONPATH=.:trainer python benchmarks/speed.py --data rows.json --out speed.jsonl --table
        # results so far, as Markdown
    PYTHONPATH=.:trainer python benchmarks/speed.py --out speed.jsonl --only "gpu, mixture of
        experts" --model qwen3-30b-a3b --layers 8

Each setup runs in a process of its own, which adds one lever after the other to the same model and
engine; rows are appended to the file. ``--layers`` uses fewer layers than the preset has, if the
whole model does not fit. ``--profile FOLDER`` also writes the GPU's kernel times of each row.
``--tiny`` runs the same code with a scaled-down model on a machine without GPU, as a test.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

WARMUP, MEASURED = 2, 5
MODEL = "qwen3-4b-random"


@dataclass(frozen=True)
class Setup:
    """An engine, and the levers that are added to it one by one."""

    levers: tuple[str, ...]
    mode: str = "gpu"
    accumulation: int = 1
    clipping: float = 1.0


SETUPS = {
    "gpu": Setup(("plain", "norm", "rotary", "gate", "none, micro-batch 2", "selective")),
    "gpu, mixture of experts": Setup(("plain", "norm", "rotary", "experts", "selective")),
    "superoffload, 8 accumulation steps": Setup(("all",), mode="superoffload", accumulation=8),
    "superoffload": Setup(("all",), mode="superoffload"),
}
DENSE = ("gpu", "superoffload, 8 accumulation steps", "superoffload")


def main() -> int:
    """Measure what is missing and print the table; return the exit code."""
    arguments = _arguments()
    if arguments.setup:
        _measure(arguments, SETUPS[arguments.setup])
        return 0
    if arguments.table:
        print(_table(_rows(arguments.out)))
        return 0
    failed = 0
    for name in arguments.only or DENSE:
        done = {
            row["lever"]
            for row in _rows(arguments.out)
            if _identity(arguments, name).items() <= row.items()
        }
        if done >= set(SETUPS[name].levers):
            print(f"{name}: already measured", flush=True)
            continue
        environment = os.environ | one_rank(cpu=arguments.tiny) | {"PYTHONUNBUFFERED": "1"}
        process = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--setup", name], env=environment, check=False
        )
        failed += process.returncode != 0
    print(_table(_rows(arguments.out)))
    return min(failed, 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="builtin:tiny/rows.jsonl", help="rows to train on")
    parser.add_argument(
        "--out", type=Path, default=Path("speed.jsonl"), help="file to which rows are appended"
    )
    parser.add_argument(
        "--model", default=MODEL, metavar="PRESET", help="preset whose shape is used"
    )
    parser.add_argument(
        "--layers", type=int, help="use only this many layers, the first ones (default: all)"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(SETUPS),
        help="what to measure (default: the setups of a dense model)",
    )
    parser.add_argument("--tiny", action="store_true", help="scaled down, on the CPU")
    parser.add_argument("--profile", type=Path, help="folder for lists of the GPU's kernels")
    parser.add_argument(
        "--table", action="store_true", help="print the results in the file and exit"
    )
    parser.add_argument("--setup", help=argparse.SUPPRESS)
    return parser.parse_args()


def _identity(arguments: argparse.Namespace, setup: str) -> dict[str, Any]:
    """Return what rows that are compared have in common."""
    return {"model": arguments.model, "layers": arguments.layers, "setup": setup}


def one_rank(*, cpu: bool) -> dict[str, str]:
    """Return the environment of a process that is the only rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    single = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    single["SO_TUI_RENDEZVOUS"] = f"file://{tempfile.mkdtemp()}/store"
    return (
        single
        | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        | ({"DS_ACCELERATOR": "cpu"} if cpu else {})
    )


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file. Old files have rows of the default model, which they do not
    name.
    """
    only: dict[str, Any] = {"model": MODEL, "layers": None}
    return (
        [only | json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    )


def _shape(row: dict[str, Any]) -> str:
    return f"{row['model']}, {row['layers']} layers" if row["layers"] else str(row["model"])


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [
        (
            "| model | setup | with | s/step | model TFLOPS/GPU | hardware TFLOPS/GPU | forward | "
            "backward | optimizer | GPU memory |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        (
            f"| {_shape(row)} | {row['setup']} | {row['lever']} | {row['step_s']:.3f} | "
            f"{row['model_tflops']:.0f} | {row['hw_tflops']:.0f} |"
            f" {row['forward_s']:.3f} | {row['backward_s']:.3f} | {row['optimizer_s']:.3f} | "
            f"{row['gpu_reserved_gib']:.0f} GiB |"
        )
        for row in rows
    ]
    return "\n".join(lines)


# -- one setup -------------------------------------------------------------------------------------


class Ready(NamedTuple):
    """The one rank before its first step."""

    spec: Any
    """As the plan resolved it."""
    device: Any
    documents: Any
    model: Any
    engine: Any


def ready(spec: Any, machine: Any, *, use_gpu: bool) -> Ready:
    """Bind the process and prepare data, model and engine as the trainer does. Needs the
    environment of ``one_rank``.
    """
    from so_tui.launch.launch import prepare_again
    from so_tui_trainer import binding

    launch = prepare_again(spec, machine, force=True)
    spec, mine = launch.plan.spec, launch.plan.binding[0]
    binding.bind(mine)  # Before torch starts its threads.

    import torch

    import superoffload
    from so_tui_trainer.data import documents as cache
    from so_tui_trainer.data import tokens
    from so_tui_trainer.engine_settings import engine_settings
    from so_tui_trainer.model.build import build
    from so_tui_trainer.model.trained import parameter_groups
    from so_tui_trainer.ranks import join

    ranks = join(use_gpu=use_gpu)
    documents = cache.read(tokens.prepare(spec), spec.data)
    torch.manual_seed(0)
    model = build(spec, ranks.device, launch.ds_config)
    engine, *_ = superoffload.initialize(
        model, parameter_groups(model, spec), engine_settings(spec, mine), launch.ds_config
    )
    binding.apply_main_cores(mine)
    return Ready(spec, ranks.device, documents, model, engine)


def _measure(arguments: argparse.Namespace, setup: Setup) -> None:
    """Measure one setup, lever by lever."""
    from so_tui.machine import inspect_machine

    spec, device, documents, model, engine = ready(
        _spec(arguments, setup), inspect_machine(), use_gpu=not arguments.tiny
    )

    import superoffload
    from so_tui.model.shape import architecture
    from so_tui_trainer.data.batches import Batches

    experts = (
        model.causal.config._experts_implementation
        if architecture(spec.model.config).experts
        else None
    )
    for lever in setup.levers:
        used = _with_lever(model, spec, lever)
        batches = Batches(documents, used, 0, pin=device.type == "cuda")
        row = _identity(arguments, arguments.setup) | {
            "lever": lever,
            "parameters": spec.model.parameter_count,
            "experts": experts,
        }
        row |= steps_of(engine, batches, used, device)
        with arguments.out.open("a") as out:
            out.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
        if arguments.profile:
            name = "-".join(re.findall(r"[\w.]+", f"{arguments.model} {arguments.setup} {lever}"))
            _profile(engine, batches, device, arguments.profile / f"{name}.txt")
    superoffload.close(engine)
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed's exit handlers may crash.


def _spec(arguments: argparse.Namespace, setup: Setup) -> Any:
    import msgspec

    from so_tui.spec import find_preset, with_values

    plain = setup.levers[0] == "plain"
    changes = {
        "data.source": arguments.data,
        "data.format": "auto",
        "offload.mode": "superoffload" if arguments.tiny else setup.mode,
        "train.gradient_accumulation": str(setup.accumulation),
        "train.gradient_clipping": str(setup.clipping),
        "model.kernels": "plain" if plain else "auto",
        "model.activation_checkpointing": "full" if plain else "selective",
    }
    base = find_preset("tiny" if arguments.tiny else MODEL).spec
    return with_values(msgspec.structs.replace(base, model=_model(arguments)), changes)


def _model(arguments: argparse.Namespace) -> Any:
    """Return the preset's model with random weights, and perhaps fewer layers."""
    import msgspec

    from benchmarks.architecture_models import scaled_down
    from so_tui.spec import find_preset

    whole = find_preset(arguments.model).spec.model
    model = (
        scaled_down(whole)
        if arguments.tiny
        else msgspec.structs.replace(whole, weights="random", tokenizer="builtin:tiny")
    )
    return with_layers(model, arguments.layers) if arguments.layers else model


def with_layers(model: Any, layers: int) -> Any:
    """Return a model with its first layers only."""
    import msgspec

    from so_tui_trainer.tools.presets import parameter_table

    fewer: dict[str, Any] = {"num_hidden_layers": layers}
    if "layer_types" in model.config:
        fewer["layer_types"] = model.config["layer_types"][:layers]
    model = msgspec.structs.replace(model, config=model.config | fewer, parameters=())
    return msgspec.structs.replace(model, parameters=parameter_table(model))


def _with_lever(model: Any, spec: Any, lever: str) -> Any:
    """Add a lever to the model, and return the spec that now applies."""
    from so_tui.spec import with_values
    from so_tui_trainer.model import checkpointing, fused

    kernels = {
        "norm": fused.install_norms,
        "rotary": fused.install_rotary,
        "gate": fused.install_gates,
        "experts": fused.install_experts,
    }
    if lever in kernels:
        kernels[lever](model.causal)
    elif lever == "selective":
        checkpointing.install(model.causal, "selective")
        return with_values(spec, {"model.activation_checkpointing": "selective"})
    elif lever.startswith("none"):
        model.causal._set_gradient_checkpointing(False)
        half = max(1, spec.train.micro_batch // 2)
        return with_values(
            spec, {"model.activation_checkpointing": "none", "train.micro_batch": str(half)}
        )
    return spec


def steps_of(
    engine: Any, batches: Any, spec: Any, device: Any, warmup: int = WARMUP, count: int = MEASURED
) -> dict[str, Any]:
    """Return medians of the measured steps."""
    import torch

    import superoffload
    from so_tui.model.flops import flops_of, model_flops
    from so_tui.model.shape import architecture
    from so_tui_trainer.metrics import executed_flops
    from superoffload.transfers import seconds_between, transfers_for

    flops, shape, clock = (
        flops_of(spec.model),
        architecture(spec.model.config),
        transfers_for(device),
    )
    steps, losses = [], []
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.empty_cache()
    last = time.perf_counter()
    for number in range(1, warmup + count + 1):
        counts = batches.counts(number)
        weights = spec.ranks / counts.trained_tokens, spec.ranks / counts.useful_tokens
        marks = [clock.mark()]
        total = torch.zeros((), device=device)
        for batch in batches.micro_batches(number):
            loss = engine(batch.to(device), *weights)
            marks.append(clock.mark())
            engine.backward(loss, scale_wrt_gas=False)
            marks.append(clock.mark())
            engine.step()
            marks.append(clock.mark())
            total += loss.detach()
        losses.append(total.item())
        now = time.perf_counter()
        laps = {"forward_s": 0.0, "backward_s": 0.0, "optimizer_s": 0.0}
        for position, (begin, end) in enumerate(pairwise(marks)):
            laps[("forward_s", "backward_s", "optimizer_s")[position % 3]] += seconds_between(
                begin, end
            )
        stats = superoffload.stats(engine)
        laps["forward_s"] -= stats.exposed_in_forward_s
        laps["optimizer_s"] += stats.exposed_in_forward_s
        lengths = counts.document_lengths.tolist()
        steps.append(
            {
                "step_s": now - last,
                **laps,
                "adam_busy_s": stats.adam_busy_s,
                "model_tflops": model_flops(flops, counts.useful_tokens, lengths)
                / spec.ranks
                / (now - last)
                / 1e12,
                "hw_tflops": executed_flops(spec, flops, shape, counts)
                / spec.ranks
                / (now - last)
                / 1e12,
                "useful_tokens": counts.useful_tokens,
                "trained_tokens": counts.trained_tokens,
                "computed_tokens": counts.computed_tokens,
                "longest_document": max(lengths),
            }
        )
        last = now
    measured = steps[warmup:]
    return {key: statistics.median(step[key] for step in measured) for key in measured[0]} | {
        "gpu_reserved_gib": torch.cuda.max_memory_reserved() / 2**30
        if device.type == "cuda"
        else 0.0,
        "gpu_allocated_gib": torch.cuda.max_memory_allocated() / 2**30
        if device.type == "cuda"
        else 0.0,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "losses": losses,
        "each_step_s": [step["step_s"] for step in steps],
    }


def _profile(engine: Any, batches: Any, device: Any, path: Path) -> None:
    """Write the kernels of one micro-batch, the most expensive first, and the GPU's idle time."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    cuda = device.type == "cuda"
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    ) as profiled:
        begin = time.perf_counter()
        batch = next(iter(batches.micro_batches(WARMUP + MEASURED + 1)))
        engine.backward(engine(batch.to(device), 1e-4, 1e-4), scale_wrt_gas=False)
        engine.step()
        handed_over = time.perf_counter() - begin
        if cuda:
            torch.cuda.synchronize()
        whole = time.perf_counter() - begin
    path.parent.mkdir(parents=True, exist_ok=True)
    order = "self_device_time_total" if cuda else "self_cpu_time_total"
    head = (
        f"one micro-batch with optimizer, under the profiler: {whole:.3f} s, handed over to the "
        f"GPU after {handed_over:.3f} s\n"
    )
    averages = profiled.key_averages()
    text = head + averages.table(sort_by=order, row_limit=60, max_name_column_width=90)
    text += "\n" + averages.table(
        sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60
    )
    path.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
