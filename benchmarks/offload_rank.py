"""One rank of one configuration of ``benchmarks/offload.py``."""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from benchmarks.step_counters import StepCounters

MARK = "offload-benchmark-row: "


@dataclass(frozen=True)
class Configuration:
    """One configuration to measure; the fields are those of the run spec."""

    name: str
    mode: str = "superoffload"
    engine: str = "so-tui"
    ratio: float = 0.9
    clipping: float | None = 0.0
    """None: the key is left out of the DeepSpeed config, as in the published scripts, and DeepSpeed
    uses 1.0.
    """
    accumulation: int = 1
    warmup: int = 2
    """Steps that do not count; with several ranks ``SETTLING`` where it is less."""
    measured: int = 5
    lazy: bool = True
    """False: ours, but ``step`` waits for all new weights."""
    speculates: bool = True
    """False: ours, but with clipping all sub-groups are held back until the norm is known."""
    exceeds_every: int = 0
    """The norm exceeds the limit in every nth step only."""


CONFIGURATIONS = (
    Configuration("ours"),
    Configuration("floor", mode="gpu"),
    Configuration("ours-clip-never", clipping=1e6),
    Configuration("ours-clip-always", clipping=1e-3, warmup=6),
    Configuration("ours-clip-5-percent", clipping=1e6, exceeds_every=20, measured=40),
    Configuration("ours-clip-held-back", clipping=1e6, speculates=False),
    Configuration("zerooffload", mode="zerooffload"),
    Configuration("deepspeed-original", engine="deepspeed", clipping=None),
    Configuration("deepspeed-clip-0", engine="deepspeed"),
    Configuration("zerooffload-ratio-1", mode="zerooffload", ratio=1.0),
    Configuration("ours-gas-8", accumulation=8, warmup=1),
    Configuration("floor-gas-8", mode="gpu", accumulation=8, warmup=1),
    Configuration("ours-ratio-1", ratio=1.0),
    Configuration("ours-ratio-0.5", ratio=0.5),
    Configuration("ours-eager", lazy=False),
    Configuration("ours-clip-always-eager", clipping=1e-3, lazy=False),
    Configuration("ours-gas-8-clip-always", accumulation=8, clipping=1e-3, warmup=1),
)
MINIMAL = tuple(configuration.name for configuration in CONFIGURATIONS[:12])
SETTLING = 10
"""Micro-batches after which steps of several ranks were seen to take the same time again and
again.
"""


def measure(arguments: argparse.Namespace) -> None:
    """Measure one configuration as one of its ranks, print its row after ``MARK``, and end the
    process.
    """
    configuration = next(
        configuration for configuration in CONFIGURATIONS if configuration.name == arguments.name
    )
    configuration = replace(
        configuration,
        warmup=_warmup(configuration, arguments),
        measured=arguments.measured or configuration.measured,
    )
    from so_tui.machine import inspect_machine
    from so_tui.plan.binding import bind_ranks
    from so_tui_trainer import binding

    mine = bind_ranks(
        inspect_machine(),
        arguments.ranks,
        cpu_adam_cores_fraction=0.9,
    )[arguments.rank]
    if configuration.mode != "superoffload":
        mine = mine.without_worker()
    binding.bind(mine)  # before torch makes its threads

    import torch

    import superoffload
    from so_tui_trainer.engine_settings import engine_settings
    from superoffload.deepspeed_adapter.engine import super_offload

    cuda = arguments.shape != "tiny"
    device = torch.device("cuda", arguments.rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    superoffload.join_process_group(
        dist_backend="nccl" if cuda else "gloo", auto_mpi_discovery=False, verbose=False
    )
    spec = _spec(configuration, arguments)
    begun = time.monotonic()
    model = _model(spec, device, arguments.shape)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    config = _ds_config(configuration, arguments)
    settings = replace(
        engine_settings(spec, mine),
        speculation_bytes=sys.maxsize if configuration.speculates else 0,
    )
    engine, *_ = superoffload.initialize(model, _parameter_groups(model), settings, config)
    if (optimizer := super_offload(engine)) and optimizer.cpu.worker_pid:
        binding.apply_main_cores(mine)
        optimizer.lazy_weights = configuration.lazy
    started_s = time.monotonic() - begun
    print(f"{configuration.name}: ready after {started_s:.1f} s", flush=True)
    gc.collect()
    gc.freeze()  # as the trainer does
    counters = StepCounters(
        superoffload.worker_pid(engine), torch.cuda.memory_stats if cuda else None
    )
    steps, losses = _steps(engine, configuration, arguments, device, counters)
    superoffload.close(engine)
    row = {
        **{
            key: getattr(configuration, key)
            for key in ("mode", "engine", "ratio", "clipping", "accumulation", "warmup")
        },
        **_typical(steps[configuration.warmup :], configuration, arguments),
        "parameters": parameters,
        "gpu_peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0,
        "gpu_reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if cuda else 0.0,
        "started_s": started_s,
        "main_cpus": len(mine.main_cpus),
        "adam_cpus": len(mine.adam_cpus),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "gpu": f"GPU-{torch.cuda.get_device_properties(device).uuid}" if cuda else None,
        "torch": torch.__version__,
        "steps": steps,
        "losses": losses,
    }
    print(MARK + json.dumps(row), flush=True)
    os._exit(0)  # not by return: DeepSpeed's exit handlers may crash, and everything is written


def _warmup(configuration: Configuration, arguments: argparse.Namespace) -> int:
    """Return the steps that do not count: those asked for, or as many as the configuration
    needs.
    """
    if arguments.warmup is not None:
        return int(arguments.warmup)
    settling = -(-SETTLING // configuration.accumulation) if arguments.ranks > 1 else 0
    return max(configuration.warmup, settling)


def _typical(
    measured: list[dict[str, float]], configuration: Configuration, arguments: argparse.Namespace
) -> dict[str, float]:
    """Return the medians of the measured steps, their means where some are unlike the others, and
    the rate of tokens.
    """
    average = statistics.fmean if configuration.exceeds_every else statistics.median
    row = {key: average(step[key] for step in measured) for key in measured[0]}
    tokens = arguments.micro_batch * arguments.length * configuration.accumulation
    return row | {"tokens_per_s_per_gpu": tokens / row["step_s"]}


def _spec(configuration: Configuration, arguments: argparse.Namespace) -> Any:
    from so_tui.spec import find_preset, with_values

    return with_values(
        find_preset("qwen3-4b-random").spec,
        {
            "gpus": str(arguments.ranks),
            "train.micro_batch": str(arguments.micro_batch),
            "train.gradient_accumulation": str(configuration.accumulation),
            "train.gradient_clipping": str(
                1.0 if configuration.clipping is None else configuration.clipping
            ),
            "offload.mode": configuration.mode,
            "offload.engine": configuration.engine,
            "offload.ratio": str(configuration.ratio),
            "offload.sub_group_size": str(
                100_000 if arguments.shape == "tiny" else arguments.sub_group_size
            ),
        },
    )


def _ds_config(configuration: Configuration, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return a DeepSpeed config like the published SuperOffload configurations."""
    size = 100_000 if arguments.shape == "tiny" else arguments.sub_group_size
    zero: dict[str, Any] = {
        "stage": 3,
        "overlap_comm": arguments.ranks > 1,
        "reduce_bucket_size": size,
        "sub_group_size": size,
    }
    if configuration.mode != "gpu":
        zero["offload_optimizer"] = {
            "device": "cpu",
            "pin_memory": arguments.shape != "tiny",
            "ratio": configuration.ratio,
        }
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
        keys |= {
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
        }
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
        {
            "params": [parameter for parameter in parameters if parameter.ndim > 1],
            "weight_decay": 0.01,
        },
        {
            "params": [parameter for parameter in parameters if parameter.ndim <= 1],
            "weight_decay": 0.0,
        },
    ]


def _steps(
    engine: Any,
    configuration: Configuration,
    arguments: argparse.Namespace,
    device: Any,
    counters: StepCounters,
) -> tuple[list[dict[str, float]], list[float]]:
    """Return the times, counters and losses of all steps, including warm-up.

    Every loss is read at the end of its step, as a training loop does.
    """
    import torch

    import superoffload
    from superoffload.deepspeed_adapter.engine import super_offload
    from superoffload.transfers import seconds_between, transfers_for

    clock = transfers_for(device)
    generator = torch.Generator(device).manual_seed(arguments.rank)
    vocabulary = engine.module.config.vocab_size
    size = (configuration.accumulation, arguments.micro_batch, arguments.length)
    tokens = torch.randint(0, vocabulary, size, generator=generator, device=device)
    steps: list[dict[str, float]] = []
    losses: list[float] = []
    last = time.perf_counter()
    optimizer = super_offload(engine)
    for step in range(configuration.warmup + configuration.measured):
        if optimizer and configuration.exceeds_every:
            optimizer.clipping = (
                1e-3
                if step % configuration.exceeds_every == configuration.exceeds_every - 1
                else 1e6
            )
        laps = dict.fromkeys(("forward_s", "backward_s", "optimizer_s"), 0.0)
        launched = dict.fromkeys(
            ("launching_forward_s", "launching_backward_s", "launching_optimizer_s"), 0.0
        )
        marks, passed = [clock.mark()], [time.perf_counter()]
        total = torch.zeros((), device=device)
        for micro_batch in tokens:
            loss = engine(input_ids=micro_batch, labels=micro_batch).loss
            marks.append(clock.mark())
            passed.append(time.perf_counter())
            engine.backward(loss)
            marks.append(clock.mark())
            passed.append(time.perf_counter())
            engine.step()
            marks.append(clock.mark())
            passed.append(time.perf_counter())
            total += loss.detach() / configuration.accumulation
        losses.append(total.item())
        now = time.perf_counter()
        for position, (begin, end) in enumerate(pairwise(marks)):
            laps[tuple(laps)[position % 3]] += seconds_between(begin, end)
        for position, (before, after) in enumerate(pairwise(passed)):
            launched[tuple(launched)[position % 3]] += after - before
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
                "kept_steps": float(stats.kept_steps),
                "redone_steps": float(stats.redone_steps),
                "to_host_gb_per_s": stats.d2h_bytes / stats.d2h_s / 1e9 if stats.d2h_s else 0.0,
                "to_gpu_gb_per_s": stats.h2d_bytes / stats.h2d_s / 1e9 if stats.h2d_s else 0.0,
                "gradient_norm": superoffload.gradient_norm(engine) or 0.0,
                **launched,
                **counters.lap(),
            }
        )
        last = now
    return steps, losses
