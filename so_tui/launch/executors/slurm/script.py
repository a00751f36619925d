"""The batch script of a job: what Slurm reads and what the node's shell executes. Pure.

Problem codes:
    account-missing: The site charges an account, and the spec names none.
    option-refused: The site refuses an option of ``slurm.options``.
    option-reserved: so-tui itself sets an option of ``slurm.options``.
    path-unfit-for-slurm: Slurm would read the run directory's path as a pattern, or it has more than one line.
    script-without-run: A script of the user has no line that names the run directory.
    time-limit-too-short: The job would be warned of its end before it has trained for as long as the warning is early.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from so_tui.launch.executors.slurm.site import Site
from so_tui.launch.network import EXPECTED_VARIABLE
from so_tui.plan.interval import DISK_BYTES_PER_S
from so_tui.spec import InputError, Problem, RunSpec
from so_tui.units import duration

OUTPUT = "slurm.%j.log"
"""What the job writes outside its supervisor, in the attempt's folder; Slurm's own messages are in it."""
CONTINUE_SIGNAL = "USR1"
_EARLY_S = 60
"""Slurm may warn a job this much earlier than asked."""
_MARGIN = 2.0
_STEP_S = 60
"""For the step in progress, which is finished first."""
_RUN = re.compile(r"^so_tui_run=(.*)$", re.MULTILINE)
_QUOTES = "'\""
_RESERVED = frozenset(
    (
        *(
            "--array",
            "--chdir",
            "--clusters",
            "--error",
            "--export",
            "--export-file",
            "--get-user-env",
            "--input",
            "--job-name",
        ),
        *(
            "--nodes",
            "--no-requeue",
            "--ntasks",
            "--ntasks-per-node",
            "--open-mode",
            "--output",
            "--parsable",
            "--partition",
            "--requeue",
        ),
        *(
            "--signal",
            "--test-only",
            "--time",
            "--wait",
            "--wrap",
            "--account",
            "--qos",
            "--constraint",
            "--uid",
            "--gid",
        ),
    )
)
_REMEDY = "so-tui: name an interpreter of the compute nodes, with so-tui and its training packages, in the site profile (python = ...)"


def warning_lead_s(
    site: Site, checkpoint_bytes: int, measured_s: float | None, checkpoints: int = 1
) -> int:
    """Return how long before its time limit a job is warned: the profile's time, or more if a checkpoint takes longer.

    Args:
        site: The profile of the site.
        checkpoint_bytes: Size of a checkpoint.
        measured_s: What the run's last checkpoint took; None before the first.
        checkpoints: How many may have to be written by then: one that is being written behind training, and the last one.
    """
    takes_s = checkpoint_bytes / DISK_BYTES_PER_S if measured_s is None else measured_s
    return max(site.warning_s, math.ceil(_MARGIN * checkpoints * takes_s) + _STEP_S)


def batch_script(
    spec: RunSpec,
    site: Site,
    *,
    gpus: int,
    run: Path,
    attempt: int,
    python: str,
    architecture: str = "",
    warning_s: int = 0,
) -> str:
    """Return the batch script of an attempt.

    Args:
        spec: What is trained, with the partition to run on.
        site: The profile of the site.
        gpus: GPUs that the plan uses; 0 to train on the CPU.
        run: The run directory.
        attempt: The attempt's number.
        python: The interpreter of the nodes.
        architecture: What it is built for; empty if unknown.
        warning_s: How long before its end the job is warned (see ``warning_lead_s``); if 0, the profile's time.

    Raises:
        InputError: With the codes of this module.
    """
    warning_s = warning_s or site.warning_s
    if problems := (*_problems(spec, site, warning_s), *_path_problems(run)):
        raise InputError(problems)
    # One supervisor a node. One that ends with an error must not end the others, which have to say why.
    tasks = (f"--nodes={spec.nodes}", f"--ntasks={spec.nodes}", "--ntasks-per-node=1")
    step = ("srun", *tasks, "--cpu-bind=none", "--kill-on-bad-exit=0", *site.step_options)
    interpreter = (python, "-P")
    check = shlex.join((*step, *interpreter, "-m", "so_tui.machine.interpreter", str(gpus)))
    supervise = f'-m so_tui supervise "$so_tui_run" --attempt {attempt} --in-job'
    return "\n".join(
        (
            "#!/bin/bash",
            f"#SBATCH --job-name={_job_name(run.name)}",
            *(f"#SBATCH {option}" for option in _options(spec, site, gpus, warning_s)),
            "",
            f"# Attempt {attempt} of the run {spec.name}, written by so-tui for {site.title}.",
            *(
                f"export {name}={shlex.quote(value)}"
                for name, value in sorted(_environment(spec, site).items())
            ),
            *site.setup,
            *_architecture_check(architecture, python),
            f"{check} || {{ echo {shlex.quote(_REMEDY)} >&2; exit 69; }}",
            f"so_tui_run={shlex.quote(str(run))}",
            f"exec {shlex.join((*step, *interpreter))} {supervise}",
            "",
        )
    )


def _architecture_check(architecture: str, interpreter: str) -> Iterator[str]:
    """Yield the line that ends a job whose node could not execute its interpreter, which the shell would only call a wrong format."""
    if architecture:
        message = f"so-tui: {interpreter} is built for {architecture}, and this node is "
        fails = f'echo {shlex.quote(message)}"$(uname -m)" >&2; echo {shlex.quote(_REMEDY)} >&2; exit 69'
        yield f'[ "$(uname -m)" = {architecture} ] || {{ {fails}; }}'


def for_run(script: str, generated: str) -> str:
    """Return a user's script for the run that a generated script is for; it may have been made for another one.

    The job is named after the new run, too, unless the user has named it.

    Raises:
        InputError: It names no run (code ``script-without-run``).
    """
    named, other = _RUN.search(generated), _RUN.search(script)
    if named is None or other is None:
        message, remedy = (
            "has no line `so_tui_run=...`, which names the run directory",
            "Keep it, and what uses it, as --edit shows them.",
        )
        raise InputError(
            [
                Problem(
                    code="script-without-run",
                    field="--script",
                    value="",
                    message=message,
                    remedy=remedy,
                )
            ]
        )
    moved = _RUN.sub(lambda _: named[0], script, count=1)
    return moved.replace(_name_option(other), _name_option(named), 1)


def _name_option(run_line: re.Match[str]) -> str:
    """Return the line that names the job after the run that a script's line names."""
    return f"#SBATCH --job-name={_job_name(run_line[1].strip(_QUOTES).rpartition('/')[2])}\n"


def _job_name(run_name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", run_name)


def _environment(spec: RunSpec, site: Site) -> dict[str, str]:
    """Return a job's variables; those of the profile win. Without internet, every look-up on the hub would wait for half a minute."""
    several = {
        EXPECTED_VARIABLE: site.network,
        "GLOO_SOCKET_IFNAME": site.interface,
        "NCCL_SOCKET_IFNAME": site.interface,
    }
    found = {name: value for name, value in several.items() if value} if spec.nodes > 1 else {}
    return found | ({} if site.internet else {"HF_HUB_OFFLINE": "1"}) | site.environment


def requeues(spec: RunSpec, site: Site) -> bool:
    """Return whether Slurm may start a job of this spec again. Otherwise a successor is submitted."""
    return site.requeue and spec.slurm.continues


def time_limit_of(spec: RunSpec, site: Site) -> str:
    """Return the time limit that a job asks for; empty for the partition's own."""
    partition = site.partitions.get(spec.slurm.partition)
    return spec.slurm.time_limit or (partition.time_limit if partition else "")


def seconds_of(time_limit: str) -> int:
    """Return a time limit in seconds, in any of the forms that Slurm takes: ``90``, ``90:00``, ``1:30:00``, ``1-12``, ``1-12:30:00``."""
    days, dash, rest = time_limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:  # hours first
        parts += [0] * (3 - len(parts))
    elif len(parts) < 3:  # minutes first
        parts = [0, *parts, *([0] if len(parts) == 1 else [])]
    hours, minutes, seconds = parts
    return int(days or 0) * 86_400 + hours * 3600 + minutes * 60 + seconds


def _problems(spec: RunSpec, site: Site, warning_s: int) -> Iterator[Problem]:
    if site.account_required and not spec.slurm.account:
        remedy = "Give it with --account NAME, or in a preset of yours."
        yield Problem(
            code="account-missing",
            field="slurm.account",
            value="",
            message=f"{site.title} charges an account",
            remedy=remedy,
        )
    time_limit = time_limit_of(spec, site)
    if time_limit and seconds_of(time_limit) < 2 * warning_s + _EARLY_S:
        message = f"the job saves its checkpoint {duration(warning_s + _EARLY_S)} before the end, which leaves too little time to train"
        remedy = f"Ask for at least {duration(2 * warning_s + _EARLY_S)}, or lower warning_s in the site profile."
        yield Problem(
            code="time-limit-too-short",
            field="slurm.time_limit",
            value=time_limit,
            message=message,
            remedy=remedy,
        )
    for option in spec.slurm.options:
        name = option.partition("=")[0]
        if name in site.refused_options:
            message, remedy = f"{site.title} refuses {name}", "Leave it out."
            yield Problem(
                code="option-refused",
                field="slurm.options",
                value=option,
                message=message,
                remedy=remedy,
            )
        elif any(reserved.startswith(name) for reserved in _RESERVED):  # Slurm takes abbreviations
            remedy = "Leave it out; partition, account, qos, time_limit and constraint have keys of their own."
            yield Problem(
                code="option-reserved",
                field="slurm.options",
                value=option,
                message="so-tui sets this option",
                remedy=remedy,
            )


def _path_problems(run: Path) -> Iterator[Problem]:
    # Slurm replaces %j and the like in the whole path of a job's output, its folder included.
    if any(character in str(run) for character in "%\\\n"):
        message, remedy = (
            "Slurm cannot write into a folder with %, \\ or a line end in its path",
            "Choose another folder with --runs-dir.",
        )
        yield Problem(
            code="path-unfit-for-slurm",
            field="--runs-dir",
            value=str(run.parent),
            message=message,
            remedy=remedy,
        )


def _options(spec: RunSpec, site: Site, gpus: int, warning_s: int) -> Iterator[str]:
    slurm = spec.slurm
    yield f"--partition={slurm.partition}"
    yield from (
        f"--{name}={value}"
        for name, value in (("account", slurm.account), ("qos", slurm.qos))
        if value
    )
    if time_limit := time_limit_of(spec, site):
        yield f"--time={time_limit}"
    if slurm.constraint:
        yield f'--constraint="{slurm.constraint}"'
    yield f"--nodes={spec.nodes}"
    yield "--ntasks-per-node=1"
    if gpus and site.gpu_option:
        yield site.gpu_option.replace("{gpus}", str(gpus))
    if site.node_option:
        yield site.node_option
    share = max(1, gpus)
    if site.cores_per_gpu:
        yield f"--cpus-per-task={share * site.cores_per_gpu}"
    if site.memory_per_gpu_gib:
        yield f"--mem={share * site.memory_per_gpu_gib}G"
    # To the processes of the step, not to this script: the supervisor and the ranks handle it, and srun does not see it.
    yield f"--signal={CONTINUE_SIGNAL}@{warning_s}"
    yield "--requeue" if requeues(spec, site) else "--no-requeue"
    yield f"--output={OUTPUT}"
    yield "--open-mode=append"
    yield from (*site.options, *slurm.options)
