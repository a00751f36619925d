"""Numbers for people."""

from __future__ import annotations


def count(number: int) -> str:
    """Return a count for people: 14.77 B, 389 M, 16 k."""
    if number >= 1_000_000_000:
        scaled, unit = number / 1_000_000_000, "B"
    elif number >= 1_000_000:
        scaled, unit = number / 1_000_000, "M"
    elif number >= 10_000:
        scaled, unit = number / 1000, "k"
    else:
        return str(number)
    return f"{scaled:.2f} {unit}" if scaled < 100 else f"{scaled:.0f} {unit}"


def gib(size: int) -> str:
    """Return bytes for people: 226 GiB, 3.2 GiB, 12 MiB."""
    if size >= 99.5 * 2**30:
        return f"{size / 2**30:.0f} GiB"
    return f"{size / 2**30:.1f} GiB" if size >= 0.95 * 2**30 else f"{size / 2**20:.0f} MiB"
