"""Quantities in words."""

import pytest

from so_tui.units import disk_size


@pytest.mark.parametrize(
    ("size_bytes", "told"),
    [(206_700_000_000, "206.7 GB"), (100_000_000, "0.1 GB"), (31_400_000, "31.4 MB"), (40_000, "40.0 kB"), (7, "7 B"), (0, "0 B")],
)
def test_a_size_is_told_in_a_unit_that_shows_it(size_bytes: int, told: str) -> None:
    assert disk_size(size_bytes) == told
