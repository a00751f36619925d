"""Memory that was freed, and that the C library keeps for later."""

from __future__ import annotations


def give_back() -> None:
    """Return freed memory to the system, where the C library can: glibc keeps what reading a long run took for a moment."""
    import ctypes  # takes a mebibyte, and short runs do without

    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
