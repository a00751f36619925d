"""Parse and format lists of CPU numbers as the kernel, numactl and DeepSpeed write them."""

from __future__ import annotations

from collections.abc import Iterable

_LAST = (1 << 16) - 1
"""Number far above any CPU: a list in files of others must not take all memory."""


def parse_cpus(text: str) -> tuple[int, ...]:
    """Parse the kernel's list format (``0-3,8``) to ascending numbers. Raises ValueError for any other text."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            if int(last or first) > _LAST:
                raise ValueError(f"{part} is beyond any CPU")
            cpus.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cpus))


def cpu_ranges(cpus: Iterable[int]) -> str:
    """Format numbers in the kernel's list format: ``(0, 1, 2, 8)`` is ``0-2,8``."""
    return ",".join(
        f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in contiguous_runs(cpus)
    )


def contiguous_runs(cpus: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """Return the maximal runs of consecutive numbers, ascending."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return tuple(tuple(run) for run in runs)


def cpus_or_empty(text: str | None) -> tuple[int, ...]:
    """Parse the text of a cpulist file; empty if the file is absent, empty or not a list."""
    try:
        return parse_cpus(text or "")
    except ValueError:
        return ()
