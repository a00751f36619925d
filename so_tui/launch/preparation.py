"""From a spec and a machine to a launch: everything that a start needs, made once and without side effects."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from so_tui.launch import command, environment
from so_tui.launch.ds_config import ds_config
from so_tui.launch.environment import Variable
from so_tui.launch.placeholders import Placeholder
from so_tui.machine.gpus import hiding_variable, visible_gpus
from so_tui.machine.types import Machine
from so_tui.plan import make_plan
from so_tui.plan.types import Plan
from so_tui.runs.checkpoints import missing_checkpoints
from so_tui.runs.directory import RunDirectory
from so_tui.runs.ended import ended_state
from so_tui.runs.own import refuse_unless_own
from so_tui.runs.records import RunState
from so_tui.runs.state import read_spec
from so_tui.spec import (
    InputError,
    Problem,
    Refusal,
    Refused,
    RunSpec,
    field_index,
    parse_value,
    with_values,
)
from so_tui.spec.local_paths import with_absolute_paths
from so_tui.trust.printable import so_tui_command
from so_tui.units import thousands

_FIXED_FOR_A_RUN = (
    "name",
    "model.id",
    "model.revision",
    "model.weights",
    "model.tokenizer",
    "checkpoint.folder",
)


class Launch(Struct, frozen=True, kw_only=True):
    """Everything that a start needs. What is shown and confirmed is this value, and the supervisor starts from it.

    ``argv`` and ``environment`` contain placeholders for values that exist only on the host (see ``placeholders``).
    """

    plan: Plan
    machine: Machine
    """The machine that was planned for, with the GPUs that this program may use."""
    ds_config: dict[str, Any]
    """The content of ``ds_config.json``, which DeepSpeed reads."""
    argv: tuple[str, ...]
    environment: tuple[Variable, ...]
    """Changes to the inherited environment."""
    forced: bool = False
    """The user insisted: neither a plan that does not fit nor a forceable check stops the start."""
    changes: dict[str, str] = {}
    """For a resume: dotted keys and values that differ from the run's spec so far."""
    start_over: bool = False
    """For a resume: train from step 0, whatever was saved."""
    assume_dead: bool = False
    """For a resume: the user says that the previous attempt has ended, although its host cannot be asked."""
    called: str = ""
    """What the user calls the run; empty: the name of its preset."""
    checks_s: float | None = None
    """Duration of ``preflight``; None if the user did without it."""

    @property
    def spec(self) -> RunSpec:
        """The spec that is trained, with nothing left to choose."""
        return self.plan.spec

    def resolved(
        self,
        *,
        run: Path,
        attempt: int,
        rendezvous: str,
        run_id: str = "",
        others: Mapping[Placeholder, str] | None = None,
    ) -> Launch:
        """Return the launch with the host's values in place of the placeholders.

        Args:
            run: The run directory.
            attempt: The attempt's number.
            rendezvous: Where the ranks meet, as torch's ``init_method`` (``file:///...``).
            run_id: The id of the run; empty for a run of an older version.
            others: The values of the placeholders of several nodes.
        """
        values = {
            **(others or {}),
            Placeholder.RUN: str(run),
            Placeholder.RUN_ID: run_id,
            Placeholder.ATTEMPT: str(attempt),
            Placeholder.RENDEZVOUS: rendezvous,
        }
        argv, changes = (
            command.resolved(self.argv, values),
            environment.resolved(self.environment, values),
        )
        return msgspec.structs.replace(self, argv=argv, environment=changes)


def prepare(
    spec: RunSpec,
    machine: Machine,
    *,
    force: bool = False,
    inherited: Mapping[str, str] | None = None,
) -> Launch:
    """Plan a spec on a machine and derive the launch.

    Args:
        spec: What to train. Relative paths are made absolute.
        machine: Where to train it.
        force: Accept a plan that does not fit.
        inherited: The environment to start from; by default this process's.

    Raises:
        InputError: The model is not described well enough to plan.
        Refused: The run does not fit, or cannot run here at all (which ``force`` does not change).
    """
    inherited = os.environ if inherited is None else inherited
    usable = usable_machine(machine, inherited)
    return launch_of(
        make_plan(with_absolute_paths(spec), usable), usable, force=force, inherited=inherited
    )


def launch_of(
    plan: Plan, machine: Machine, *, force: bool = False, inherited: Mapping[str, str] | None = None
) -> Launch:
    """Derive the launch from a plan that was made for this machine; arguments and errors as for ``prepare``.

    Refusal codes: those of the plan's reasons (see ``plan_refused``), and ``gpu-not-visible``.
    """
    inherited = os.environ if inherited is None else inherited
    if not plan.possible or (not plan.fits and not force):
        raise plan_refused(plan)
    usable = usable_machine(machine, inherited)
    visible = {gpu.index for gpu in usable.gpus}
    hidden = [rank.gpu for rank in plan.binding if rank.gpu is not None and rank.gpu not in visible]
    if hidden:
        variable = hiding_variable(machine.gpus, inherited) or "The environment"
        message = f"{variable} hides GPU {', '.join(map(str, hidden))}. Choose among the visible ones with gpus = [...]"
        raise Refused([Refusal("gpu-not-visible", message)])
    plan = msgspec.structs.replace(plan, spec=with_absolute_paths(plan.spec))
    return Launch(
        plan=plan,
        machine=usable,
        ds_config=ds_config(plan),
        argv=command.argv(plan),
        environment=environment.variables(plan, usable, inherited),
        forced=force,
    )


def plan_refused(plan: Plan) -> Refused:
    """Return the error for a plan that does not fit or cannot run. Its codes are those of the plan's reasons (``shortage`` ...)."""
    refusals = [
        Refusal(
            "does-not-fit" if isinstance(reason, str) else str(reason.__struct_config__.tag), text
        )
        for reason, text in zip(plan.reasons, plan.reason_texts, strict=True)
    ]
    return Refused(refusals, forceable=plan.possible)


def preview(
    spec: RunSpec, machine: Machine, *, inherited: Mapping[str, str] | None = None
) -> tuple[Plan, Launch | None]:
    """Plan a spec for display: the plan, and its launch unless it is impossible. A plan that does not fit has a forced launch.

    Raises:
        InputError: As for ``prepare``.
        Refused: CUDA_VISIBLE_DEVICES names MIG instances.
    """
    inherited = os.environ if inherited is None else inherited
    usable = usable_machine(machine, inherited)
    plan = make_plan(with_absolute_paths(spec), usable)
    return plan, launch_of(
        plan, usable, force=not plan.fits, inherited=inherited
    ) if plan.possible else None


def prepare_resume(
    run: RunDirectory,
    machine: Machine,
    *,
    values: Mapping[str, str] | None = None,
    force: bool = False,
    start_over: bool = False,
    assume_dead: bool = False,
    inherited: Mapping[str, str] | None = None,
) -> Launch:
    """Plan the next attempt of a run that has ended.

    Args:
        run: The run to resume.
        machine: Where to resume it.
        values: Dotted keys to change from now on (``gpus``, ``offload.mode`` ...). States are resharded as they require.
        force: Accept a plan that does not fit. A run that was forced once stays forced.
        start_over: Train from step 0, whatever was saved. Existing checkpoints are renamed, not deleted.
        assume_dead: Accept the user's statement that the previous attempt has ended, although its host cannot be asked.
        inherited: The environment to start from; by default this process's.

    Raises:
        InputError: The run is live (code ``run-is-live``), has nothing left to train (``run-has-finished``, ``length-already-trained``),
            or a key cannot change during a run (``fixed-for-a-run``); otherwise as for ``prepare``.
        Refused: The run is not this user's own (see ``so_tui.runs.own``), or what it saved is missing (``checkpoint-missing``); otherwise
            as for ``prepare``.
    """
    values = values or {}
    refuse_unless_own(run)
    before = ended_state(run, assume_dead=assume_dead)
    spec = _changed(read_spec(run), values)
    if start_over:
        before = msgspec.structs.replace(before, saved_step=None)
    elif (missing := missing_checkpoints(run, spec, before)) is not None:
        raise Refused([missing])
    if before.state == "finished" and not start_over and not _lengthens(values, before.total_steps):
        longer, export = (
            so_tui_command("resume", run.name, "--set", "train.steps=N"),
            so_tui_command("export", run.name),
        )
        remedy = f"Train longer with `{longer}`, or export the model with `{export}`."
        message = f"has finished all of its {thousands(before.total_steps)} steps"
        raise InputError(
            [
                Problem(
                    code="run-has-finished",
                    field="run",
                    value=run.name,
                    message=message,
                    remedy=remedy,
                )
            ]
        )
    _refuse_trained_length(values, before)
    launch = prepare(spec, machine, force=force or before.forced, inherited=inherited)
    arguments = command.argv(launch.plan, start_over=start_over)
    return msgspec.structs.replace(
        launch, argv=arguments, changes=dict(values), start_over=start_over, assume_dead=assume_dead
    )


def usable_machine(machine: Machine, inherited: Mapping[str, str]) -> Machine:
    """Return the machine with the GPUs that this program may use: on this host those that its environment shows, elsewhere all."""
    return (
        visible_machine(machine, inherited) if machine.hostname == socket.gethostname() else machine
    )


def visible_machine(machine: Machine, inherited: Mapping[str, str]) -> Machine:
    """Return the machine with only the GPUs that CUDA_VISIBLE_DEVICES, or its like, names (indices or UUIDs, as CUDA reads them).

    Raises:
        Refused: It names MIG instances, which ZeRO-3 cannot use together (code ``mig-instance``).
    """
    variable = hiding_variable(machine.gpus, inherited)
    if variable is None or not machine.gpus:
        return machine
    given = inherited[variable]
    if any(entry.strip().startswith("MIG-") for entry in given.split(",")):
        message = "CUDA_VISIBLE_DEVICES names a MIG instance, and so-tui trains on whole GPUs. Ask for a whole GPU"
        raise Refused([Refusal("mig-instance", message)])
    visible, _ = visible_gpus(machine.gpus, given)
    return msgspec.structs.replace(machine, gpus=visible)


def _changed(spec: RunSpec, values: Mapping[str, str]) -> RunSpec:
    """Return the spec of the next attempt. Refuse keys that would make it another run, or lose its checkpoints."""
    fixed = [key for key in values if key in _FIXED_FOR_A_RUN or key.startswith("model.config")]
    if fixed:
        message, remedy = (
            "cannot change when a run is resumed",
            "Start a new run with it, or resume without it.",
        )
        raise InputError(
            [
                Problem(
                    code="fixed-for-a-run",
                    field=key,
                    value=values[key],
                    message=message,
                    remedy=remedy,
                )
                for key in fixed
            ]
        )
    return with_values(spec, values) if values else spec


def _given_steps(values: Mapping[str, str]) -> int | None:
    """Return the number of steps that the changes ask for; None where they do not, or give no number."""
    given = parse_value(values.get("train.steps", ""), field_index()["train.steps"])
    return given if type(given) is int else None


def _lengthens(values: Mapping[str, str], steps: int) -> bool:
    """Return whether the changes may leave something to train after ``steps``. Only the data decides how many steps an epoch has."""
    given = _given_steps(values)
    return (
        (given is not None and given > steps)
        or "train.epochs" in values
        or "train.tokens" in values
    )


def _refuse_trained_length(values: Mapping[str, str], before: RunState) -> None:
    given = _given_steps(values)
    if before.saved_step and given is not None and 0 < given <= before.saved_step:
        message = f"the run would continue from step {thousands(before.saved_step)} and have nothing to train"
        remedy = (
            f"Give more steps, or export the model with `{so_tui_command('export', before.name)}`."
        )
        raise InputError(
            [
                Problem(
                    code="length-already-trained",
                    field="train.steps",
                    value=values["train.steps"],
                    message=message,
                    remedy=remedy,
                )
            ]
        )
