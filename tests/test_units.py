"""Quantities as people read them."""

from collections.abc import Callable

import pytest

from so_tui.units import bandwidth, count, disk_size, duration, memory_size


@pytest.mark.parametrize(
    ("shown", "texts"),
    [
        (
            disk_size,
            {
                206_700_000_000: "207 GB",
                1_500_000_000_000: "1.5 TB",
                1_234_000_000_000_000: "1,234 TB",
                31_400_000: "31.4 MB",
                40_000: "40.0 kB",
                0: "0 B",
            },
        ),
        (
            memory_size,
            {
                226 << 30: "226 GiB",
                3_435_973_837: "3.2 GiB",
                12 << 20: "12 MiB",
                65_536: "64 KiB",
                1023: "1,023 B",
            },
        ),
        (
            count,
            {14_768_307_200: "14.77 B", 389_000_000: "389 M", 131_072: "131 k", 9_999: "9,999"},
        ),
        (bandwidth, {412e9: "412 GB/s", 3.42e9: "3.4 GB/s"}),
        (duration, {0.045: "45 ms", 3.1: "3.10 s", 364: "6 m 04 s", 7_200: "2 h 00 m"}),
    ],
    ids=["files in decimal units", "memory in binary units", "counts", "rates", "durations"],
)
def test_quantities_have_units(shown: Callable[[float], str], texts: dict[float, str]) -> None:
    assert {value: shown(value) for value in texts} == texts


def test_counts_have_fewer_decimals_if_asked() -> None:
    assert count(14_768_307_200, 1) == "14.8 B"
