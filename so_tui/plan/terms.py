"""What the modules that add up memory share: how numbers are written, and whose engine runs."""

from __future__ import annotations

from functools import lru_cache

from so_tui.spec.types import RunSpec


def own_engine(spec: RunSpec) -> bool:
    """Whether the project's own SuperOffload runs, with its leaner worker, rather than one of DeepSpeed's CPU optimizers."""
    return spec.offload.mode == "superoffload" and spec.offload.engine == "so-tui"


@lru_cache(maxsize=4096)
def count(number: int) -> str:
    """A count for people: 14.77 B, 389 M, 16 k."""
    for unit, size in (("B", 1_000_000_000), ("M", 1_000_000), ("k", 10_000)):
        if number >= size:
            scaled = number / (1000 if unit == "k" else size)
            return f"{scaled:.2f} {unit}" if scaled < 100 else f"{scaled:.0f} {unit}"
    return str(number)


def power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length() if size else 0
