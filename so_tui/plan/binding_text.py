"""How ranks are bound, in words."""

from __future__ import annotations

from so_tui.machine.cpulist import cpu_ranges
from so_tui.plan.types import DeepSpeedBinding


def deepspeed_text(binding: DeepSpeedBinding) -> str:
    """Return what DeepSpeed's launcher does, for a table: ``the same``, the numactl prefix, or why it fails."""
    if binding.error:
        return f"fails: {binding.error}"
    return (
        "the same"
        if binding.matches
        else " ".join(binding.numactl) or f"unbound, cores {cpu_ranges(binding.cpus)}"
    )
