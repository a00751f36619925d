"""Read /sys, /proc and NVML into one frozen Machine, and check it."""

from so_tui.machine.host import cpu_ranges, parse_cpus
from so_tui.machine.inspect import inspect_machine, load_machine
from so_tui.machine.types import Gpu, Machine, Mpam, NumaNode, Software

__all__ = [
    "Gpu",
    "Machine",
    "Mpam",
    "NumaNode",
    "Software",
    "cpu_ranges",
    "inspect_machine",
    "load_machine",
    "parse_cpus",
]
