"""Quantities as people read them."""

import pytest

from so_tui.units import bandwidth, count, disk_size, duration, memory_size


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        # Files have decimal units, memory has binary ones.
        (disk_size(206_700_000_000), "207 GB"),
        (disk_size(1_234_000_000_000_000), "1,234 TB"),
        (disk_size(40_000), "40.0 kB"),
        (disk_size(0), "0 B"),
        (memory_size(3_435_973_837), "3.2 GiB"),
        (memory_size(65_536), "64 KiB"),
        (memory_size(1023), "1,023 B"),
        (count(14_768_307_200, 1), "14.8 B"),
        (count(131_072), "131 k"),
        (count(9_999), "9,999"),
        (bandwidth(3.42e9), "3.4 GB/s"),
        (duration(0.045), "45 ms"),
        (duration(3.1), "3.10 s"),
        (duration(364), "6 m 04 s"),
        (duration(7_200), "2 h 00 m"),
    ],
)
def test_quantities_have_units(shown: str, text: str) -> None:
    assert shown == text
