"""A whole validation of this machine: which measurements, in which folder, continued where the last one ended."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

from so_tui import __version__
from so_tui.launch.preparation import usable_machine
from so_tui.machine.types import Machine
from so_tui.spec.errors import InputError, Problem
from so_tui.validation import machine_parts, render, report, runner, sharing, training
from so_tui.validation.cpu_adam import CpuAdam
from so_tui.validation.report import Report

SHARED = "shared"
"""Folder, below that of the report, of the form without names."""


def validate(
    machine: Machine, folder: Path, *, seconds: float, gpus: int, share: bool, tell: runner.Tell
) -> Report:
    """Measure what the report in a folder lacks, and write it.

    Args:
        machine: This machine.
        folder: The report's.
        seconds: How long all of it may take.
        gpus: The most GPUs that a run may have, of those that the environment shows.
        share: Also write the form without names of host, user and paths.
        tell: Shows progress.

    Returns:
        The report.

    Raises:
        InputError: The folder has another report (codes ``not-a-report``, ``another-report``).
        KeyboardInterrupt: The user stopped. What was measured is in the folder, and a later call continues.
    """
    usable = usable_machine(machine, os.environ)
    gpus = min(gpus, len(usable.gpus))
    shape = training.shape_for(usable)
    parts = list(training.parts_of(usable, gpus, partitions=training.can_partition(machine, shape)))
    begun = _begun(machine, folder, gpus, training.shape_name(shape))

    def write(found: Report) -> None:
        report.write(folder, found)
        render.write(folder, found)
        if share:
            nameless = sharing.shared(found)
            report.write(folder / SHARED, nameless)
            render.write(folder / SHARED, nameless)

    with CpuAdam() as cpu_adam:
        of_training = training.measurements(machine, shape, parts, cpu_adam)
        return runner.run(
            begun,
            [*machine_parts.measurements(machine, folder), *of_training],
            seconds,
            write,
            tell,
        )


def _begun(machine: Machine, folder: Path, gpus: int, shape: str) -> Report:
    new = Report(
        so_tui=__version__,
        begun=datetime.now(UTC).isoformat(timespec="seconds"),
        host=machine.hostname,
        gpus=gpus,
        shape=shape,
        outcomes=(),
    )
    found = report.read(folder)
    if found is None:
        return new
    if (found.host, found.so_tui, found.gpus, found.shape) != (
        new.host,
        new.so_tui,
        new.gpus,
        new.shape,
    ):
        message = f"has a report of {found.host or 'a shared one'}, so-tui {found.so_tui}, {found.gpus} GPUs, {found.shape}"
        remedy = "Name another folder with --out, or delete that report."
        raise InputError(
            [
                Problem(
                    code="another-report",
                    field="--out",
                    value=str(folder),
                    message=message,
                    remedy=remedy,
                )
            ]
        )
    return found
