"""Format quantities for people: always with a unit, never wider than necessary.

Memory is shown in binary units (``memory_size``), because GPU and host memory are sold and reported
in GiB, unless the screen's user wants decimal ones; a page keeps its KiB. Files, downloads and free
disk space are shown in decimal units (``disk_size``), as disk vendors and file managers do.
"""

from __future__ import annotations

import math
from typing import Literal

GIB = 1 << 30
MIB = 1 << 20
KIB = 1 << 10
_BINARY = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
_DECIMAL = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
_memory_units = _BINARY
_DISK_UNITS = ((10**12, "TB"), *_DECIMAL)
_LONGEST = 15
"""Digits of a number from which on its power of ten is written."""
_TIME_UNITS = ((86_400, "d"), (3600, "h"), (60, "m"), (1, "s"))


def thousands(value: int) -> str:
    """Return a number with grouped digits: ``131,072``."""
    return f"{value:,}"


def plural(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 run``, ``2 runs``."""
    return f"{thousands(number)} {noun}{'' if number == 1 else 's'}"


def significant(value: float, digits: int = 3) -> str:
    """Return a plain number with about ``digits`` significant digits: ``0.0512``, ``1.48``,
    ``431``, ``16,000``, ``1e-5``, ``3.4e38``.
    """
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    if not -4 <= magnitude < _LONGEST:
        return f"{value:.{max(0, digits - 2)}e}".replace("e-0", "e-").replace("e+", "e")
    if magnitude >= digits:
        return thousands(round(value))
    return f"{value:.{max(0, digits - 1 - magnitude)}f}"


def percent(share: float) -> str:
    """Return a share in percent: ``43.6 %``."""
    return f"{100 * share:.3g} %"


def small_share(share: float) -> str:
    """Return a share of a few percent at most: ``1.2 %``, ``< 0.1 %``."""
    return "< 0.1 %" if share < 0.0005 else f"{100 * share:.1f} %"


def count(value: float, decimals: int = 2) -> str:
    """Return a number of parameters or tokens: ``14.77 B``, ``389 M``, ``16.38 k``; whole below
    10,000: ``4,096``.
    """
    for smallest, unit, suffix in ((1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if value >= smallest:
            return _in((unit, suffix), value, decimals if value < 100 * unit else 0)
    return thousands(round(value))


def show_memory_in(system: Literal["binary", "decimal"]) -> None:
    """Choose the units of memory for this process, by its user's settings: the screen does, and
    commands that print for people.
    """
    global _memory_units
    _memory_units = _BINARY if system == "binary" else _DECIMAL


def memory_unit() -> tuple[int, str]:
    """Return the bytes and the name of the unit in which large memory is shown: GiB, or GB."""
    return _memory_units[0]


def memory_size(size_bytes: int, decimals: int = 1) -> str:
    """Return a size of memory: ``226 GiB``, ``3.2 GiB``, ``12 MiB``, ``64 KiB``. Only GiB below 100
    have decimals.
    """
    giga, mega, kilo = _memory_units
    if size_bytes >= 0.95 * giga[0]:
        return _in(giga, size_bytes, decimals if size_bytes < 99.5 * giga[0] else 0)
    if size_bytes >= 0.5 * mega[0]:
        return _in(mega, size_bytes)
    return _in(kilo, size_bytes) if size_bytes >= kilo[0] else f"{thousands(size_bytes)} B"


def _in(unit: tuple[float, str], value: float, decimals: int = 0) -> str:
    """Return a number in a unit, of which one has as many as the unit says."""
    return f"{value / unit[0]:,.{decimals}f} {unit[1]}"


def page_size(size_bytes: int) -> str:
    """Return the size of a page of memory, a power of two, whatever units memory is shown in:
    ``64 KiB``.
    """
    return f"{size_bytes // KIB} KiB"


def memory_of(used_bytes: int, total_bytes: int | None, decimals: int = 1) -> str:
    """Return used and total memory in the unit of the larger: ``78.4 of 95.0 GiB``. Without a
    total, return the used memory.
    """
    if total_bytes is None:
        return memory_size(used_bytes)
    larger = max(used_bytes, total_bytes)
    for unit in _memory_units:
        if larger >= unit[0]:
            digits = 0 if larger >= 1000 * unit[0] else decimals
            return f"{used_bytes / unit[0]:,.{digits}f} of {_in(unit, total_bytes, digits)}"
    return f"{thousands(used_bytes)} of {thousands(total_bytes)} B"


def disk_size(size_bytes: int) -> str:
    """Return a size of files in decimal units: ``207 GB``, ``31.4 MB``."""
    for unit in _DISK_UNITS:
        if size_bytes >= unit[0]:
            return _in(unit, size_bytes, 1 if size_bytes < 100 * unit[0] else 0)
    return f"{thousands(size_bytes)} B"


def rate(per_s: float) -> str:
    """Return a number of tokens per second without its unit: ``31.2k``, ``940``."""
    for least, unit, suffix, decimals in (
        (1e6, 1e6, "M", 1),
        (1e4, 1e3, "k", 1),
        (1e3, 1e3, "k", 2),
    ):
        if per_s >= least:
            return f"{per_s / unit:.{decimals}f}{suffix}"
    return significant(per_s)


def bandwidth(bytes_per_s: float) -> str:
    """Return a rate of copies or memory traffic, in decimal units as vendors do: ``412 GB/s``,
    ``3.4 GB/s``.
    """
    return _in((1e9, "GB/s"), bytes_per_s, 1 if bytes_per_s < 100e9 else 0)


def duration(seconds: float) -> str:
    """Return a length of time in at most two units: ``3 h 12 m``, ``6 m 04 s``, ``3.10 s``,
    ``45 ms``.
    """
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
    return f"{thousands(whole // 86_400)} d {whole % 86_400 // 3600} h"


def mark_duration(seconds: float, parts: int) -> str:
    """Return a mark of a time axis in at most ``parts`` units, without zeros: ``45 s``, ``15 m``,
    ``1 h 30 m``.
    """
    left = round(seconds)
    found = []
    for size, unit in _TIME_UNITS:
        amount, left = divmod(left, size)
        if amount:
            found.append(f"{amount} {unit}")
    return " ".join(found[:parts]) or "0"


def interval(minutes: float) -> str:
    """Return an interval that somebody chose: ``30 min``, ``2 h 30 m``."""
    return f"{minutes:g} min" if minutes < 60 else mark_duration(60 * minutes, 2)


def age(seconds: float) -> str:
    """Return how long ago something was, in one unit: ``12 s``, ``6 m``, ``3 h``, ``4 d``."""
    for size, unit in _TIME_UNITS[:-1]:
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"
