"""Quantities as people read them."""

import pytest

from so_tui.units import bandwidth, count, disk_size, duration, memory_size


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (206_700_000_000, "207 GB"),
        (100_000_000, "100 MB"),
        (1_500_000_000_000, "1.5 TB"),
        (31_400_000, "31.4 MB"),
        (40_000, "40.0 kB"),
        (1_234_000_000_000_000, "1,234 TB"),
        (7, "7 B"),
        (0, "0 B"),
    ],
)
def test_file_sizes_have_decimal_units(size_bytes: int, text: str) -> None:
    assert disk_size(size_bytes) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (226 << 30, "226 GiB"),
        (3_435_973_837, "3.2 GiB"),
        (12 << 20, "12 MiB"),
        (65_536, "64 KiB"),
        (1023, "1,023 B"),
        (0, "0 B"),
    ],
)
def test_memory_sizes_have_binary_units(size_bytes: int, text: str) -> None:
    assert memory_size(size_bytes) == text


def test_counts_rates_and_durations() -> None:
    assert [count(number) for number in (14_768_307_200, 389_000_000, 131_072, 9_999)] == [
        "14.77 B",
        "389 M",
        "131 k",
        "9,999",
    ]
    assert count(14_768_307_200, 1) == "14.8 B"
    assert [bandwidth(rate) for rate in (412e9, 3.42e9)] == ["412 GB/s", "3.4 GB/s"]
    assert [duration(seconds) for seconds in (0.045, 3.1, 364, 7_200)] == [
        "45 ms",
        "3.10 s",
        "6 m 04 s",
        "2 h 00 m",
    ]
