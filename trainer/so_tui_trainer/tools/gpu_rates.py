"""Measure one GPU, or several together, in a process of its own:
``python -m so_tui_trainer.tools.gpu_rates REQUEST``.

Request (JSON): ``cpus`` (near the GPU; pinned memory is allocated where this process runs),
``seconds`` per measurement, ``copies`` or ``attention`` (measure nothing else). With ``rank``,
``ranks``, ``counts`` and ``store`` it measures several ranks together: an all-gather, and the layer
launch overhead of the first ``counts`` ranks. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median_high
from typing import TYPE_CHECKING, Any

from so_tui.model.flops import attention_pairs
from so_tui.plan.step_time import BACKWARD_ATTENTION
from so_tui.spec.attention import KERNELS, AttentionBackend, Needs, obstacle_to

if TYPE_CHECKING:
    from so_tui_trainer.model.attention import Kernels

Fields = dict[str, Any]
"""A request or an answer."""
TOKENS = 8192
"""Rows of the matrix products."""
SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096))
"""(in, out) of the matrix products of an 8B model's layer."""
COPY_BYTES = 2**29
"""Size of a copy between host and GPU."""
ALL_GATHER_BYTES = 2**28
"""Bytes of each rank in the all-gather."""
SMALL_LAYERS = 32
"""Layers of a pass that measures the layer launch overhead."""
SMALL_WIDTH = 64
"""Width of those layers. They keep no GPU busy, so their time is that of the Python around them."""
ROUNDS = 96
"""Passes that ranks make together."""
HEADS, KEY_HEADS, HEAD_SIZE = 32, 8, 128
"""The attention heads of an 8B model."""
PACKS = {160: 100, 1024: 16, 4096: 4, 16384: 1, 65536: 1}
"""Length of documents -> how many of them are packed."""
Seconds = Callable[[Callable[[], object]], float]
"""Measures how long a call takes on the device."""


def main(request: Fields, where: str = "cuda:0") -> None:
    """Measure a device of torch and print the answer."""
    if request.get("cpus"):
        os.sched_setaffinity(0, request["cpus"])
    alone = (
        ("ranks", _measure_between_gpus),
        ("copies", _measure_copies),
        ("attention", _measure_attention),
    )
    measure = next((measure for name, measure in alone if request.get(name)), _measure_one_gpu)
    import torch

    device = torch.device(where)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    print(json.dumps(measure(request, device)), flush=True)
    os._exit(0)  # There is nothing to save, and the shutdown of CUDA takes a second.


def _measure_one_gpu(request: Fields, device: Any) -> Fields:
    """Measure matrix products, copies and the layer launch overhead of one GPU."""
    import torch

    limit_s = request["seconds"]

    def matrix(*shape: int) -> Any:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    layers = [(matrix(TOKENS, wide), matrix(wide, out)) for wide, out in SHAPES]
    flops = sum(2 * left.shape[0] * left.shape[1] * right.shape[1] for left, right in layers)
    products = _seconds(lambda: [left @ right for left, right in layers], device, limit_s)
    return _measure_copies(request, device) | {
        "matrix_flops": flops / products,
        "small_layer_s": _seconds(_small_layers(device), device, limit_s) / SMALL_LAYERS,
    }


def _measure_copies(request: Fields, device: Any) -> Fields:
    """Measure copies within the GPU's memory, and between it and host memory of the node where this
    process runs.
    """
    import torch

    near, other = (torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    host = torch.zeros(COPY_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    pageable = torch.zeros(COPY_BYTES, dtype=torch.uint8)
    masters = pageable.view(torch.float32)
    weights = near.view(torch.bfloat16)[: COPY_BYTES // 4]

    def rate(run: Callable[[], object]) -> float:
        return COPY_BYTES / _seconds(run, device, request["seconds"])

    return {
        "hbm_bytes_per_s": 2 * rate(lambda: near.copy_(other)),
        "down_bytes_per_s": rate(lambda: host.copy_(near, non_blocking=True)),
        "up_bytes_per_s": rate(lambda: near.copy_(host, non_blocking=True)),
        "pageable_d2h_bytes_per_s": rate(lambda: pageable.copy_(near)),
        "pageable_h2d_bytes_per_s": rate(lambda: near.copy_(pageable)),
        "cast_h2d_bytes_per_s": rate(lambda: weights.copy_(masters)) / 2,
    }


def _measure_attention(request: Fields, device: Any) -> Fields:
    """Measure the attention backends that this GPU can use."""
    limit_s = request["seconds"] / 4
    found = _attention_rates(
        usable_backends(device), device, lambda run: _seconds(run, device, limit_s)
    )
    return {"attention": found}


def usable_backends(device: Any) -> dict[AttentionBackend, Kernels]:
    """Return the kernels of every attention backend that can be used on a device."""
    from so_tui_trainer.model.attention import LOADERS, present

    needs, available = Needs(head_size=HEAD_SIZE), present(device)
    return {
        kernel.name: LOADERS[kernel.name]()
        for kernel in KERNELS
        if obstacle_to(kernel.name, needs, available) is None
    }


def _attention_rates(
    backends: Mapping[AttentionBackend, Kernels], device: Any, seconds: Seconds
) -> list[tuple[AttentionBackend, list[tuple[int, float, float]]]]:
    """Return (length of documents, FLOP/s of forward, FLOP/s of backward) of each backend, as
    ``so_tui.plan.rates.AttentionRate``.
    """
    return [
        (
            backend,
            [
                (length, *flops_per_s(kernels, [length] * count, device, seconds))
                for length, count in PACKS.items()
            ],
        )
        for backend, kernels in backends.items()
    ]


def flops_per_s(
    kernels: Kernels, lengths: Sequence[int], device: Any, seconds: Seconds
) -> tuple[float, float]:
    """Return the FLOP/s of attention forward and backward within documents of these lengths."""
    import torch

    from so_tui_trainer.model.attention import Documents

    boundaries = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    documents = Documents(boundaries, max(lengths), HEAD_SIZE**-0.5)
    query, key, value, gradient = (
        torch.randn((sum(lengths), heads, HEAD_SIZE), device=device, dtype=torch.bfloat16)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    )
    out, normaliser = kernels.forward(query, key, value, documents)
    flops = 4.0 * HEADS * HEAD_SIZE * sum(map(attention_pairs, lengths))
    forward_s = seconds(lambda: kernels.forward(query, key, value, documents))
    backward_s = seconds(
        lambda: kernels.backward(gradient, query, key, value, out, normaliser, documents)
    )
    return flops / forward_s, BACKWARD_ATTENTION * flops / backward_s


def _small_layers(device: Any) -> Callable[[], object]:
    """Return a forward and backward pass of a chain of modules with hooks, as ZeRO-3 adds them to
    every module.
    """
    import torch

    modules = [
        torch.nn.Linear(SMALL_WIDTH, SMALL_WIDTH, device=device, dtype=torch.bfloat16)
        for _ in range(SMALL_LAYERS)
    ]
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


def _measure_between_gpus(request: Fields, device: Any) -> Fields:
    """Measure an all-gather and the layer launch overhead of several ranks."""
    import torch
    from torch import distributed

    from so_tui_trainer.older_versions import all_gather_single

    rank, ranks = request["rank"], request["ranks"]
    backend = "nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(
        backend, init_method=f"file://{request['store']}", rank=rank, world_size=ranks
    )
    share = torch.zeros(ALL_GATHER_BYTES, dtype=torch.uint8, device=device)
    whole = torch.zeros(ranks * share.numel(), dtype=torch.uint8, device=device)
    times = []
    for _ in range(8):  # The same number on every rank, whatever it measures.
        distributed.barrier()
        times.append(_once(lambda: all_gather_single(whole, share), device))
    return {
        "peer_bytes_per_s": (ranks - 1) * share.numel() / median_high(times),
        "small_layer_together": [
            (count, _small_layer_together_s(count, request, device)) for count in request["counts"]
        ],
    }


def _small_layer_together_s(count: int, request: Fields, device: Any) -> float | None:
    """Measure the layer launch overhead, in seconds, of ranks that wait for each other.

    The first ``count`` ranks synchronise after each pass of ``SMALL_LAYERS``, which takes about as
    long as a layer's forward with its all-gather. So the slowest core decides, and it is not always
    the same one. Other ranks wait, and return None.
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

        times = [_once(pass_through, device) for _ in range(ROUNDS)]
        found = median_high(times) / SMALL_LAYERS
    distributed.barrier()
    return found


def _seconds(run: Callable[[], object], device: Any, limit_s: float) -> float:
    """Return the median time of a run in seconds, of at least five runs within ``limit_s`` after
    two warm-up runs.
    """
    for _ in range(2):
        _once(run, device)
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < 5 or time.perf_counter() - begun < limit_s:
        times.append(_once(run, device))
    return median_high(times)


def _once(run: Callable[[], object], device: Any) -> float:
    """Return the time of one run in seconds, with the GPU synchronised."""
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
