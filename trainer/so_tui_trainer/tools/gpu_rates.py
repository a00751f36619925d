"""Rates of one GPU, or between several, in a process of its own: ``python -m so_tui_trainer.tools.gpu_rates REQUEST``.

Request (JSON): ``device`` ("cuda:0"), ``cpus`` (beside the GPU; pinned memory lies where this process runs), ``seconds`` per measurement,
``scale`` (1 for real sizes). With ``rank``, ``ranks``, ``counts`` and ``port`` it measures what ranks do together instead: an
all-gather, and small layers on the first so many of them (``counts``). Prints one JSON object. Without a GPU (device "cpu") the same code
runs on small sizes, to be tried out.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from statistics import median_high
from typing import Any

TOKENS = 8192
SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096))
"""(in, out) of the matrix products of an 8B model's layer."""
COPY_BYTES = 2**29
GATHER_BYTES = 2**28
SMALL_LAYERS = 32
SMALL_WIDTH = 64
"""Layers that keep no GPU busy: their time is that of the Python around them."""
ROUNDS = 96
"""Passes of small layers that ranks make together."""


def main(request: dict[str, Any]) -> None:
    if request.get("cpus"):
        os.sched_setaffinity(0, request["cpus"])
    answer = _measure_between_gpus(request) if "ranks" in request else _measure_one_gpu(request)
    print(json.dumps(answer), flush=True)
    os._exit(0)  # nothing to save, and CUDA's own end takes a second


def _measure_one_gpu(request: dict[str, Any]) -> dict[str, Any]:
    import torch

    device = torch.device(request["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    limit_s, scale = request["seconds"], request["scale"]
    tokens = max(16, int(TOKENS * scale))
    layers = [
        (
            torch.randn(tokens, max(16, int(wide * scale)), device=device, dtype=torch.bfloat16),
            torch.randn(max(16, int(wide * scale)), max(16, int(out * scale)), device=device, dtype=torch.bfloat16),
        )
        for wide, out in SHAPES
    ]
    flops = sum(2 * left.shape[0] * left.shape[1] * right.shape[1] for left, right in layers)
    products = _seconds(lambda: [left @ right for left, right in layers], device, limit_s)
    size = max(4096, int(COPY_BYTES * scale))
    near, other = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    pinned = device.type == "cuda"
    host, host_too = (torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2))
    within = _seconds(lambda: near.copy_(other), device, limit_s)
    down = _seconds(lambda: host.copy_(near, non_blocking=True), device, limit_s)
    up = _seconds(lambda: near.copy_(host, non_blocking=True), device, limit_s)
    streams = [torch.cuda.Stream(device) for _ in range(2)] if pinned else []  # type: ignore[no-untyped-call]

    def both() -> None:
        if not streams:
            host.copy_(near)
            other.copy_(host_too)
            return
        with torch.cuda.stream(streams[0]):
            host.copy_(near, non_blocking=True)
        with torch.cuda.stream(streams[1]):
            other.copy_(host_too, non_blocking=True)

    together = _seconds(both, device, limit_s)
    small = _small_layers(device)
    return {
        "matrix_flops": flops / products,
        "hbm_bytes_per_s": 2 * size / within,
        "down_bytes_per_s": size / down,
        "up_bytes_per_s": size / up,
        "both_ways_bytes_per_s": [size / together, size / together],
        "small_layer_s": _seconds(small, device, limit_s) / SMALL_LAYERS,
    }


def _small_layers(device: Any) -> Callable[[], object]:
    """Forward and backward of a chain of hooked modules, as ZeRO-3 hangs its hooks on every module."""
    import torch

    modules = [torch.nn.Linear(SMALL_WIDTH, SMALL_WIDTH, device=device, dtype=torch.bfloat16) for _ in range(SMALL_LAYERS)]
    for module in modules:
        module.register_forward_pre_hook(lambda _module, inputs: inputs)
        module.register_forward_hook(lambda _module, _inputs, output: output)
    first = torch.randn(16, SMALL_WIDTH, device=device, dtype=torch.bfloat16)

    def pass_through() -> None:
        hidden = first
        for module in modules:
            hidden = torch.nn.functional.silu(module(hidden)) * hidden
        hidden.sum().backward()  # type: ignore[no-untyped-call]

    return pass_through


def _measure_between_gpus(request: dict[str, Any]) -> dict[str, Any]:
    import torch
    from torch import distributed

    device, rank, ranks = torch.device(request["device"]), request["rank"], request["ranks"]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, init_method=f"tcp://127.0.0.1:{request['port']}", rank=rank, world_size=ranks)
    share = torch.zeros(max(4096, int(GATHER_BYTES * request["scale"])), dtype=torch.uint8, device=device)
    whole = torch.zeros(ranks * share.numel(), dtype=torch.uint8, device=device)
    times = []
    for _ in range(8):  # the same number on every rank, whatever each measures
        distributed.barrier()
        times.append(_once(lambda: distributed.all_gather_into_tensor(whole, share), device))
    seconds = median_high(times)
    together = [(count, _small_layer_together_s(count, request, device)) for count in request["counts"]]
    return {
        "peer_bytes_per_s": (ranks - 1) * share.numel() / seconds,
        "small_layer_together": [(count, seconds) for count, seconds in together if seconds is not None],
    }


def _small_layer_together_s(count: int, request: dict[str, Any], device: Any) -> float | None:
    """A small layer where the first ``count`` ranks wait for each other after each pass of ``SMALL_LAYERS``, about as long as a layer's
    forward takes that gathers weights: the slowest core's time, and not always the same one's. None on the other ranks, which wait.
    """
    from torch import distributed

    group = distributed.new_group(range(count))
    found = None
    if request["rank"] < count:
        import torch

        word, small = torch.zeros(1, device=device), _small_layers(device)

        def pass_through() -> None:
            small()
            distributed.all_reduce(word, group=group)

        times = [_once(pass_through, device) for _ in range(max(8, int(ROUNDS * request["scale"])))]
        found = median_high(times) / SMALL_LAYERS
    distributed.barrier()
    return found


def _seconds(run: Callable[[], object], device: Any, limit_s: float) -> float:
    """Median of one run; at least five after two that do not count, until ``limit_s`` is over."""
    for _ in range(2):
        _once(run, device)
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < 5 or time.perf_counter() - begun < limit_s:
        times.append(_once(run, device))
    return median_high(times)


def _once(run: Callable[[], object], device: Any) -> float:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
