"""``inspect`` and ``doctor``: show this machine, and check it for problems."""

from __future__ import annotations

import os
import re
import sys
from argparse import Namespace
from pathlib import Path

from msgspec import Struct

from so_tui.commands.common import (
    ProgressLine,
    chosen_machine,
    chosen_spec,
    print_json,
    print_note,
    print_rich,
)
from so_tui.doctor.checks import Finding
from so_tui.machine.known import MACHINES, Description, named_machine
from so_tui.machine.types import Machine
from so_tui.plan.measured import Calibration, calibration_of
from so_tui.spec.check import is_folder
from so_tui.spec.errors import reject
from so_tui.validation.report import Report

# ``calibrate``: measure and store the rates that predictions of this machine's speed use.


class Measured(Struct, frozen=True):
    """What ``calibrate --json`` prints."""

    path: str
    calibration: Calibration | None


def calibrate(arguments: Namespace) -> int:
    """Measure this machine in helper processes and store the rates, which plans use from then on.

    Raises:
        Refused: A run uses a GPU (code ``gpu-in-use``).
    """
    from so_tui.launch.helper_jobs import measure_rates
    from so_tui.machine import inspect_machine

    machine = inspect_machine()
    rates, path = measure_rates(machine, lambda message: print_note(message, stderr=arguments.json))
    if arguments.json:
        print_json(Measured(str(path), calibration_of(machine)))
    else:
        print_rich(
            f"measured in {rates.seconds:.0f} s and stored in {path}; plans of this machine use it"
        )
        if not machine.gpus:
            print_note(
                "This machine has no GPU, so only Adam's rate was measured. Steps on machines "
                "without GPUs are not predicted.",
            )
    return 0


_PARTITION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class KnownMachines(Struct, frozen=True):
    """What ``machines --json`` prints."""

    machines: dict[str, Description]


class Findings(Struct, frozen=True):
    """What ``doctor --json`` prints."""

    findings: tuple[Finding, ...]
    """Worst first."""
    tested_set: str | None = None
    """Name of the tested set of training packages that is installed; None if they are none."""


def inspect(arguments: Namespace) -> int:
    """Print this machine, or the one that ``--machine`` names, for people or as the JSON that
    ``--machine`` reads back.
    """
    option = "--sysroot" if arguments.sysroot else "--hostname"
    if arguments.machine and (arguments.sysroot or arguments.hostname):
        raise reject(
            "unused-option",
            "--machine",
            arguments.machine,
            f"is a machine of its own, and {option} describes another",
            f"Leave one of --machine and {option} out.",
        )
    machine = chosen_machine(arguments) if arguments.machine else _inspected(arguments)
    if arguments.json:
        print_json(machine)
    else:
        from so_tui.machine.show import render

        print_rich(render(machine))
    return 0


def _inspected(arguments: Namespace) -> Machine:
    """Inspect this host, or the copy of its files in a folder."""
    from so_tui.machine import inspect_machine

    sysroot = Path(arguments.sysroot) if arguments.sysroot else None
    if sysroot is not None and not is_folder(sysroot / "sys"):
        raise reject(
            "no-sysroot",
            "--sysroot",
            str(sysroot),
            "has no folder named sys",
            "Give a folder with copies of /sys and /proc.",
        )
    if arguments.hostname and sysroot is None:
        raise reject(
            "unused-option",
            "--hostname",
            arguments.hostname,
            "has an effect only with --sysroot",
            "Leave it out: this machine has a name.",
        )
    machine = inspect_machine(sysroot, hostname=arguments.hostname)
    if sysroot is None:
        _remember_for_plans(machine)
    return machine


def _remember_for_plans(machine: Machine) -> None:
    """On a node of a Slurm job, keep the machine for plans of its partition."""
    cluster = os.environ.get("SLURM_CLUSTER_NAME")
    partition = os.environ.get("SLURM_JOB_PARTITION", "")
    # The shell of salloc may be on the login node, with the job's other variables.
    on_node = "SLURMD_NODENAME" in os.environ
    if not on_node or not cluster or not _PARTITION.fullmatch(partition):
        return
    from so_tui.launch.places import remember, sees_part

    remember(cluster, partition, machine)
    part = (
        ". This allocation has a part of the node; --exclusive shows all of it"
        if sees_part(machine)
        else ""
    )
    print_note(f"kept for plans of partition {partition} on {cluster}{part}", stderr=True)


def machines(arguments: Namespace) -> int:
    """List the machines that ``--machine`` knows by name, or show one as ``inspect`` shows this
    machine.
    """
    from so_tui.machine.show import render, render_described

    machine = named_machine(arguments.name) if arguments.name else None
    if arguments.json:
        print_json(machine or KnownMachines(MACHINES))
    else:
        print_rich(render(machine) if machine else render_described(MACHINES))
    return 0


def _fix(arguments: Namespace) -> None:
    """Compile the kernels that the first run would otherwise compile while all its ranks wait."""
    from so_tui.launch.helper import call_tool

    print_note(
        "compiling the CPU Adam kernels; the first time, this takes up to a minute …",
        stderr=arguments.json,
    )
    answer = call_tool("build_ops", {}, timeout_s=600.0)
    print(
        f"CPU Adam kernel: {answer['cpu_adam']} ({answer['seconds']:.0f} s)",
        file=sys.stderr if arguments.json else sys.stdout,
    )
    if answer["deepspeed"]:
        print(
            "DeepSpeed's own kernel, for zerooffload and offload.engine = deepspeed, cannot be "
            f"compiled: {answer['deepspeed']}",
            file=sys.stderr,
        )


def doctor(arguments: Namespace) -> int:
    """Print the findings, worst first, and return 3 if one blocks a launch. With a preset, also
    check what that run needs.
    """
    from so_tui.commands.mpam import print_mpam_script
    from so_tui.doctor import findings
    from so_tui.doctor.show import render_findings
    from so_tui.folders import default_runs_dir
    from so_tui.machine.software import known_versions

    if (arguments.fix or arguments.mpam) and arguments.machine:
        option = "--fix" if arguments.fix else "--mpam"
        raise reject(
            "not-this-machine",
            "--machine",
            arguments.machine,
            f"is another machine, which {option} cannot reach",
            f"Leave {option} out, or run it on that machine.",
        )
    machine = chosen_machine(arguments)
    checkpoints, plan = arguments.runs_dir or default_runs_dir(), None
    if arguments.preset:
        from so_tui.plan.planner import recommend

        plan = recommend(chosen_spec(arguments), machine)
        checkpoints = Path(plan.spec.checkpoint.folder or checkpoints)
    if arguments.mpam:
        return print_mpam_script(machine, plan)
    if arguments.fix:
        _fix(arguments)
    found = findings(machine, plan, checkpoints=checkpoints)
    if arguments.json:
        tested = known_versions().set_of(machine.software)
        print_json(Findings(tuple(found), tested.name if tested else None))
    else:
        installed = machine.live and machine.software.torch
        print_rich(render_findings(found, machine.software if installed else None))
    return 3 if any(finding.severity == "blocks" for finding in found) else 0


# ``validate``: measure this machine and training on it, beside what plans predict, as a report.


BAR_CELLS = 24


def validate(arguments: Namespace) -> int:
    """Measure as much as fits into the minutes, continuing an earlier report, and say where the
    report is.

    Returns:
        0; 1 if a measurement failed; 4 if the user stopped it, in which case the same command
        continues.
    """
    from so_tui.folders import validation_dir
    from so_tui.machine import inspect_machine
    from so_tui.validation import report as reports
    from so_tui.validation.validate import SHARED, validate

    machine = inspect_machine()
    folder: Path = arguments.out or validation_dir()
    gpus = min(arguments.gpus, len(machine.gpus)) if arguments.gpus else len(machine.gpus)
    line, told = ProgressLine(), ""

    def tell(text: str, share: float) -> None:
        nonlocal told
        line.show(f"{_bar(share)} {text}")
        if line.hidden and text.partition(":")[0] != told:
            told = text.partition(":")[0]
            print_note(f"{100 * share:3.0f} % {text}", stderr=arguments.json)

    try:
        found = validate(
            machine,
            folder,
            seconds=60 * arguments.minutes,
            gpus=gpus,
            share=arguments.share,
            tell=tell,
        )
    except KeyboardInterrupt:
        line.clear()
        print_note(
            f"stopped; the same command continues. So far: {folder / 'report.md'}",
            stderr=True,
        )
        return 4
    line.clear()
    if arguments.json:
        print_json(reports.shared(found) if arguments.share else found)
    else:
        print_rich(_summary(found))
        print_rich(f"report: {folder / 'report.md'}")
        if arguments.share:
            print_rich(
                "to share, without names of host, user and folders: "
                f"{folder / SHARED / 'report.md'}"
            )
    return 1 if any(outcome.state in reports.FAILURES for outcome in found.outcomes) else 0


def _summary(report: Report) -> str:
    """Return what was measured, in a sentence."""
    states = [outcome.state for outcome in report.outcomes]
    text = f"{states.count('measured')} of {len(states)} parts measured"
    left_out = "left out for lack of time: the same command continues"
    for state, said in (
        ("failed", "failed"),
        ("timed-out", "took too long"),
        ("left-out", left_out),
    ):
        text += f", {states.count(state)} {said}" if state in states else ""
    return text


def _bar(share: float) -> str:
    """Return a bar of characters that every terminal has."""
    full = round(BAR_CELLS * min(1.0, max(0.0, share)))
    return f"[{'#' * full}{'.' * (BAR_CELLS - full)}] {100 * share:3.0f} %"
