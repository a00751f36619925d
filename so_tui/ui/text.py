"""Numbers and times as people read them: always with a unit, never wider than they need to be. Pure functions."""

from __future__ import annotations

import math

from so_tui.units import thousands

GIB = 1024**3
_SMALL = ((1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB"))


def significant(value: float, digits: int = 3) -> str:
    """A plain number with about ``digits`` significant digits: ``0.0512``, ``1.48``, ``431``, ``16 000``, ``1e-05``."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    if magnitude < -4:
        return f"{value:.{max(0, digits - 2)}e}".replace("e-0", "e-")
    if magnitude >= digits:
        return thousands(round(value))
    return f"{value:.{max(0, digits - 1 - magnitude)}f}"


def rate(value: float) -> str:
    """Tokens per second: ``31.2k``, ``940``."""
    if value >= 1e6:
        return f"{value / 1e6:.1f}M"
    if value >= 10_000:
        return f"{value / 1e3:.1f}k"
    if value >= 1_000:
        return f"{value / 1e3:.2f}k"
    return significant(value)


def count(value: float) -> str:
    """Parameters or tokens: ``14.8 B``, ``3.4 M``."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f}"


def memory(value: int) -> str:
    """Memory in binary units: ``78.4 GiB``, ``512 MiB``."""
    for size, unit in _SMALL:
        if value >= size:
            scaled = value / size
            return f"{scaled:.0f} {unit}" if scaled >= 100 else f"{scaled:.1f} {unit}"
    return f"{value} B"


def memory_of(used: int, total: int | None) -> str:
    """``78.4 of 95.0 GiB``: both in the unit of the larger."""
    if total is None:
        return memory(used)
    for size, unit in _SMALL:
        if max(used, total) >= size:
            digits = 0 if max(used, total) >= 1000 * size else 1
            return f"{used / size:.{digits}f} of {total / size:.{digits}f} {unit}"
    return f"{used} of {total} B"


def disk(value: int) -> str:
    """Disk space in decimal units, as disks are sold: ``207 GB``."""
    for size, unit in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if value >= size:
            scaled = value / size
            return f"{scaled:.0f} {unit}" if scaled >= 100 else f"{scaled:.1f} {unit}"
    return f"{value} B"


def duration(seconds: float) -> str:
    """A length of time in at most two units: ``3 h 12 m``, ``6 m 04 s``, ``3.10 s``, ``45 ms``."""
    if seconds < 0 or not math.isfinite(seconds):
        return "unknown"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 59.95 else "60 s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} m"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def mark_duration(seconds: float, parts: int = 2) -> str:
    """A place on a time axis in so many parts at most, without those that are zero: ``45 s``, ``15 m``, ``1 h 30 m``."""
    left = round(seconds)
    found = []
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "m"), (1, "s")):
        amount, left = divmod(left, size)
        if amount:
            found.append(f"{amount} {unit}")
    return " ".join(found[:parts]) or "0"


def age(seconds: float) -> str:
    """How long ago, in one unit: ``12 s``, ``6 m``, ``3 h``, ``4 d``."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"


def plural(number: int, noun: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{thousands(number)} {noun}{'' if number == 1 else 's'}"


def shorten(text: str, width: int) -> str:
    """``text`` in at most ``width`` cells, the end replaced by an ellipsis."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def shorten_path(path: str, width: int) -> str:
    """``path`` in at most ``width`` cells, keeping its end, which tells paths apart."""
    return path if len(path) <= width else "…" + path[len(path) - max(0, width - 1) :]
