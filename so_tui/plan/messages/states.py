"""What compact moments cost, in words."""

from __future__ import annotations

from so_tui.spec.sections.offload import StatesFormat

_MANTISSA_BITS: dict[StatesFormat, int] = {"fp32": 24, "bf16-moments": 8, "int8-moments": 4}
"""Of a moment; those of 8 bits share a scale in each block."""


def price_of(states: StatesFormat) -> str:
    """Return what a format of the moments costs in exactness."""
    bits = f"{_MANTISSA_BITS[states]} bits of mantissa (fp32: {_MANTISSA_BITS['fp32']})"
    return f"moments have {bits}, rounded at random, so losses differ slightly"
