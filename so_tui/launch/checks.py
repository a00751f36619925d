"""Checks before a start, so that a run fails in the first second and not after the model is
loaded.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from so_tui.doctor import findings
from so_tui.doctor.software import has_adam_kernel
from so_tui.folders import default_runs_dir
from so_tui.launch.executors import executor_of
from so_tui.launch.helper import call_tool
from so_tui.launch.places import left_out_profiles
from so_tui.launch.supervisor import host_check
from so_tui.launch.supervisor.samples import GpuSampler
from so_tui.machine.software import INSTALL_TRAINING
from so_tui.machine.system_files import SystemFiles
from so_tui.machine.types import Machine
from so_tui.plan.notes import OneCheckpointKept
from so_tui.plan.plan import Launch, Plan
from so_tui.runs.directory import RunDirectory, checkpoint_folders, checkpoints_folder
from so_tui.spec import (
    InputError,
    ModelSpec,
    Problem,
    Refusal,
    Refused,
    RunSpec,
    resolve_source,
    spec_tree,
)
from so_tui.spec.check import exists
from so_tui.spec.consents import NOT_TRUSTED, consents, source_name
from so_tui.spec.errors import refuse, reject
from so_tui.spec.presets import missing_paths
from so_tui.trust.files import NotOwnError
from so_tui.trust.folders import open_folder
from so_tui.trust.text import so_tui_command
from so_tui.units import disk_size, memory_size

_RECORDS_BYTES = 32 * 10**6
"""A disk with less is full: a run could not even write its records and logs for long."""
Check = Literal["files", "machine", "inputs"]
"""A part of ``preflight``: files, software, free space and GPUs; what doctor finds; model,
tokenizer and data in a helper process.
"""
CHECKS: dict[Check, str] = {
    "files": "files, software, disk, GPUs",
    "machine": "problems of this machine",
    "inputs": "model, tokenizer, data",
}
"""What each is called where it is shown."""


def preflight(
    launch: Launch,
    *,
    runs_dir: Path | None = None,
    begins: Callable[[Check], object] = lambda _: None,
) -> tuple[Launch, tuple[str, ...]]:
    """Check everything that can be known before the start. Return the launch with how long that
    took, and with as many checkpoints as fit on the disk, and warnings.

    Model, tokenizer and data need a helper process. Of a run that starts elsewhere, only files and
    disk are checked: this host may lack the training packages.

    Args:
        launch: What is to be started.
        runs_dir: Folder of the runs; the default folder if absent.
        begins: Is told of each check as it begins.

    Raises:
        InputError: A data file is missing or has the wrong columns, the model is gated or absent,
            there is no token ...
        Refused: As for ``quick_checks``, or because doctor finds a blocking problem (code
            ``doctor-blocks``, forceable).
    """
    began = time.monotonic()
    begins("files")
    if not executor_of(launch.spec).here:
        checks_elsewhere(launch, runs_dir=runs_dir)
        warnings = tuple(f"left out: {problem}" for problem in left_out_profiles(launch.spec.slurm))
    else:
        launch = keeping_what_fits(launch, runs_dir=runs_dir)
        warnings = quick_checks(launch, runs_dir=runs_dir)
        if not launch.forced:
            begins("machine")
            # What else would end the run, such as an old driver or a GPU that no process may use.
            blocking = (
                Refusal("doctor-blocks", f"{found.title} ({found.evidence}). {found.remedy}")
                for found in findings(launch.machine, launch.plan)
                if found.severity == "blocks"
            )
            _refuse(blocking, forceable=True)
        begins("inputs")
        request = {"spec": spec_tree(launch.spec)}
        answer = call_tool("check_inputs", request, timeout_s=180.0)
        warnings += tuple(answer["warnings"])
    launch = replace(launch, checks_s=time.monotonic() - began)
    return launch, (*launch.plan.warning_texts, *warnings)


def missing_inputs(spec: RunSpec) -> tuple[Problem, ...]:
    """Return a problem for each file or folder of the spec that is not on this machine, and each
    built-in one that does not exist.
    """
    problems = list(missing_paths(spec))
    for text in (
        spec.model.id,
        spec.model.tokenizer,
        spec.data.evaluation,
        *(part.source for part in spec.data.sources),
    ):
        try:
            resolve_source(text)
        except InputError as error:
            problems += error.problems
    return tuple(problems)


def quick_checks(
    launch: Launch, *, saved: int = 0, runs_dir: Path | None = None
) -> tuple[str, ...]:
    """Run the checks that take no time and need no training software, and return warnings.

    Args:
        launch: What is to start.
        saved: Checkpoints of the run that are on the disk already.
        runs_dir: Folder of runs; of a run that is resumed, its own.

    Raises:
        InputError: A file is missing (``path-not-found``) or a folder cannot be written
            (``not-writable``).
        Refused: With the codes ``several-nodes-here``, ``software-missing``,
            ``torch-without-cuda``, ``torch-without-rocm``, ``tracker-missing``, ``gpu-in-use``;
            forceable: ``compiler-missing``, ``disk-too-small``, ``shared-memory-too-small``.
    """
    plan = launch.plan
    if plan.spec.nodes > 1:
        raise refuse(
            "several-nodes-here",
            f"nodes = {plan.spec.nodes}, and a run on this machine has one. Name a Slurm partition "
            "with --partition, or set nodes to 1",
        )
    _refuse(_missing_software(launch.machine))
    if plan.spec.tracking.wandb and find_spec("wandb") is None:
        raise refuse(
            "tracker-missing",
            "tracking.wandb needs the wandb package. Install it (`pip install wandb`), or set "
            "tracking.wandb to false",
        )
    if problems := missing_inputs(plan.spec):
        raise InputError(problems)
    _refuse(_gpus_in_use(launch))
    if not launch.forced:
        _refuse_missing_compiler(launch)
    refuse_full_disk(launch, saved=saved, runs_dir=runs_dir)
    if not launch.forced:
        _refuse(_lacking_shared_memory(plan), forceable=True)
    return _other_users(launch)


def checks_elsewhere(launch: Launch, *, saved: int = 0, runs_dir: Path | None = None) -> None:
    """Run the checks that this host can make of a run that starts on another: files and disk, which
    both share.

    Raises:
        InputError: A file is missing (``path-not-found``), a folder cannot be written
            (``not-writable``), a model or data set is not in the cache and cannot be downloaded
            there (``not-cached``), the interpreter is of another architecture
            (``foreign-interpreter``), or the model's code is not allowed (``code-not-trusted``).
        Refused: With the code ``disk-too-small``, forceable.
    """
    if problems := missing_inputs(launch.spec) or executor_of(launch.spec).unavailable(launch):
        raise InputError(problems)
    _refuse_code_unheard_of(launch.spec.model)
    refuse_full_disk(launch, saved=saved, runs_dir=runs_dir)


def _refuse_code_unheard_of(model: ModelSpec) -> None:
    """Refuse a job if the user has allowed no code of its model yet: nobody can be asked in the
    job. Only a helper process could tell whether the code has changed since.
    """
    source = resolve_source(model.id)
    if model.trust_remote_code and all(known.source != source for known in consents()):
        name = source if source.startswith("/") else source_name(source, model.revision)
        raise reject(
            NOT_TRUSTED,
            "model.id",
            name,
            "may come with Python code, and you have not allowed any of it to run",
            f"Read it, and allow it before the job is submitted: {so_tui_command('trust', name)}",
        )


def writable(wanted: Path, field: str) -> Path:
    """Return the folder, or its nearest parent that exists.

    Raises:
        InputError: Nothing can be written there (code ``not-writable``), or another user's link
            leads to a folder of this user (``link-of-others``); it names ``field``.
    """
    path = wanted.expanduser().absolute()
    folder = next(folder for folder in (path, *path.parents) if exists(folder))
    # A file system without any space (/proc, /sys) cannot be written, whatever its permissions are.
    if (
        not folder.is_dir()
        or not os.access(folder, os.W_OK)
        or shutil.disk_usage(folder).total == 0
    ):
        raise reject(
            "not-writable",
            field,
            str(wanted),
            f"{folder} cannot be written",
            "Make it writable, or choose another folder.",
        )
    try:
        open_folder(folder).__exit__()
    except NotOwnError as error:
        if folder.stat().st_uid == os.geteuid():
            raise reject(
                "link-of-others",
                field,
                str(wanted),
                f"{error.path} is another user's link and leads to a folder of yours",
                f"Name the folder itself: {folder.resolve()}.",
            ) from error
    return folder


def _refuse(found: Iterable[Refusal], *, forceable: bool = False) -> None:
    """Raise Refused if there is a refusal."""
    if refusals := [*found]:
        raise Refused(refusals, forceable=forceable)


def _missing_software(machine: Machine) -> Iterator[Refusal]:
    software = machine.software
    for name in ("torch", "deepspeed", "transformers"):
        if getattr(software, name) is None:
            yield Refusal("software-missing", f"{name} is not installed here. {INSTALL_TRAINING}")
    if any(gpu.vendor == "amd" for gpu in machine.gpus):
        if software.torch and software.torch_rocm is None:
            yield Refusal(
                "torch-without-rocm",
                f"torch {software.torch} is a build without ROCm, which the GPUs of "
                f"{machine.label} need. Install one from pytorch.org",
            )
    elif machine.gpus and software.torch and software.torch_cuda is None:
        yield Refusal(
            "torch-without-cuda",
            f"torch {software.torch} is a build without CUDA, and {machine.label} has "
            f"{len(machine.gpus)} GPUs. Install a CUDA build of torch (see the README for Grace "
            "Hopper)",
        )


def _refuse_missing_compiler(launch: Launch) -> None:
    """Refuse, forceable because a kernel may have been compiled elsewhere."""
    if (
        launch.plan.mode != "gpu"
        and launch.machine.software.compiler is None
        and not has_adam_kernel(SystemFiles(), os.environ)
    ):
        raise refuse(
            "compiler-missing",
            "The first run compiles CPU Adam, and there is no C++ compiler here. Install g++ (or "
            "set CXX)",
            forceable=True,
        )


def _gpus_in_use(launch: Launch) -> Iterator[Refusal]:
    """Yield the GPUs that another run of this user holds. This is only an early check: the
    supervisor takes them.
    """
    for gpu in host_check.chosen_gpus(launch):
        try:
            for lock in host_check.take_gpus([gpu], ""):
                lock.release()
        except host_check.LockTakenError as error:
            yield Refusal(
                "gpu-in-use",
                f"{error}. Wait for it, stop it, or choose other GPUs with gpus = [...]",
            )


def keeping_what_fits(launch: Launch, *, saved: int = 0, runs_dir: Path | None = None) -> Launch:
    """Return the launch with one checkpoint kept, and a warning in its plan, where the disk has no
    room for more while the next one is written. A person's own number stays.

    Args:
        launch: What is to start.
        saved: Checkpoints of the run that are on the disk already.
        runs_dir: Folder of runs; of a run that is resumed, its own.

    Raises:
        InputError: The folder of checkpoints cannot be written (``not-writable``).
    """
    plan, keep = launch.plan, launch.spec.checkpoint.keep
    if keep == 1 or not plan.spec.checkpoint.repeats or plan.spec.fixes("checkpoint.keep"):
        return launch
    folder, free_bytes = _disk_of_checkpoints(plan, runs_dir)
    needed_bytes = _new_checkpoints(plan, keep, saved) * plan.disk_bytes
    if not _new_checkpoints(plan, 1, saved) * plan.disk_bytes <= free_bytes < needed_bytes:
        return launch
    warning = OneCheckpointKept(
        folder=str(folder), free_bytes=free_bytes, needed_bytes=needed_bytes, kept=keep
    )
    plan = replace(
        plan,
        spec=plan.spec.changed("checkpoint", keep=1),
        disk_peak_bytes=2 * plan.disk_bytes,
        warnings=(*plan.warnings, warning),
    )
    return replace(launch, plan=plan)


def saved_checkpoints(run: RunDirectory, launch: Launch) -> int:
    """Return how many checkpoints a run has that the launch continues from."""
    folder = checkpoints_folder(run, launch.spec)
    return 0 if launch.start_over else len(checkpoint_folders(folder))


def refuse_full_disk(launch: Launch, *, saved: int = 0, runs_dir: Path | None = None) -> None:
    """Refuse a launch, unless it is forced, whose records or checkpoints do not fit on the disk
    even if one checkpoint is kept. Arguments and errors as of ``keeping_what_fits``.

    Raises:
        Refused: With the code ``disk-too-small``, forceable.
    """
    if not launch.forced:
        launch = keeping_what_fits(launch, saved=saved, runs_dir=runs_dir)
        _refuse(_lacking_disk(launch.plan, saved, runs_dir), forceable=True)


def _disk_of_checkpoints(plan: Plan, runs_dir: Path | None) -> tuple[Path, int]:
    """Return the folder of the checkpoints, or its nearest parent that exists, and its free
    bytes.
    """
    field = "checkpoint.folder" if plan.spec.checkpoint.folder else "--runs-dir"
    folder = writable(Path(plan.spec.checkpoint.folder or runs_dir or default_runs_dir()), field)
    return folder, shutil.disk_usage(folder).free


def _new_checkpoints(plan: Plan, keep: int, saved: int) -> int:
    """Return how many checkpoints need room: those of a resumed run have theirs, and a new one is
    written before one is removed.
    """
    most = replace(plan.spec.checkpoint, keep=keep).most_at_once
    return max(min(1, most), most - saved)


def _disk_remedy(plan: Plan, saved: int, free_bytes: int) -> str:
    """Say what makes the checkpoints fit."""
    checkpoint = plan.spec.checkpoint
    ways = ["Free space"]
    if not saved:  # a run stays in the folder where its checkpoints are
        ways.append("set checkpoint.folder to a larger disk")
    one_fits = checkpoint.repeats and plan.disk_bytes <= free_bytes
    fewer = min(checkpoint.keep, free_bytes // max(1, plan.disk_bytes) + saved) - 1
    if one_fits and fewer > 0:
        ways.append(f"set checkpoint.keep={fewer}")
    if one_fits and checkpoint.saves_at_end:
        keys = [key for key in ("every_minutes", "every_steps") if getattr(checkpoint, key)]
        zeros = " and ".join(f"checkpoint.{key}=0" for key in keys)
        ways.append(f"save only at the end with {zeros}")
    return " or ".join(filter(None, (", ".join(ways[:-1]), ways[-1])))


def _lacking_disk(plan: Plan, saved: int, runs_dir: Path | None) -> Iterator[Refusal]:
    """Yield where the plan's records or checkpoints do not fit now."""
    runs_dir = runs_dir or default_runs_dir()
    free_bytes = shutil.disk_usage(writable(runs_dir, "--runs-dir")).free
    if free_bytes < _RECORDS_BYTES:
        yield Refusal(
            "disk-too-small",
            f"Records and logs of a run need {disk_size(_RECORDS_BYTES)}, and {runs_dir} has "
            f"{disk_size(free_bytes)} free. Free space there, or choose another folder with "
            "--runs-dir",
        )
    folder, free_bytes = _disk_of_checkpoints(plan, runs_dir)
    copies = _new_checkpoints(plan, plan.spec.checkpoint.keep, saved)
    needed_bytes = copies * plan.disk_bytes
    if needed_bytes > free_bytes:
        noun = (
            f"1 checkpoint of {disk_size(plan.disk_bytes)} needs"
            if copies == 1
            else f"{copies} checkpoints of {disk_size(plan.disk_bytes)} need"
        )
        yield Refusal(
            "disk-too-small",
            f"{noun} {disk_size(needed_bytes)}, and {folder} has {disk_size(free_bytes)} free. "
            f"{_disk_remedy(plan, saved, free_bytes)}",
        )


def _lacking_shared_memory(plan: Plan) -> Iterator[Refusal]:
    """Yield that the plan's shared memory does not fit now."""
    shm = Path("/dev/shm")
    if plan.shm_bytes and shm.is_dir() and plan.shm_bytes > (free := shutil.disk_usage(shm).free):
        yield Refusal(
            "shared-memory-too-small",
            f"/dev/shm has {memory_size(free)} free, and the run needs "
            f"{memory_size(plan.shm_bytes)}. Remount it larger (in Docker: --shm-size), or use "
            "offload.engine = so-tui",
        )


def _other_users(launch: Launch) -> tuple[str, ...]:
    gpus = host_check.chosen_gpus(launch)
    with contextlib.closing(GpuSampler(gpus)) as sampler:
        uses = sampler.processes()
    return tuple(
        f"GPU {gpu.index} is used by other processes: pid {', '.join(pids)}"
        for gpu in gpus
        if (pids := [str(pid) for pid, use in uses.items() if gpu.index in use])
    )
