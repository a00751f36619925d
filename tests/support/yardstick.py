"""How slow this machine is: limits in seconds hold on the machine that they were written on."""

from __future__ import annotations

import time

PLAIN_PYTHON_S = 0.03
"""What ``seconds_of_plain_python`` is there: a table of plans takes 0.28 s."""


def seconds_of_plain_python() -> float:
    begin = time.process_time()
    sum(len(str(number)) + hash((number, -number)) % 2 for number in range(150_000))
    return time.process_time() - begin


def slowness(measured_s: float) -> float:
    """Return the factor, at least 1, from the least ``seconds_of_plain_python`` of some tries."""
    return max(1.0, measured_s / PLAIN_PYTHON_S)
