"""Where the ranks of a run really are: values that a supervisor measures."""

from __future__ import annotations

from msgspec import Struct


class RankPlacement(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where one rank's processes really are."""

    rank: int
    cpus: tuple[int, ...]
    """CPUs on which any thread of the training process may run."""
    adam_cpus: tuple[int, ...] = ()
    """The same of its Adam worker; empty without one."""
    node_bytes: dict[int, int] = {}
    """NUMA node -> bytes of both, files not counted."""
    nice: int = 0
    """The lowest priority of both; 20 stands for the scheduling class ``idle``."""
    mpam_groups: tuple[str, ...] = ()
    """resctrl groups of the training process and of its Adam worker; empty where they are in the default group."""
