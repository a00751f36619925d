"""What is wrong with a machine, before a run finds out: each finding with what was read, what it costs and what to do.

A check is a function from a :class:`Look` to findings. It reads the Machine and, where the Machine is this host, a few small files.
"""

from __future__ import annotations

import os
from pathlib import Path

from so_tui.machine.doctor import gpu, gpu_health, host, memory, processes, run, software
from so_tui.machine.doctor.finding import SEVERITIES, Finding, Look, Needs
from so_tui.machine.nvml import query_health
from so_tui.machine.tree import Tree
from so_tui.machine.types import Machine

__all__ = ["Finding", "Look", "Needs", "findings", "look_at"]

_CHECKS = (*run.CHECKS, *gpu.CHECKS, *gpu_health.CHECKS, *software.CHECKS, *memory.CHECKS, *host.CHECKS, *processes.CHECKS)


def findings(machine: Machine, plan: Needs | None = None, *, checkpoints: Path | None = None) -> tuple[Finding, ...]:
    """All findings, worst first. ``plan`` adds those that depend on a run; ``checkpoints`` is the folder they would go to on this host."""
    # Live files only where the Machine is this host: a machine file may describe another one.
    if not (machine.live and machine.hostname == os.uname().nodename):
        return look_at(Look(machine=machine, plan=plan))
    return look_at(
        Look(machine=machine, plan=plan, tree=Tree(), environment=dict(os.environ), health=query_health(), checkpoints=checkpoints)
    )


def look_at(look: Look) -> tuple[Finding, ...]:
    """The findings of a look at a machine; worst first, in the order of the checks otherwise."""
    found = [finding for check in _CHECKS for finding in check(look)]
    return tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity)))
