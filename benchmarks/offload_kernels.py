"""Measures only the Adam kernels, for ``benchmarks/offload.py --kernel``."""

from __future__ import annotations

import json
import os
import statistics
import time
from functools import partial
from typing import Any

AGED_FRACTION = 0.12
"""Of the parameters, as many as have had no gradient for a long time, such as embeddings of tokens
that the data does not have.
"""


def kernel_rows(numel: int) -> list[dict[str, Any]]:
    """Measure our kernel (bf16 in, bf16 out, one pass) and DeepSpeed's with the two casts it needs,
    on this process's cores.
    """
    import mmap

    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(cores))

    import numpy as np
    import torch
    from deepspeed.ops.op_builder import CPUAdamBuilder

    from superoffload import kernel
    from superoffload.worker import (
        Command,
        GradientSource,
        Kernel,
        MemorySize,
        Moments,
        Operation,
        Segment,
        layout,
    )

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
        row = {
            "name": f"kernel-{name}",
            "cores": cores,
            "parameters": numel,
            "seconds_per_billion": seconds / numel * 1e9,
        }
        row["gb_per_s"] = bytes_per_parameter * numel / seconds / 1e9
        rows.append(row)
        print(json.dumps(row), flush=True)

    library = str(kernel.library())
    step = Command(
        Operation.STEP,
        0,
        3,
        learning_rate=1e-5,
        beta1=0.9,
        beta2=0.999,
        epsilon=1e-8,
        weight_decay=0.01,
    )
    for weight_bytes, label in ((2, "bf16"), (4, "fp32")):
        size = MemorySize(((Segment(numel),),), weight_bytes, True, (0,))
        memory = mmap.mmap(-1, layout(size).bytes)
        ours = Kernel(library, memory, size)
        accumulate = Command(Operation.ACCUMULATE, 0)
        summed = step._replace(gradient=GradientSource.ACCUMULATED_AND_STAGING)
        timed(
            f"ours-begin-{label}",
            16 + weight_bytes,
            partial(ours.run, Command(Operation.INITIALIZE, 0)),
        )
        timed(f"ours-step-{label}", 24 + 2 * weight_bytes, partial(ours.run, step))
        timed(
            f"ours-speculate-{label}",
            24 + 2 * weight_bytes,
            partial(ours.run, step._replace(operation=Operation.SPECULATE)),
        )
        timed(f"ours-accumulate-{label}", 8 + weight_bytes, partial(ours.run, accumulate))
        timed(f"ours-step-accumulated-{label}", 28 + 2 * weight_bytes, partial(ours.run, summed))
        first_moment = np.frombuffer(
            memory, np.float32, numel, layout(size).states[0].first_moment[0]
        )
        first_moment[: int(AGED_FRACTION * numel)] = np.finfo(np.float32).smallest_subnormal
        timed(f"ours-step-{label}-aged", 24 + 2 * weight_bytes, partial(ours.run, step))
        del first_moment, ours, memory
    for moments, bytes_moved in ((Moments.BF16, 20), (Moments.INT8, 16)):
        size = MemorySize(((Segment(numel),),), 2, False, (0,), moments)
        ours = Kernel(library, mmap.mmap(-1, layout(size).bytes), size)
        ours.run(Command(Operation.INITIALIZE, 0))
        speculative = step._replace(operation=Operation.SPECULATE)
        for operation, command in (("step", step), ("speculate", speculative)):
            timed(
                f"ours-{operation}-{moments.name.lower()}-moments",
                bytes_moved,
                partial(ours.run, command),
            )
    theirs = CPUAdamBuilder().load()
    theirs.create_adam(0, 1e-5, 0.9, 0.999, 1e-8, 0.01, True, False)
    master_weights, first, second, gradient = (torch.zeros(numel) for _ in range(4))
    half = torch.zeros(numel, dtype=torch.bfloat16)
    timed(
        "deepspeed-step",
        28,
        lambda: theirs.adam_update(
            0, 3, 1e-5, 0.9, 0.999, 1e-8, 0.01, True, master_weights, gradient, first, second
        ),
    )
    timed("cast-gradient-up", 6, lambda: gradient.copy_(half))
    timed("cast-weights-down", 6, lambda: half.copy_(master_weights))
    return rows
