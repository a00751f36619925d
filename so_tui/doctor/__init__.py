"""Find what would slow down or stop a run on a machine, before a run does.

A check is a function from a :class:`CheckContext` to findings. It reads the Machine and, if the
Machine is this host, a few system files. Each finding has a stable ``code``; the checks of each
module list theirs, and ``findings.toml`` has their words.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from so_tui.doctor import gpu, host, run, software
from so_tui.doctor.checks import SEVERITIES, CheckContext, Finding
from so_tui.machine.gpus import query_health
from so_tui.machine.system_files import SystemFiles
from so_tui.machine.types import Machine

if TYPE_CHECKING:
    from so_tui.plan.plan import Plan

__all__ = ["CheckContext", "Finding", "findings"]

_CHECKS = (*run.CHECKS, *gpu.CHECKS, *software.CHECKS, *host.CHECKS)


def findings(
    machine: Machine, plan: Plan | None = None, *, checkpoints: Path | None = None
) -> tuple[Finding, ...]:
    """Return all findings about a machine, worst first.

    Args:
        machine: The machine to check. System files are read only if it is this host.
        plan: Adds the checks that depend on a run.
        checkpoints: Folder on this host for the checkpoints of a run.
    """
    # A machine file may describe another host, so system files count only if the hostname is this
    # one's.
    if not (machine.live and machine.hostname == os.uname().nodename):
        return _run_checks(CheckContext(machine=machine, plan=plan))
    return _run_checks(
        CheckContext(
            machine=machine,
            plan=plan,
            files=SystemFiles(),
            environment=dict(os.environ),
            health=query_health(),
            checkpoints=checkpoints,
        )
    )


def _run_checks(context: CheckContext) -> tuple[Finding, ...]:
    """Return the findings of all checks, worst first, otherwise in the order of the checks."""
    return tuple(
        sorted(
            [finding for check in _CHECKS for finding in check(context)],
            key=lambda finding: SEVERITIES.index(finding.severity),
        )
    )
