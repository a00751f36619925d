"""What the dashboard of a live run costs, beside bare Textual applications that are measured in the same minute."""

from __future__ import annotations

import pytest

from tests.ui.dashboard_cost import bare, dashboard, empty, million, opening_s, table

SECONDS = 12
"""Ticks of each measurement."""
MOST_CPU = 1.2
"""Times the bare application's."""
MOST_BYTES = 1.2
MOST_MEMORY_BYTES = 25 << 20
"""Above an empty application."""
MOST_LONG_MEMORY_BYTES = 34 << 20
"""The same where the run has a million records: the series of its blocks alone take 6 MiB, and reading their indexes leaves some behind."""
MOST_KEY_S = 0.05
"""CPU seconds from a key to its frame, for 95 % of the keys."""
MOST_OPENING_S = 1.0
"""CPU seconds until a million records are complete."""


@pytest.mark.system
def test_the_dashboard_costs_little_more_than_a_bare_application() -> None:
    nothing = empty()
    # Noise only ever adds: the least of several is what a program costs. More rounds only where the first is over.
    reference, ours = [], []
    for _ in range(4):
        # In turn, so that neither adds to the other's noise.
        reference.append(bare(SECONDS))
        ours.append(dashboard(SECONDS))
        cpu = min(cost.cpu_percent for cost in ours) / min(cost.cpu_percent for cost in reference)
        key_s = min(cost.key_p95_s for cost in ours)
        if cpu <= MOST_CPU and key_s <= MOST_KEY_S:
            break
    million_s, long = opening_s(), million(SECONDS)
    print(table(nothing, reference[-1], ours[-1], million_s, long))
    assert cpu <= MOST_CPU, (reference, ours)
    assert key_s <= MOST_KEY_S, ours
    assert million_s <= MOST_OPENING_S
    assert ours[-1].bytes_per_s <= MOST_BYTES * reference[-1].bytes_per_s
    assert ours[-1].memory_bytes - nothing.memory_bytes <= MOST_MEMORY_BYTES
    assert long.memory_bytes - nothing.memory_bytes <= MOST_LONG_MEMORY_BYTES
