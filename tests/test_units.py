"""Quantities as people read them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest

from so_tui.units import (
    bandwidth,
    count,
    disk_size,
    duration,
    interval,
    mark_duration,
    memory_of,
    memory_size,
    rate,
    significant,
    small_share,
    thousands,
)


@pytest.mark.parametrize(
    ("write", "texts"),
    [
        (thousands, {131072: "131,072"}),
        (significant, {0.0: "0", 1.4821: "1.48", 431.2: "431", 15999.6: "16,000"}),
        (significant, {1e-5: "1.0e-5", 0.04271: "0.0427", 3.4e38: "3.4e38", math.nan: "NaN"}),
        (rate, {31234: "31.2k", 4730: "4.73k", 940: "940"}),
        (count, {131_072: "131 k", 9_999: "9,999"}),
        (partial(count, decimals=1), {14_768_307_200: "14.8 B", 3_100_000: "3.1 M"}),
        # Files have decimal units, memory has binary ones.
        (disk_size, {206_700_000_000: "207 GB", 1_234_000_000_000_000: "1,234 TB"}),
        (disk_size, {40_000: "40.0 kB", 0: "0 B"}),
        (memory_size, {512 << 20: "512 MiB", 117 << 30: "117 GiB", 3 << 29: "1.5 GiB"}),
        (memory_size, {3_435_973_837: "3.2 GiB", 65_536: "64 KiB", 1023: "1,023 B"}),
        (partial(memory_of, total_bytes=95 << 30), {30 << 30: "30.0 of 95.0 GiB"}),
        (bandwidth, {3.42e9: "3.4 GB/s"}),
        (duration, {0.045: "45 ms", 3.1: "3.10 s", 42.5: "42.5 s", 364: "6 m 04 s"}),
        (duration, {7_200: "2 h 00 m", 11_520: "3 h 12 m", 200_000: "2 d 7 h"}),
        (interval, {0.1: "0.1 min", 30: "30 min", 150: "2 h 30 m", 1440: "1 d"}),
        (small_share, {0: "< 0.1 %", 0.0004: "< 0.1 %", 0.0005: "0.1 %", 0.0123: "1.2 %"}),
        (partial(mark_duration, parts=2), {0: "0", 45: "45 s", 900: "15 m", 5400: "1 h 30 m"}),
    ],
)
def test_quantities_have_units_and_no_noise(
    write: Callable[[float], str], texts: dict[float, str]
) -> None:
    assert [write(value) for value in texts] == list(texts.values())
