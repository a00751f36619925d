"""Attention backends: what each can compute, and which of them a run uses.

One rule for trainer, plan and doctor: the trainer applies it to what it finds on its host, the
others to a machine as inspected.
"""

from __future__ import annotations

import re
from typing import Literal

from msgspec import Struct

AttentionBackend = Literal[
    "flash-attn-4", "flash-attn-3", "flash-attn-2", "torch-flash", "sdpa", "eager"
]
"""Backends once ``auto`` is decided."""
Obstacle = Literal[
    "no-gpu",
    "other-gpu",
    "not-installed",
    "head-size",
    "softcap",
    "sinks",
    "rows",
]
"""Why a backend cannot be used."""

OBSTACLES: dict[Obstacle, str] = {
    "no-gpu": "runs on GPUs only",
    "other-gpu": "does not run on this kind of GPU",
    "not-installed": "is not installed",
    "head-size": "does not compute attention heads of this model's size",
    "softcap": "does not cap attention scores, which this model does",
    "sinks": "does not support attention sinks, which this model has",
    "rows": "takes documents end to end, which other layers of this model cannot keep apart",
}
"""What is said of a backend that cannot be used."""

FORMER_NAMES: dict[str, AttentionBackend] = {
    "flash_attention_2": "flash-attn-2",
    "flash_attention_3": "flash-attn-3",
}
"""Names in runs of version 0.1.0, which are continued."""

MASKED_BACKENDS: tuple[AttentionBackend, ...] = ("sdpa", "eager")
"""Backends that take a mask instead of the boundaries of documents."""

_AMPERE, _HOPPER, _BLACKWELL = 8, 9, 10
_GENERATIONS = (
    (r"GB[123]\d\d|B[123]00", _BLACKWELL),
    (r"GH200|H[128]00|H20", _HOPPER),
    (r"A[18]00|A[34]0|A10G?|L40S?|L4", _AMPERE),
)
UNKNOWN_GPU = 0
"""Generation of a GPU that is not known, or not NVIDIA's."""


class _Kernel(Struct, frozen=True, kw_only=True):
    """A backend that takes the boundaries of packed documents; all of them have sliding windows,
    sinks and a deterministic mode.
    """

    name: AttentionBackend
    package: str = ""
    """Distribution that has it; empty: torch itself."""
    generations: tuple[int, ...]
    """Major compute capabilities of the GPUs that it runs on."""
    head_sizes: tuple[int, ...] = ()
    """Sizes of heads that it computes right; empty: every multiple of 8 up to 256."""
    softcap: bool = True
    """Whether it can cap scores (Gemma 2)."""


KERNELS = (
    _Kernel(
        name="flash-attn-4",
        package="flash-attn-4",
        generations=(9, 10, 11),
        head_sizes=(64, 96, 128, 256),
    ),
    _Kernel(name="flash-attn-3", package="flash_attn_3", generations=(9,)),
    _Kernel(
        name="flash-attn-2",
        package="flash-attn",
        generations=(8, 9, 10, 11, 12),
    ),
    _Kernel(
        name="torch-flash",
        generations=(0, 8, 9, 10, 11, 12),
        softcap=False,
    ),
)
"""The fastest first."""
_LARGEST_HEAD = 256


class Needs(Struct, frozen=True, kw_only=True):
    """What a model and a run ask of attention."""

    head_size: int
    sinks: bool = False
    softcap: bool = False
    rows: bool = False
    """Whether each document needs a row of its own, since layers besides attention would mix those
    of one row.
    """
    plain: bool = True
    """Whether it is softmax attention, which every backend computes; transformers' own code serves
    other models.
    """


class Present(Struct, frozen=True, kw_only=True):
    """What a host has."""

    generation: int | None
    """Major compute capability of its GPUs; 0 where it is not known, None without GPUs."""
    packages: frozenset[str] = frozenset()
    """Installed distributions, of those that ``KERNELS`` names."""


class Chosen(Struct, frozen=True):
    backend: AttentionBackend
    passed_over: tuple[tuple[AttentionBackend, Obstacle], ...] = ()
    """Faster backends, each with the reason why it is not used."""


def generation_of(gpu_name: str) -> int:
    """Return the major compute capability of a GPU by its product name; 0 when it is not known."""
    return next(
        (
            major
            for pattern, major in _GENERATIONS
            if re.search(rf"\b(?:{pattern})\b", gpu_name, re.IGNORECASE)
        ),
        UNKNOWN_GPU,
    )


def obstacle_to(backend: AttentionBackend, needs: Needs, present: Present) -> Obstacle | None:
    """Return why a backend cannot be used; None if it can."""
    if backend == "eager":
        return None
    if backend == "sdpa":
        return "sinks" if needs.sinks else "softcap" if needs.softcap else None
    kernel = next(kernel for kernel in KERNELS if kernel.name == backend)
    if present.generation is None:
        return "no-gpu"
    if present.generation not in kernel.generations:
        return "other-gpu"
    if needs.rows:
        return "rows"
    if not (
        needs.head_size in kernel.head_sizes
        if kernel.head_sizes
        else needs.head_size % 8 == 0 and needs.head_size <= _LARGEST_HEAD
    ):
        return "head-size"
    if needs.softcap and not kernel.softcap:
        return "softcap"
    return "not-installed" if kernel.package and kernel.package not in present.packages else None


def choose_backend(needs: Needs, present: Present) -> Chosen:
    """Return the backend that ``auto`` becomes: the fastest that can be used."""
    if not needs.plain and not needs.sinks:
        return Chosen("eager")
    order: tuple[AttentionBackend, ...] = (*(kernel.name for kernel in KERNELS), "sdpa", "eager")
    passed_over: list[tuple[AttentionBackend, Obstacle]] = []
    for backend in order:
        if (obstacle := obstacle_to(backend, needs, present)) is None:
            break
        passed_over.append((backend, obstacle))
    return Chosen(backend, tuple(passed_over) if present.generation is not None else ())
