"""Measures the offload engines at one shape: Qwen3-4B, random weights, random tokens, full activation checkpointing, SDPA.

    PYTHONPATH=.:trainer python benchmarks/offload.py --out offload.json            # the minimal set, most important first
    PYTHONPATH=.:trainer python benchmarks/offload.py --out offload.json --only floor ours
    PYTHONPATH=.:trainer python benchmarks/offload.py --out offload.json --ranks 2 --only floor ours
    PYTHONPATH=.:trainer python benchmarks/offload.py --out offload.json --table    # what was measured so far, as Markdown

Every configuration runs in a process of its own, so that one that fails or runs out of memory does not affect the others. Rows are appended
to the file as they are measured, and configurations that are already in it are skipped unless ``--again`` is given. ``--shape tiny`` runs
the same code on a machine without a GPU, to try it out.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

MARK = "offload-benchmark-row: "


@dataclass(frozen=True)
class Configuration:
    """One configuration to measure; the fields are those of the run spec."""

    name: str
    mode: str = "superoffload"
    engine: str = "so-tui"
    ratio: float = 0.9
    clipping: float | None = 0.0
    """None: the key is left out of the DeepSpeed config, as in the published scripts, and DeepSpeed uses 1.0."""
    accumulation: int = 1
    warmup: int = 2
    measured: int = 5
    lazy: bool = True
    """False: ours, but ``step`` waits for all new weights."""


CONFIGURATIONS = (
    Configuration("ours"),
    Configuration("floor", mode="gpu"),
    Configuration("ours-clip-always", clipping=1e-3),
    Configuration("zerooffload", mode="zerooffload"),
    Configuration("deepspeed-original", engine="deepspeed", clipping=None),
    Configuration("deepspeed-clip-0", engine="deepspeed"),
    Configuration("ours-clip-never", clipping=1e6),
    Configuration("zerooffload-ratio-1", mode="zerooffload", ratio=1.0),
    Configuration("ours-gas-8", accumulation=8, warmup=1),
    Configuration("floor-gas-8", mode="gpu", accumulation=8, warmup=1),
    Configuration("ours-ratio-1", ratio=1.0),
    Configuration("ours-ratio-0.5", ratio=0.5),
    Configuration("ours-eager", lazy=False),
    Configuration("ours-clip-always-eager", clipping=1e-3, lazy=False),
    Configuration("ours-gas-8-clip-always", accumulation=8, clipping=1e-3, warmup=1),
)
MINIMAL = tuple(configuration.name for configuration in CONFIGURATIONS[:10])


# -- the parent: one process per rank and configuration --------------------------------------------------------------------------------


def main() -> int:
    arguments = _arguments()
    if arguments.rank is not None:
        _measure(arguments)
        return 0
    rows: list[dict[str, Any]] = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    if arguments.table:
        print(_table(rows))
        return 0
    if arguments.kernel:
        rows += _kernel_rows(arguments.kernel)
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
        print(json.dumps({key: value for key, value in row.items() if key not in ("steps", "losses")}), flush=True)
    print(_table(rows))
    return min(failed, 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("offload.json"), help="file to which rows are appended")
    parser.add_argument("--only", nargs="+", choices=[configuration.name for configuration in CONFIGURATIONS], help="what to measure")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs, or processes on a machine without a GPU")
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences of one micro-batch")
    parser.add_argument("--length", type=int, default=4096, help="tokens per sequence")
    parser.add_argument("--shape", choices=["qwen3-4b", "tiny"], default="qwen3-4b")
    parser.add_argument("--limit-s", type=float, default=240, help="longest time for one configuration")
    parser.add_argument("--sub-group-size", type=int, default=400_000_000)
    parser.add_argument("--again", action="store_true", help="measure configurations again that are already in the file")
    parser.add_argument("--table", action="store_true", help="print the rows in the file as a table")
    parser.add_argument(
        "--kernel", type=int, default=0, metavar="PARAMETERS", help="measure only the Adam kernels, on this machine's cores"
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
    """Measure one configuration in processes of its own and return its row, which has an ``error`` if that failed."""
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
        # Files instead of pipes, because DeepSpeed's own worker can outlive its rank and would keep a pipe open.
        outputs = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(arguments.ranks)]
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
    rows = [json.loads(line.removeprefix(MARK)) for text in texts for line in text.splitlines() if line.startswith(MARK)]
    identity = {"name": name, **_size(arguments), "wall_s": round(time.monotonic() - begin, 1)}
    if len(rows) < arguments.ranks:
        timeout = [f"took longer than {arguments.limit_s:.0f} s"] if time.monotonic() - begin >= arguments.limit_s else []
        tail = "\n".join([*timeout, *(text[-3000:] for text in texts)])
        print(tail, flush=True)
        return identity | {"error": tail[-1500:]}
    slowest: dict[str, Any] = max(rows, key=lambda row: float(row["step_s"]))
    return identity | slowest


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(rows, indent=1))
    partial.replace(path)


def _table(rows: list[dict[str, Any]]) -> str:
    """Format the last row of each configuration as a Markdown table."""
    floors = {(row["ranks"], row["accumulation"]): row["step_s"] for row in rows if row.get("mode") == "gpu" and "error" not in row}
    lines = [
        "| configuration | GPUs | s/step | x floor | tokens/s per GPU | forward | backward | optimizer | exposed wait | Adam busy |"
        " to host | to GPU | GPU memory | first and last loss |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in {(row["name"], row.get("ranks")): row for row in rows}.values():
        if "error" in row or "step_s" not in row:
            continue
        floor = floors.get((row["ranks"], row["accumulation"]))
        lines.append(
            f"| {row['name']} | {row['ranks']} | {row['step_s']:.2f} | {row['step_s'] / floor:.2f} |"
            if floor
            else f"| {row['name']} | {row['ranks']} | {row['step_s']:.2f} | |"
        )
        lines[-1] += (
            f" {row['tokens_per_s_per_gpu']:.0f} | {row['forward_s']:.2f} | {row['backward_s']:.2f} | {row['optimizer_s']:.2f} |"
            f" {row['exposed_wait_s']:.2f} | {row['adam_busy_s']:.2f} | {row['to_host_gb_per_s']:.0f} GB/s |"
            f" {row['to_gpu_gb_per_s']:.0f} GB/s | {row['gpu_peak_gib']:.0f} GiB | {row['losses'][0]:.3f}, {row['losses'][-1]:.3f} |"
        )
    return "\n".join(lines)


# -- the child: one rank of one configuration -------------------------------------------------------------------------------------------


def _measure(arguments: argparse.Namespace) -> None:
    configuration = next(configuration for configuration in CONFIGURATIONS if configuration.name == arguments.name)
    from so_tui.machine import inspect_machine
    from so_tui.plan.binding import bind_ranks
    from so_tui_trainer import binding

    ours = configuration.mode == "superoffload" and configuration.engine == "so-tui"
    mine = bind_ranks(inspect_machine(), arguments.ranks, mode="superoffload" if ours else configuration.mode, cpu_adam_cores_fraction=0.9)[
        arguments.rank
    ]
    binding.bind(mine)  # before torch makes its threads

    import torch

    import superoffload
    from so_tui_trainer.engine_settings import engine_settings
    from superoffload.deepspeed_adapter.engine import super_offload

    cuda = arguments.shape != "tiny"
    device = torch.device("cuda", arguments.rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    superoffload.join_process_group(dist_backend="nccl" if cuda else "gloo", auto_mpi_discovery=False, verbose=False)
    spec = _spec(configuration, arguments)
    begun = time.monotonic()
    model = _model(spec, device, arguments.shape)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    config = _ds_config(configuration, arguments)
    engine = superoffload.initialize(model, _parameter_groups(model), config, engine_settings(spec, mine))
    if (optimizer := super_offload(engine)) and optimizer.worker_pid:
        binding.apply_main_cores(mine)
        optimizer.lazy_weights = configuration.lazy
    started_s = time.monotonic() - begun
    print(f"{configuration.name}: ready after {started_s:.1f} s", flush=True)
    steps, losses = _steps(engine, configuration, arguments, device)
    measured = steps[configuration.warmup :]
    superoffload.close(engine)
    row = {key: statistics.median(step[key] for step in measured) for key in measured[0]}
    tokens = arguments.micro_batch * arguments.length * configuration.accumulation
    print(
        MARK
        + json.dumps(
            {
                **{key: getattr(configuration, key) for key in ("mode", "engine", "ratio", "clipping", "accumulation")},
                **row,
                "tokens_per_s_per_gpu": tokens / row["step_s"],
                "parameters": parameters,
                "gpu_peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0,
                "gpu_reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if cuda else 0.0,
                "started_s": started_s,
                "main_cpus": len(mine.main_cpus),
                "adam_cpus": len(mine.adam_cpus),
                "device": torch.cuda.get_device_name() if cuda else "cpu",
                "torch": torch.__version__,
                "steps": steps,
                "losses": losses,
            }
        ),
        flush=True,
    )
    os._exit(0)  # not by return: DeepSpeed's exit handlers may crash, and everything is written


def _spec(configuration: Configuration, arguments: argparse.Namespace) -> Any:
    from so_tui.spec import find_preset, with_values

    return with_values(
        find_preset("qwen3-4b-random").spec,
        {
            "gpus": str(arguments.ranks),
            "train.micro_batch": str(arguments.micro_batch),
            "train.gradient_accumulation": str(configuration.accumulation),
            "train.gradient_clipping": str(1.0 if configuration.clipping is None else configuration.clipping),
            "offload.mode": configuration.mode,
            "offload.engine": configuration.engine,
            "offload.ratio": str(configuration.ratio),
            "offload.sub_group_size": str(100_000 if arguments.shape == "tiny" else arguments.sub_group_size),
        },
    )


def _ds_config(configuration: Configuration, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return a DeepSpeed config like the published SuperOffload configurations."""
    size = 100_000 if arguments.shape == "tiny" else arguments.sub_group_size
    zero: dict[str, Any] = {"stage": 3, "overlap_comm": arguments.ranks > 1, "reduce_bucket_size": size, "sub_group_size": size}
    if configuration.mode != "gpu":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": arguments.shape != "tiny", "ratio": configuration.ratio}
    if configuration.engine == "deepspeed":
        zero["offload_optimizer"] |= {"super_offload": True, "cpuadam_cores_perc": 0.9}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": arguments.micro_batch,
        "gradient_accumulation_steps": configuration.accumulation,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "wall_clock_breakdown": False,
    }
    if configuration.clipping is not None:
        config["gradient_clipping"] = configuration.clipping
    return config


def _model(spec: Any, device: Any, shape: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = dict(spec.model.config)
    if shape == "tiny":
        keys |= {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
        keys |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = AutoConfig.for_model(keys.pop("model_type"), **keys)
    torch.manual_seed(spec.train.seed)
    with device:
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def _parameter_groups(model: Any) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [
        {"params": [parameter for parameter in parameters if parameter.ndim > 1], "weight_decay": 0.01},
        {"params": [parameter for parameter in parameters if parameter.ndim <= 1], "weight_decay": 0.0},
    ]


def _steps(
    engine: Any, configuration: Configuration, arguments: argparse.Namespace, device: Any
) -> tuple[list[dict[str, float]], list[float]]:
    """Return the times and losses of all steps, including warm-up. Every loss is read at the end of its step, as a training loop does."""
    import torch

    import superoffload
    from superoffload.transfers import transfers_for

    clock = transfers_for(device)
    generator = torch.Generator(device).manual_seed(arguments.rank)
    vocabulary = engine.module.config.vocab_size
    size = (configuration.accumulation, arguments.micro_batch, arguments.length)
    tokens = torch.randint(0, vocabulary, size, generator=generator, device=device)
    steps: list[dict[str, float]] = []
    losses: list[float] = []
    last = time.perf_counter()
    for _ in range(configuration.warmup + configuration.measured):
        laps = {"forward_s": 0.0, "backward_s": 0.0, "optimizer_s": 0.0}
        marks = [clock.mark()]
        total = torch.zeros((), device=device)
        for micro_batch in tokens:
            loss = engine(input_ids=micro_batch, labels=micro_batch).loss
            marks.append(clock.mark())
            engine.backward(loss)
            marks.append(clock.mark())
            engine.step()
            marks.append(clock.mark())
            total += loss.detach() / configuration.accumulation
        losses.append(total.item())
        now = time.perf_counter()
        for position, (begin, end) in enumerate(pairwise(marks)):
            laps[("forward_s", "backward_s", "optimizer_s")[position % 3]] += clock.seconds(begin, end)
        stats = superoffload.stats(engine)
        laps["forward_s"] -= stats.exposed_in_forward_s
        steps.append(
            {
                "step_s": now - last,
                **laps,
                "exposed_wait_s": stats.exposed_wait_s,
                "exposed_in_forward_s": stats.exposed_in_forward_s,
                "host_wait_s": stats.host_wait_s,
                "adam_busy_s": stats.adam_busy_s,
                "to_host_gb_per_s": stats.d2h_bytes / stats.d2h_s / 1e9 if stats.d2h_s else 0.0,
                "to_gpu_gb_per_s": stats.h2d_bytes / stats.h2d_s / 1e9 if stats.h2d_s else 0.0,
                "gradient_norm": superoffload.gradient_norm(engine) or 0.0,
            }
        )
        last = now
    return steps, losses


# -- only the Adam kernels ---------------------------------------------------------------------------------------------------------------


def _kernel_rows(numel: int) -> list[dict[str, Any]]:
    """Measure our kernel (bf16 in, bf16 out, one pass) and DeepSpeed's with the two casts it needs, on this process's cores."""
    import mmap

    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(cores))

    import torch
    from deepspeed.ops.op_builder import CPUAdamBuilder

    from superoffload import kernel, worker

    torch.set_num_threads(cores)
    rows = []

    def timed(name: str, bytes_per_parameter: int, run: Any) -> None:
        run()
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        seconds = statistics.median(times)
        row = {"name": f"kernel-{name}", "cores": cores, "parameters": numel, "seconds_per_billion": seconds / numel * 1e9}
        row["gb_per_s"] = bytes_per_parameter * numel / seconds / 1e9
        rows.append(row)
        print(json.dumps(row), flush=True)

    library = str(kernel.library())
    step = worker.Command(worker.Operation.STEP, 0, 3, learning_rate=1e-5, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.01)
    for weight_bytes, label in ((2, "bf16"), (4, "fp32")):
        memory = mmap.mmap(-1, worker.layout((numel,), weight_bytes, True).bytes)
        ours = worker.Kernel(library, memory, (numel,), weight_bytes, True)
        accumulate = worker.Command(worker.Operation.ACCUMULATE, 0)
        summed = step._replace(gradient=worker.GradientSource.ACCUMULATED_AND_STAGING)
        timed(f"ours-begin-{label}", 16 + weight_bytes, partial(ours.run, worker.Command(worker.Operation.INITIALIZE, 0)))
        timed(f"ours-step-{label}", 24 + 2 * weight_bytes, partial(ours.run, step))
        timed(f"ours-accumulate-{label}", 8 + weight_bytes, partial(ours.run, accumulate))
        timed(f"ours-step-accumulated-{label}", 28 + 2 * weight_bytes, partial(ours.run, summed))
    theirs = CPUAdamBuilder().load()
    theirs.create_adam(0, 1e-5, 0.9, 0.999, 1e-8, 0.01, True, False)
    master_weights, first, second, gradient = (torch.zeros(numel) for _ in range(4))
    half = torch.zeros(numel, dtype=torch.bfloat16)
    timed(
        "deepspeed-step",
        28,
        lambda: theirs.adam_update(0, 3, 1e-5, 0.9, 0.999, 1e-8, 0.01, True, master_weights, gradient, first, second),
    )
    timed("cast-gradient-up", 6, lambda: gradient.copy_(half))
    timed("cast-weights-down", 6, lambda: half.copy_(master_weights))
    return rows


if __name__ == "__main__":
    sys.exit(main())
