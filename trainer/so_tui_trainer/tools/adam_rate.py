"""Measure the CPU Adam kernel on given cores, in a process of its own:
``python -I -S adam_rate.py REQUEST``.

Request (JSON): ``library`` (compiled kernel), ``worker`` (path of the Adam worker, whose kernel
is used), ``cpus``, ``parameters``, ``seconds``. Prints
``{"step_bytes_per_s": ..., "accumulate_bytes_per_s": ...}``, the host memory traffic. Uses the
standard library only, as the worker does: the cores must be set before OpenMP starts its threads,
which are the first to touch the memory.
"""

from __future__ import annotations

import json
import mmap
import os
import runpy
import sys
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any


def main(request: dict[str, Any]) -> None:
    """Measure and print the answer."""
    os.sched_setaffinity(0, request["cpus"])
    worker = SimpleNamespace(**runpy.run_path(request["worker"]))
    numel = request["parameters"]
    size = worker.MemorySize(((worker.Segment(numel),),), 2, True)
    memory = mmap.mmap(-1, worker.layout(size).bytes)
    kernel = worker.Kernel(request["library"], memory, size)
    kernel.run(worker.Command(worker.Operation.INITIALIZE, 0))
    step = worker.Command(
        worker.Operation.STEP,
        0,
        3,
        learning_rate=1e-5,
        beta1=0.9,
        beta2=0.999,
        epsilon=1e-8,
        weight_decay=0.01,
    )
    accumulate = worker.Command(worker.Operation.ACCUMULATE, 0)
    answer = {
        f"{name}_bytes_per_s": command.bytes_moved(numel, size.weight_bytes)
        / _seconds(partial(kernel.run, command), request["seconds"])
        for name, command in (("step", step), ("accumulate", accumulate))
    }
    print(json.dumps(answer), flush=True)
    os._exit(0)  # The memory cannot be closed while the kernel points into it.


def _seconds(run: Callable[[], object], limit_s: float) -> float:
    """Return the median time of a run in seconds, of at least three runs within ``limit_s`` after a
    warm-up.
    """
    run()
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - begun < limit_s:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
