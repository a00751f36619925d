"""Memory: what lives as long as the application, and what was freed and is kept by the C library for later."""

from __future__ import annotations

import gc

_THRESHOLDS = (10_000, 20, 20)
"""A frame makes hundreds of objects, nearly all of which are freed without the collector. With Python's own 700 it took 7 % of the time."""


def settle() -> None:
    """Keep the garbage collector from what exists by now, which lives as long as the application.

    Looking through all of it every eight seconds took 14 % of the time of a dashboard.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    give_back()


def give_back() -> None:
    """Return freed memory to the system, where the C library can: glibc keeps what reading a long run took for a moment."""
    import ctypes  # takes a mebibyte, and short runs do without

    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
