"""Settings of a sweep on one GPU, each in a process that is forked with everything imported: a
start takes longer than the steps.

The steps are those of ``speed.py``. What only a whole run shows, memory of the host, is not
measured.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.speed import one_rank, ready, steps_of
from so_tui.machine.types import Machine
from so_tui.spec import RunSpec

_IMPORTED = [
    "so_tui_trainer.session",
    "transformers.models.qwen3.modeling_qwen3",
    # which any engine imports, and torch's compiler with it
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "datasets",
    "benchmarks.speed",
]
"""What takes a process longer than its steps. None of these may look for GPUs through CUDA."""


def measured_by_forks(
    specs: Iterable[RunSpec], machine: Machine, *, limit_s: float
) -> Iterator[dict[str, Any]]:
    """For each spec ``measured`` as ``planner.py`` keeps it, or ``error``; ``limit_s``: the longest
    time for one.
    """
    os.environ |= one_rank(cpu=not machine.gpus)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = (
        "1"  # what is forked off a process that has looked for GPUs through CUDA cannot use them
    )
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
    os._exit(
        0
    )  # everything is told; what DeepSpeed leaves to the interpreter's exit is not always survived


def _measure(spec: RunSpec, machine: Machine) -> dict[str, Any]:
    import superoffload
    from so_tui_trainer.data.batches import Batches

    spec, device, documents, _, engine = ready(spec, machine, use_gpu=bool(machine.gpus))
    batches = Batches(documents, spec, 0, pin=device.type == "cuda")
    warmup, measured = spec.benchmark.warmup_steps, spec.benchmark.measured_steps
    found = steps_of(engine, batches, spec, device, warmup, measured)
    superoffload.close(engine)
    works = [batches.counts(number) for number in range(warmup + 1, warmup + measured + 1)]
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
        "adam_busy_s": found["adam_busy_s"],
        "each_step_s": found["each_step_s"],
    }
