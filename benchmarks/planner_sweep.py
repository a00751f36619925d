"""Settings of a sweep on one GPU, each in a process that is forked with everything imported: a start takes longer than the steps.

The steps are those of ``speed.py``. What only a whole run shows, memory of the host, is not measured.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from so_tui.launch import prepare
from so_tui.machine.types import Machine
from so_tui.spec import RunSpec

_IMPORTED = ["so_tui_trainer.session", "transformers.models.auto.modeling_auto", "speed"]


def measured_by_forks(specs: Iterable[RunSpec], machine: Machine, *, limit_s: float) -> Iterator[dict[str, Any]]:
    """For each spec ``measured`` as ``planner.py`` keeps it, or ``error``; ``limit_s``: the longest time for one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port), "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # what is forked off a process that has looked for GPUs through CUDA cannot use them
    if not machine.gpus:
        os.environ["DS_ACCELERATOR"] = "cpu"
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(_IMPORTED)
    for spec in specs:
        mine, theirs = forks.Pipe(duplex=False)
        process = forks.Process(target=_child, args=(spec, machine, theirs))
        process.start()
        theirs.close()
        try:
            yield mine.recv() if mine.poll(limit_s) else {"error": f"longer than {limit_s:.0f} s"}
        except EOFError:
            yield {"error": "the process died"}
        finally:
            process.kill()
            process.join()


def _child(spec: RunSpec, machine: Machine, answer: Any) -> None:
    try:
        answer.send({"measured": _measure(spec, machine)})
    except Exception as error:  # noqa: BLE001 - told in the row; the other settings go on
        answer.send({"error": f"{type(error).__name__}: {error}"[:500]})
    sys.stdout.flush()
    os._exit(0)  # everything is told; what DeepSpeed leaves to the interpreter's exit is not always survived


def _measure(spec: RunSpec, machine: Machine) -> dict[str, Any]:
    import torch
    from speed import steps_of

    from so_tui_trainer import binding, offload
    from so_tui_trainer.data import cache, tokens
    from so_tui_trainer.data.batches import Batches
    from so_tui_trainer.model.build import build, parameter_groups
    from so_tui_trainer.ranks import join

    launch = prepare(spec, machine, force=True)
    spec, mine = launch.plan.spec, launch.plan.binding[0]
    binding.bind(mine)
    ranks = join(use_gpu=bool(machine.gpus))
    batches = Batches(cache.read(tokens.prepare(spec), spec.data), spec, 0, pin=ranks.device.type == "cuda")
    torch.manual_seed(0)
    model = build(spec, ranks.device, launch.ds_config)
    engine = offload.initialize(model, parameter_groups(model, spec), launch.ds_config, spec, mine)
    binding.settle(mine)
    warmup, measured = spec.benchmark.warmup_steps, spec.benchmark.measured_steps
    found = steps_of(engine, batches, spec, ranks.device, warmup, measured)
    offload.close(engine)
    works = [batches.work(number) for number in range(warmup + 1, warmup + measured + 1)]
    lengths = [length for work in works for length in work.document_lengths.tolist()]
    positions = sum(work.computed_tokens for work in works)
    return {
        "figures": {
            "step_s": found["step_s"],
            "forward_s": found["forward_s"],
            "backward_s": found["backward_s"],
            "exposed_optimizer_s": found["optimizer_s"],
            "gpu_reserved_bytes": int(found["gpu_reserved_gib"] * 2**30),
            "gpu_device_bytes": 0,
            "host_bytes": 0,
        },
        "workload": {
            "attended_tokens": sum(length * length for length in lengths) / sum(lengths),
            "trained_share": sum(work.trained_tokens for work in works) / positions,
            "useful_share": sum(work.useful_tokens for work in works) / positions,
        },
        "steps": measured,
    }
