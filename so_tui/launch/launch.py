"""From a spec and a machine to a launch: everything that a start needs, made once and without side
effects.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from so_tui.launch import command
from so_tui.machine.gpus import hiding_variable, visible_gpus
from so_tui.machine.types import Machine
from so_tui.plan.plan import Launch, Plan
from so_tui.runs.directory import (
    LAUNCH_VARIABLE,
    RunDirectory,
    launch_digest,
    missing_checkpoints,
    own_launch,
    own_run,
    write_run_file,
    write_run_json,
)
from so_tui.runs.lock import ended_state
from so_tui.runs.reader import last_lines
from so_tui.runs.records import OutcomeCode
from so_tui.runs.state import read_spec
from so_tui.spec import (
    InputError,
    Problem,
    Refusal,
    Refused,
    RunSpec,
    SoTuiError,
    field_index,
    parse_value,
    with_values,
)
from so_tui.spec.errors import refuse, reject
from so_tui.spec.presets import with_absolute_paths
from so_tui.spec.run_spec import MACHINE_DECIDES
from so_tui.trust.decoding import LARGEST_FILE_BYTES, Tree, decode_json
from so_tui.trust.files import read_bounded, read_own
from so_tui.trust.text import quoted, so_tui_command
from so_tui.units import thousands

_LOG = logging.getLogger(__name__)

# ``launch.json``: the launch from which supervisor and trainer start, written once, and
# ``ds_config.json`` for people and tools.


def write_launch(run: RunDirectory, attempt: int, launch: Launch, node: int = 0) -> str:
    """Write the launch of a node, and return its hash. Raises OSError."""
    if node == 0:
        write_run_json(run, run.ds_config_path(attempt), launch.ds_config, indented=True)
    content = msgspec.json.format(msgspec.json.encode(launch), indent=1)
    write_run_file(run, run.launch_path(attempt, node), content)
    return launch_digest(run, content)


def read_launch(
    run: RunDirectory, attempt: int, digest: str | None = None, *, node: int = 0, own: bool = True
) -> Launch:
    """Read the launch of an attempt.

    Args:
        run: The run.
        attempt: The attempt.
        digest: The hash that it must have, if it is known.
        node: The node for which it was written.
        own: Accept only files of this user that others cannot write: what they say will be
            executed.

    Raises:
        InputError: It has another hash (code ``launch-exchanged``).
        NotOwnError: A file is not this user's own.
        OSError: A file is missing or cannot be read.
        msgspec.DecodeError: A file is damaged.
    """
    read = read_own if own else partial(read_bounded, limit_bytes=LARGEST_FILE_BYTES)
    path = run.launch_path(attempt, node)
    content = own_launch(run, attempt, node, digest) if own else read(path)
    try:
        return decode_json(content, Launch)
    except msgspec.ValidationError:
        record = decode_json(content, Tree)
        if record.get("v") != 1:
            raise
    # Until 0.1.0 plan, machine and DeepSpeed's config had files of their own. A job replaced the
    # machine it was submitted for.
    files = {
        "plan": run.plan_path(attempt),
        "ds_config": run.ds_config_path(attempt),
        "machine": max(
            run.attempt_dir(attempt).glob("machine.*.json"),
            key=lambda path: path.stat().st_mtime,
            default=run.attempt_dir(attempt) / "machine.json",
        ),
    }
    parts = {name: decode_json(read(path), Tree) for name, path in files.items()}
    return decode_json(msgspec.json.encode(record | parts), Launch)


# What starts supervisors, and what it knows of their jobs, in Slurm's words.


OUTPUT = "slurm.%j.log"
"""What the job writes outside its supervisor, in the attempt's folder; Slurm's own messages are in
it.
"""
FORGOTTEN = "FORGOTTEN"
"""The state of a job of which Slurm knows nothing any more."""
JobPhase = Literal["queued", "running", "completing", "ended", "unknown"]
_ENDS: dict[str, OutcomeCode | None] = {
    "COMPLETED": None,
    "TIMEOUT": OutcomeCode.OUT_OF_TIME,
    "DEADLINE": OutcomeCode.OUT_OF_TIME,
    "NODE_FAIL": OutcomeCode.NODE_FAILED,
    "BOOT_FAIL": OutcomeCode.NODE_FAILED,
    "PREEMPTED": OutcomeCode.PREEMPTED,
    "CANCELLED": OutcomeCode.JOB_CANCELLED,
    "OUT_OF_MEMORY": OutcomeCode.KILLED_FOR_MEMORY,
    "FAILED": OutcomeCode.JOB_FAILED,
    FORGOTTEN: OutcomeCode.JOB_FORGOTTEN,
}
_PHASES: dict[str, JobPhase] = {
    **dict.fromkeys(
        ("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT"), "running"
    ),
    **dict.fromkeys(
        (
            "PENDING",
            "CONFIGURING",
            "REQUEUED",
            "REQUEUE_HOLD",
            "REQUEUE_FED",
            "SPECIAL_EXIT",
            "RESV_DEL_HOLD",
        ),
        "queued",
    ),
    "COMPLETING": "completing",
    **dict.fromkeys(_ENDS, "ended"),
}
"""States of jobs that have ended, and why. In any other, one of a newer Slurm too, a job may still
run.
"""


class Job(Struct, frozen=True, kw_only=True):
    """A job as ``squeue`` or ``sacct`` lists it."""

    id: str
    state: str
    """``PENDING``, ``RUNNING``, ``NODE_FAIL`` ..."""
    reason: str = ""
    start: float | None = None
    """When it started, or is expected to, in seconds since the epoch. Like the reason, it means
    something only while the job is queued.
    """
    nodes: str = ""
    folder: str = ""
    """Its working folder."""

    @property
    def phase(self) -> JobPhase:
        """Where it is; unknown if Slurm did not answer, or has not been asked since it was
        submitted.
        """
        return _PHASES.get(self.state, "unknown")

    @property
    def end(self) -> OutcomeCode | None:
        """How Slurm ended it, or that it failed by itself; None where only the run directory can
        say.
        """
        return _ENDS.get(self.state)

    @property
    def output(self) -> str:
        """The last lines that it wrote if it ended before its supervisor had started."""
        path = Path(self.folder) / OUTPUT.replace("%j", self.id)
        return last_lines(path) if self.state == "FAILED" else ""


class Executor:
    """Starts supervisors on this machine. One of a scheduler submits them, and knows what becomes
    of them until they write the run's state.
    """

    here = True
    """Whether runs start on this machine, so that what can be seen here decides whether they can.
    """

    def start(
        self, run: RunDirectory, attempt: int, digest: str = ""
    ) -> subprocess.Popen[bytes] | None:
        """Start the supervisor of an attempt so that it outlives this program, its terminal and its
        session.

        Args:
            run: The run.
            attempt: An attempt whose files are written.
            digest: The hash of its launch. Without it the supervisor can attach, and start nothing.

        Returns:
            The supervisor; None if it starts later and the run's state says ``queued``.

        Raises:
            OSError: It cannot be started.
            SoTuiError: A scheduler refused it; nothing is left of it.
        """
        asked = ("supervise", str(run.path), "--attempt", str(attempt))
        argv = (sys.executable, "-P", "-m", "so_tui", *asked)
        _LOG.info("calling %s", quoted(*argv))
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        with os.fdopen(os.open(supervisor_log(run, attempt), flags, 0o600), "ab") as output:
            return subprocess.Popen(
                argv,
                env={**os.environ, LAUNCH_VARIABLE: digest},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
                start_new_session=True,
            )

    def unavailable(self, launch: Launch) -> tuple[Problem, ...]:
        """Return a problem for each thing that a run could not get, or execute, where it starts, as
        far as that can be known here.
        """
        return ()

    def preview(self, launch: Launch) -> str:
        """Return the batch script that a start would submit; empty if there is none."""
        return ""

    def status(self, run: RunDirectory, attempt: int) -> Job | None:
        """Return what a scheduler knows of an attempt; None where there is no scheduler. Cheap
        enough to be called every second.
        """
        return None

    def cancel(self, run: RunDirectory, attempt: int) -> None:
        """Take an attempt out of a queue, or end its job, if there is one. Raises SoTuiError if it
        cannot be done.
        """


def supervisor_log(run: RunDirectory, attempt: int) -> Path:
    """Return the file that receives the output of an attempt's supervisor on this host."""
    return run.attempt_dir(attempt) / f"supervisor.{socket.gethostname()}.log"


def another_start(run: RunDirectory) -> SoTuiError:
    """Return the error of a start that came second."""
    watch = so_tui_command("watch", run.name)
    return SoTuiError(f"another start of {run.name} came first: `{watch}` shows it")


_FIXED_FOR_A_RUN = (
    "name",
    "model.id",
    "model.revision",
    "model.weights",
    "model.tokenizer",
    "checkpoint.folder",
)


def prepare(spec: RunSpec, machine: Machine, *, force: bool = False) -> Launch:
    """Plan a spec on a machine, with what it leaves open, and derive the launch, in the environment
    of this process.

    Args:
        spec: What to train. Relative paths are made absolute.
        machine: Where to train it.
        force: Accept a plan that does not fit.

    Raises:
        InputError: The model is not described well enough to plan.
        Refused: The run does not fit, or cannot run here at all (which ``force`` does not change).
    """
    from so_tui.plan.planner import recommend  # a process that only reads launches needs no planner

    plan = recommend(with_absolute_paths(spec), usable_machine(machine))
    return launch_of(plan, machine, force=force)


def prepare_again(
    spec: RunSpec, machine: Machine, *, force: bool = False, as_they_are: bool = False
) -> Launch:
    """Derive the launch of settings that were chosen before, which stay where they fit on this
    machine, or in any case if ``as_they_are``; other arguments and errors as for ``prepare``.
    """
    from so_tui.plan.planner import make_plan, replan

    plan_again = make_plan if as_they_are else replan
    plan = plan_again(with_absolute_paths(spec), usable_machine(machine))
    return launch_of(plan, machine, force=force)


def launch_of(plan: Plan, machine: Machine, *, force: bool = False) -> Launch:
    """Derive the launch from a plan that was made for this machine; arguments and errors as for
    ``prepare``.

    Refusal codes: those of the plan's reasons (see ``plan_refused``), and ``gpu-not-visible``.
    """
    from so_tui.launch.ds_config import ds_config

    if not plan.possible or (not plan.fits and not force):
        raise plan_refused(plan)
    usable = usable_machine(machine)
    visible = {gpu.index for gpu in usable.gpus}
    hidden = [rank.gpu for rank in plan.binding if rank.gpu is not None and rank.gpu not in visible]
    if hidden:
        variable = hiding_variable(machine.gpus, os.environ) or "The environment"
        raise refuse(
            "gpu-not-visible",
            f"{variable} hides GPU {', '.join(map(str, hidden))}. Choose among the visible ones "
            "with gpus = [...]",
        )
    plan = replace(plan, spec=with_absolute_paths(plan.spec))
    return Launch(
        plan=plan,
        machine=usable,
        ds_config=ds_config(plan),
        argv=command.argv(plan),
        environment=command.variables(plan, usable, os.environ),
        forced=force,
    )


def plan_refused(plan: Plan) -> Refused:
    """Return the error for a plan that does not fit or cannot run. Its codes are those of the
    plan's reasons (``shortage`` ...).
    """
    return Refused(
        [
            Refusal(
                "does-not-fit" if isinstance(reason, str) else str(reason.__struct_config__.tag),
                text,
            )
            for reason, text in zip(plan.reasons, plan.reason_texts, strict=True)
        ],
        forceable=plan.possible,
    )


def preview(spec: RunSpec, machine: Machine) -> tuple[Plan, Launch | None]:
    """Plan a spec for display: the plan, and its launch unless it is impossible. A plan that does
    not fit has a forced launch.

    Raises:
        InputError: As for ``prepare``.
        Refused: CUDA_VISIBLE_DEVICES names MIG instances.
    """
    from so_tui.plan.planner import recommend

    plan = recommend(with_absolute_paths(spec), usable_machine(machine))
    return plan, launch_of(plan, machine, force=not plan.fits) if plan.possible else None


def prepare_resume(
    run: RunDirectory,
    machine: Machine,
    *,
    values: Mapping[str, str] | None = None,
    force: bool = False,
    start_over: bool = False,
    assume_dead: bool = False,
) -> Launch:
    """Plan the next attempt of a run that has ended. The settings of its first attempt stay, where
    they fit on this machine.

    Args:
        run: The run to resume.
        machine: Where to resume it.
        values: Dotted keys to change from now on (``gpus``, ``offload.mode`` ...). States are
            resharded as they require. ``auto`` lets all be chosen again that no person set.
        force: Accept a plan that does not fit. A run that was forced once stays forced.
        start_over: Train from step 0, whatever was saved. Existing checkpoints are renamed, not
            deleted.
        assume_dead: Accept the user's statement that the previous attempt has ended, although its
            host cannot be asked.

    Raises:
        InputError: The run is live (code ``run-is-live``), has nothing left to train
            (``run-has-finished``, ``length-already-trained``), or a key cannot change during a run
            (``fixed-for-a-run``); otherwise as for ``prepare``.
        Refused: The run is not this user's own (see ``so_tui.runs.directory``), or what it saved is
            missing (``checkpoint-missing``); otherwise as for ``prepare``.
    """
    values = values or {}
    with own_run(run) as own:
        before = ended_state(own, assume_dead=assume_dead)
        spec = _changed(read_spec(own), values)
        if start_over:
            before = replace(before, saved_step=None)
        elif (missing := missing_checkpoints(own, spec, before)) is not None:
            raise refuse(missing.code, f"{missing.message}. {missing.remedy}")
    # Only the data decides how many steps an epoch has.
    given = parse_value(values.get("train.steps", ""), field_index()["train.steps"])
    steps = given if type(given) is int else 0
    longer = steps > before.total_steps or not values.keys().isdisjoint(
        ("train.epochs", "train.tokens")
    )
    if before.state == "finished" and not start_over and not longer:
        more = so_tui_command("resume", run.name, "--set", "train.steps=N")
        export = so_tui_command("export", run.name)
        raise reject(
            "run-has-finished",
            "run",
            run.name,
            f"has finished all of its {thousands(before.total_steps)} steps",
            f"Train longer with `{more}`, or export the model with `{export}`.",
        )
    if before.saved_step and 0 < steps <= before.saved_step:
        raise reject(
            "length-already-trained",
            "train.steps",
            values["train.steps"],
            f"the run would continue from step {thousands(before.saved_step)} and have nothing to "
            "train",
            f"Give more steps, or export the model with `{so_tui_command('export', before.name)}`.",
        )
    opened = any(value == "auto" and key in MACHINE_DECIDES for key, value in values.items())
    plan_again = prepare if opened else prepare_again
    return replace(
        plan_again(spec, machine, force=force or before.forced),
        changes=dict(values),
        start_over=start_over,
        assume_dead=assume_dead,
    )


def usable_machine(machine: Machine) -> Machine:
    """Return the machine with the GPUs that this program may use: on this host those that its
    environment shows, elsewhere all.
    """
    if machine.hostname != socket.gethostname():
        return machine
    return visible_machine(machine, os.environ)


def visible_machine(machine: Machine, inherited: Mapping[str, str]) -> Machine:
    """Return the machine with only the GPUs that CUDA_VISIBLE_DEVICES, or its like, names (indices
    or UUIDs, as CUDA reads them).

    Raises:
        Refused: It names MIG instances, which ZeRO-3 cannot use together (code ``mig-instance``).
    """
    variable = hiding_variable(machine.gpus, inherited)
    if variable is None or not machine.gpus:
        return machine
    given = inherited[variable]
    if any(entry.strip().startswith("MIG-") for entry in given.split(",")):
        raise refuse(
            "mig-instance",
            "CUDA_VISIBLE_DEVICES names a MIG instance, and so-tui trains on whole GPUs. Ask for a "
            "whole GPU",
        )
    return replace(machine, gpus=tuple(visible_gpus(machine.gpus, given)))


def _changed(spec: RunSpec, values: Mapping[str, str]) -> RunSpec:
    """Return the spec of the next attempt. Refuse keys that would make it another run, or lose its
    checkpoints.
    """
    if fixed := [
        Problem(
            "fixed-for-a-run",
            key,
            value,
            "cannot change when a run is resumed",
            "Start a new run with it, or resume without it.",
        )
        for key, value in values.items()
        if key in _FIXED_FOR_A_RUN or key.startswith("model.config")
    ]:
        raise InputError(fixed)
    return with_values(spec, values) if values else spec
