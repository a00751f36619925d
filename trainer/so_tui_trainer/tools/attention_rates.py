"""Measure attention backends within packed documents of several lengths, on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from so_tui.model.flops import attention_pairs
from so_tui.plan.step_time import BACKWARD_ATTENTION
from so_tui.spec.attention import KERNELS, AttentionBackend, Needs, obstacle_to
from so_tui_trainer.model.attention import Documents, Kernels, kernels_of, present

HEADS, KEY_HEADS, HEAD_SIZE = 32, 8, 128
"""Of an 8B model."""
PACKS = {160: 100, 1024: 16, 4096: 4, 16384: 1, 65536: 1}
"""Length of documents -> how many of them are packed."""

Seconds = Callable[[Callable[[], object]], float]
"""Measures how long a call takes on the device."""


def usable_backends(device: Any) -> dict[AttentionBackend, Kernels]:
    """Return the kernels of every backend that can be used on a device."""
    available = present(device)
    names = [
        kernel.name
        for kernel in KERNELS
        if obstacle_to(kernel.name, Needs(head_size=HEAD_SIZE), available) is None
    ]
    return {name: kernels_of(name) for name in names}


def attention_rates(
    backends: Mapping[AttentionBackend, Kernels], device: Any, seconds: Seconds, scale: float
) -> list[tuple[AttentionBackend, list[tuple[int, float, float]]]]:
    """Return (length of documents, FLOP/s of forward, FLOP/s of backward) of each backend, as
    ``so_tui.plan.rates.AttentionRate``.
    """
    lengths = {max(1, int(length * scale)): count for length, count in PACKS.items()}
    return [
        (
            backend,
            [
                (length, *flops_per_s(kernels, [length] * count, device, seconds))
                for length, count in lengths.items()
            ],
        )
        for backend, kernels in backends.items()
    ]


def flops_per_s(
    kernels: Kernels, lengths: Sequence[int], device: Any, seconds: Seconds
) -> tuple[float, float]:
    """Return the FLOP/s of forward and of backward over documents of these lengths."""
    import torch

    documents = Documents(
        torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32),
        max(lengths),
        HEAD_SIZE**-0.5,
    )
    shapes = [(sum(lengths), heads, HEAD_SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
    query, key, value, gradient = (
        torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes
    )
    out, normaliser = kernels.forward(query, key, value, documents)
    flops = 4.0 * HEADS * HEAD_SIZE * sum(map(attention_pairs, lengths))
    forward_s = seconds(lambda: kernels.forward(query, key, value, documents))
    backward_s = seconds(
        lambda: kernels.backward(gradient, query, key, value, out, normaliser, documents)
    )
    return flops / forward_s, BACKWARD_ATTENTION * flops / backward_s
