"""Types for numbers on the command line, which must be finite and within a range."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from so_tui.units import thousands


def number_from(lowest: float, highest: float) -> Callable[[str], float]:
    """Return a type for argparse: a number within a range, bounds included."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not lowest <= value <= highest:  # also true for NaN
            raise argparse.ArgumentTypeError(
                f"{text[:40]!r} is not a number from {lowest:,g} to {highest:,g}"
            )
        return value

    return parse


def integer_from(lowest: int, highest: int) -> Callable[[str], int]:
    """Return a type for argparse: an integer within a range, bounds included."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:  # also for thousands of digits
            value = lowest - 1
        if not lowest <= value <= highest:
            raise argparse.ArgumentTypeError(
                f"{text[:40]!r} is not an integer from {thousands(lowest)} to {thousands(highest)}"
            )
        return value

    return parse
