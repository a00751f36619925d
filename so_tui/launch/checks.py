"""What is looked at before anything starts, so that a run fails in the first second and not after the model is loaded."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

from so_tui.launch import locks
from so_tui.launch.helpers import INSTALL_TRAINING, call_tool, problem_of
from so_tui.launch.preparation import prepare, visible_machine
from so_tui.launch.sources import missing_paths, with_absolute_paths
from so_tui.machine.doctor import findings
from so_tui.machine.doctor.software import has_adam_kernel
from so_tui.machine.system_files import SystemFiles
from so_tui.machine.types import Machine
from so_tui.plan.types import Plan
from so_tui.runs.listing import default_runs_dir
from so_tui.spec import InputError, Problem, Refused, RunSpec, resolve_source, spec_tree
from so_tui.units import disk_size

_CHECK_TIMEOUT_S = 180.0


def preflight(spec: RunSpec, machine: Machine, *, force: bool = False, runs_dir: Path | str | None = None) -> tuple[str, ...]:
    """Everything that can be known before the start. Returns warnings.

    Raises InputError (data file missing or with wrong columns, model gated or absent, no token, ...) or Refused (does not fit, training
    software missing, GPU in use by another run, disk too small). The checks of model, tokenizer and data run in a helper process.
    """
    spec = with_absolute_paths(spec)
    machine = visible_machine(machine, os.environ)
    plan = prepare(spec, machine, force=force).plan
    warnings = quick_checks(plan, machine, force=force, runs_dir=runs_dir)
    if not force:
        _refuse_what_doctor_blocks(plan, machine)
    answer = call_tool("check_inputs", {"spec": spec_tree(spec)}, timeout_s=_CHECK_TIMEOUT_S)
    if problems := [problem_of(entry) for entry in answer.get("problems", [])]:
        raise InputError(problems)
    return (*plan.warning_texts, *warnings, *(str(warning) for warning in answer.get("warnings", [])))


def missing_inputs(spec: RunSpec) -> tuple[Problem, ...]:
    """Files and folders that the spec names and that are not on this machine; built-in ones that do not exist."""
    problems = list(missing_paths(spec))
    sources = tuple(part.source for part in spec.data.sources)
    for text in (spec.model.id, spec.model.tokenizer, spec.data.evaluation, *sources):
        try:
            resolve_source(text)
        except InputError as error:
            problems += error.problems
    return tuple(problems)


def quick_checks(
    plan: Plan, machine: Machine, *, force: bool = False, resuming: bool = False, runs_dir: Path | str | None = None
) -> tuple[str, ...]:
    """The checks that take no time and need no training software. Raises InputError or Refused; returns warnings."""
    _refuse_missing_software(machine)
    _refuse_missing_tracker(plan.spec)
    _refuse_missing_inputs(plan.spec)
    _refuse_taken_gpus(plan, machine)
    if not force:
        _refuse_missing_compiler(plan, machine)
        _refuse_small_places(plan, resuming=resuming, runs_dir=Path(runs_dir) if runs_dir else default_runs_dir())
    return _foreign_users(plan, machine)


def writable(wanted: Path, field: str) -> Path:
    """The folder or its nearest parent that exists. Raises InputError, naming the field, when nothing can be written there."""
    path = wanted.expanduser().absolute()
    folder = next(folder for folder in (path, *path.parents) if folder.exists())
    # A file system without any space (/proc, /sys) is none to write to, whatever the permissions say.
    if not folder.is_dir() or not os.access(folder, os.W_OK) or shutil.disk_usage(folder).total == 0:
        problem = Problem(
            field=field, value=str(wanted), message=f"{folder} cannot be written", remedy="Make it writable, or choose another folder"
        )
        raise InputError([problem])
    return folder


def _refuse_missing_software(machine: Machine) -> None:
    software = machine.software
    reasons = [
        f"{name} is not installed here. {INSTALL_TRAINING}"
        for name, version in (("torch", software.torch), ("deepspeed", software.deepspeed), ("transformers", software.transformers))
        if version is None
    ]
    if machine.gpus and software.torch and software.torch_cuda is None:
        reasons.append(
            f"torch {software.torch} is a build without CUDA, and {machine.label} has {len(machine.gpus)} GPUs. "
            "Install a CUDA build of torch (see the README for Grace Hopper)"
        )
    if reasons:
        raise Refused(reasons)


def _refuse_missing_tracker(spec: RunSpec) -> None:
    if spec.tracking.wandb and find_spec("wandb") is None:
        raise Refused(["tracking.wandb needs the wandb package. pip install 'so-tui[wandb]', or set tracking.wandb to false"])


def _refuse_what_doctor_blocks(plan: Plan, machine: Machine) -> None:
    """Raises Refused, forceable: the rest of what would end the run, such as a driver too old or a GPU that no process may use."""
    blocked = [finding for finding in findings(machine, plan) if finding.severity == "blocks"]
    if blocked:
        raise Refused([f"{finding.title} ({finding.evidence}). {finding.remedy}" for finding in blocked], forceable=True)


def _refuse_missing_compiler(plan: Plan, machine: Machine) -> None:
    """Raises Refused, forceable: a kernel may have been compiled elsewhere."""
    if plan.mode != "gpu" and machine.software.compiler is None and not has_adam_kernel(SystemFiles(), os.environ):
        raise Refused(
            ["CPU Adam is compiled at the first run, and there is no C++ compiler here. Install g++ (or set CXX)"], forceable=True
        )


def _refuse_missing_inputs(spec: RunSpec) -> None:
    if problems := missing_inputs(spec):
        raise InputError(problems)


def _refuse_taken_gpus(plan: Plan, machine: Machine) -> None:
    """Raises Refused when another run of this user holds one of the GPUs. The supervisor takes them; this is the early look."""
    chosen = {rank.gpu for rank in plan.binding}
    gpus = [gpu for gpu in machine.gpus if gpu.index in chosen]
    if not gpus:
        return
    folder = locks.lock_folder()
    taken = []
    for gpu in gpus:
        try:
            for lock in locks.take_gpus(folder, [gpu], locks.Holder(run="", pid=os.getpid())):
                lock.release()
        except locks.LockTakenError as error:
            taken.append(f"{error}. Wait for it, stop it, or choose other GPUs with gpus = [...]")
    if taken:
        raise Refused(taken)


def _refuse_small_places(plan: Plan, *, resuming: bool, runs_dir: Path) -> None:
    """Raises Refused when the checkpoints or the shared memory of the plan have no room now."""
    reasons = []
    field = "checkpoint.folder" if plan.spec.checkpoint.folder else "--runs-dir"
    folder = writable(Path(plan.spec.checkpoint.folder or runs_dir), field)
    # A resumed run has its old checkpoints already.
    copies = min(1, plan.spec.checkpoint.most_at_once) if resuming else plan.spec.checkpoint.most_at_once
    needed_bytes, free_bytes = copies * plan.disk_bytes, shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        reasons.append(
            f"{copies} checkpoint{'s' if copies > 1 else ''} of {disk_size(plan.disk_bytes)} need{'' if copies > 1 else 's'} "
            f"{disk_size(needed_bytes)}, and {folder} "
            f"has {disk_size(free_bytes)} free. Free space, set checkpoint.folder, or lower checkpoint.keep"
        )
    shm = Path("/dev/shm")
    if plan.shm_bytes and shm.is_dir() and plan.shm_bytes > (free := shutil.disk_usage(shm).free):
        reasons.append(
            f"/dev/shm has {disk_size(free)} free, and {disk_size(plan.shm_bytes)} are needed. Remount it larger (in Docker: --shm-size), "
            "or use offload.engine = so-tui"
        )
    if reasons:
        raise Refused(reasons, forceable=True)


def _foreign_users(plan: Plan, machine: Machine) -> tuple[str, ...]:
    chosen = {rank.gpu for rank in plan.binding}
    users = locks.foreign_processes(gpu for gpu in machine.gpus if gpu.index in chosen)
    return tuple(f"GPU {index} is used by other processes: pid {', '.join(map(str, pids))}" for index, pids in users.items())
