"""Results of planning: frozen and JSON-ready, the same for the table, the Configure screen, the dry
run and the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from so_tui.machine.types import Cpus, Machine
from so_tui.plan.notes import Caution, NeverRun, Reason, Remedy, SettingsReplaced, Shortage
from so_tui.plan.rates import SpeedSource, StepError
from so_tui.plan.terms import Location, MemoryTerm
from so_tui.spec.run_spec import Mode, RunSpec
from so_tui.trust.decoding import prepare

Verdict = Literal["fits", "tight", "does not fit"]
GPU_MARGIN = 0.08
"""Share of a GPU's memory that stays free in a plan that ``fits``."""
HOST_MARGIN = 0.06
"""The same for host memory, beyond what the operating system needs."""
TIGHT_MARGIN = 0.015
"""Share that must stay free for a plan to be worth trying: the estimates are not better than
that.
"""


class MemoryPolicy(Struct, frozen=True, kw_only=True):
    """Where a rank's host memory may come from, in set_mempolicy(2) terms."""

    mode: Literal["bind", "preferred", "default"]
    nodes: tuple[int, ...] = ()


class DeepSpeedBinding(Struct, frozen=True, kw_only=True):
    """What DeepSpeed's launcher does for a rank under ``--bind_cores_to_rank``."""

    cpus: Cpus
    numactl: tuple[str, ...]
    """The numactl prefix; empty where the launcher is started without ``--bind_cores_to_rank``."""
    omp_num_threads: int
    matches: bool
    """Whether that is what the plan asks for."""
    error: str = ""
    """Why the launcher would fail to start the ranks."""


class RankBinding(Struct, frozen=True, kw_only=True, rename={"deepspeed_unlisted": "alone"}):
    rank: int
    gpu: int | None
    numa_node: int | None
    cpus: Cpus
    main_cpus: Cpus
    """Cores of the training process; part of ``cpus``."""
    adam_cpus: Cpus
    """Cores of the Adam worker (superoffload); empty in the other modes, where ``main_cpus`` is all
    of ``cpus``.
    """
    memory_policy: MemoryPolicy
    deepspeed: DeepSpeedBinding
    """With the core list that so-tui passes to it."""
    deepspeed_unlisted: DeepSpeedBinding | None = None
    """Without a core list, as its own users start it: all physical cores of the machine, cut into
    equal slices.
    """

    def without_worker(self) -> RankBinding:
        """Return the binding in a mode that has no Adam worker."""
        return replace(self, main_cpus=self.cpus, adam_cpus=())


Binding = tuple[RankBinding, ...]
"""The bindings of a host's ranks, in rank order."""


class StepTime(Struct, frozen=True, kw_only=True):
    """Predicted seconds of one optimizer step."""

    forward_s: float
    backward_s: float
    exposed_optimizer_s: float
    data_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s + self.exposed_optimizer_s + self.data_s


class PlannedRates(Struct, frozen=True, kw_only=True):
    """What a prediction of time with our engine rests on, for each rank, so that a run can be
    compared with it.
    """

    adam_bytes_per_s: float
    """Host memory traffic of Adam beside the work that it overlaps with."""
    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    d2h_bytes: int
    """Gradients that a step copies to the host."""
    h2d_bytes: int
    """Weights that a step copies to the GPU."""


class OptionalMemory(Struct, frozen=True, kw_only=True):
    """Host memory of each rank that a run does without where other processes hold it."""

    second_states_bytes: int = 0
    """What second states may take, and what they were chosen for: with the same budget, the engine
    chooses the same.
    """
    copies_bytes: int = 0
    """The same for the copies from which checkpoints are written while training goes on."""


NOTHING_OPTIONAL = OptionalMemory()


class Plan(Struct, frozen=True, kw_only=True):
    """A RunSpec on a Machine."""

    preset: str
    gpus: int
    """All ranks, on all hosts. Memory is that of one of the hosts, which are alike."""
    mode: Mode
    ratio: float
    fits: bool
    verdict: Verdict
    possible: bool = True
    """False when it cannot run here whatever the memory (no such GPU, a mode this machine lacks):
    forcing it does not help.
    """
    recommended: bool = False
    reasons: tuple[Reason, ...]
    """Why the verdict is what it is, most important first, remedies included."""
    remedies: tuple[Remedy, ...] = ()
    """The reasons that say what would make it fit, the least painful first."""
    warnings: tuple[Caution, ...]
    shortage: Shortage | None = None
    """The worst, where the margin is not left free."""
    gpu_bytes: int
    """Peak per GPU (0 on a machine without GPUs)."""
    gpu_reserved_bytes: int = 0
    """Of these, what torch's allocator reserves: all but the driver's and NCCL's share."""
    gpu_capacity_bytes: int | None
    one_memory: bool = False
    """Whether CPU and GPU have the same memory (APUs): all of it is counted on the CPU nodes, and
    ``gpu_bytes`` is 0.
    """
    host_bytes_per_node: dict[int, int]
    host_optional_bytes: int = 0
    """Of these, over all nodes, what a run does without where other processes hold it: second
    states, and copies for checkpoints.
    """
    optional: OptionalMemory = NOTHING_OPTIONAL
    """The budgets of these on each rank. They hold for one attempt: the spec keeps the user's own
    limits, so that a later one gets what its host has then.
    """
    host_capacity_bytes_per_node: dict[int, int]
    shm_bytes: int
    disk_bytes: int
    """One checkpoint, with the export where one is asked for."""
    disk_peak_bytes: int = 0
    """Most that the run occupies: the checkpoints it retains, and the one being written."""
    checkpoint_cost_s: float | None = None
    """Seconds of training that one checkpoint costs; None in plans of earlier versions."""
    breakdown: tuple[MemoryTerm, ...]
    step: StepTime | None
    """None where this machine's speed is not known."""
    rates: PlannedRates | None = None
    """None also where nothing is offloaded, or DeepSpeed steps it, which does not report its
    rates.
    """
    step_s: float | None
    step_error: StepError | None = None
    """How far ``step_s`` can be expected to be off; None without it."""
    tokens_per_step: int
    """Sequence positions of one optimizer step, all ranks."""
    useful_tokens_per_s_total: float | None
    model_tflops_per_gpu: float | None
    speed_source: SpeedSource | None = None
    """What the prediction of time rests on; None without one."""
    binding: Binding
    spec: RunSpec
    """The spec as it will run, with nothing left to choose. Which GPUs a mere count takes is in the
    binding.
    """

    @property
    def on_gpus(self) -> bool:
        """Whether ranks are known to have GPUs."""
        return bool(self.gpu_capacity_bytes) or self.one_memory

    @property
    def never_run(self) -> bool:
        """Whether it is for a kind of GPU on which the project has run nothing."""
        return any(isinstance(warning, NeverRun) for warning in self.warnings)

    @property
    def least_disk_bytes(self) -> int:
        """``disk_peak_bytes`` of a run that keeps one checkpoint, unless a person said how many."""
        if self.spec.fixes("checkpoint.keep"):
            return self.disk_peak_bytes
        return min(2 * self.disk_bytes, self.disk_peak_bytes)

    @property
    def checkpoint_bytes(self) -> int:
        """One checkpoint, without an export."""
        return sum(term.bytes for term in self.breakdown if term.kind == "checkpoint")

    @property
    def step_error_text(self) -> str:
        """How far ``step_s`` may be off, to stand behind it: `` ±12%``, or `` ±15% or more`` where
        no plan was held to measurements; empty where that is unknown.
        """
        if (error := self.step_error) is None:
            return ""
        return f" ±{error.share:.0%}" + ("" if error.checked else " or more")

    @property
    def replaced_texts(self) -> tuple[str, ...]:
        """What of the settings of an earlier attempt did not fit here, in words."""
        found = (warning for warning in self.warnings if isinstance(warning, SettingsReplaced))
        return tuple(warning.message for warning in found)

    def largest_terms(self, location: Location) -> list[MemoryTerm]:
        """Return the terms of one location, largest first."""
        found = (term for term in self.breakdown if term.location == location and term.bytes)
        return sorted(found, key=lambda term: -term.bytes)

    @property
    def reason_texts(self) -> tuple[str, ...]:
        return tuple(reason.message for reason in self.reasons)

    @property
    def cause_texts(self) -> tuple[str, ...]:
        """The reasons that are not remedies, in words."""
        return tuple(reason.message for reason in self.reasons if reason not in self.remedies)

    @property
    def remedy_texts(self) -> tuple[str, ...]:
        return tuple(remedy.message for remedy in self.remedies)

    @property
    def warning_texts(self) -> tuple[str, ...]:
        return tuple(warning.message for warning in self.warnings)


class PlanRow(Struct, frozen=True, kw_only=True):
    """One line of the models x GPU counts table."""

    preset: str
    title: str
    parameters: int
    active_parameters: int
    """Used by one token; fewer than ``parameters`` in mixture-of-experts models."""
    sequence_length: int
    cells: dict[int, Plan]
    """GPU count of each host (ranks on a machine without GPUs) -> the best plan there;
    ``recommended`` marks at most one of them: what `so-tui run PRESET` starts.
    """
    nodes: int = 1
    """Hosts."""

    @property
    def fastest(self) -> int:
        """The count with the most tokens per second in total, of those that fit with a margin; 0
        where none does or no speed is known.
        """
        rates = {
            count: plan.useful_tokens_per_s_total or 0.0
            for count, plan in self.cells.items()
            if plan.verdict == "fits"
        }
        return max(rates, key=lambda count: rates[count]) if any(rates.values()) else 0

    @property
    def fastest_plan(self) -> Plan | None:
        """The plan on the fastest count; None where there is no other count that fits."""
        several = sum(plan.fits for plan in self.cells.values()) > 1
        return self.cells.get(self.fastest) if several else None


class Variable(Struct, frozen=True):
    """One change to the environment. A value of None removes the variable."""

    name: str
    value: str | None
    reason: str


class Launch(Struct, frozen=True, kw_only=True):
    """Everything that a start needs: shown and confirmed, written as ``launch.json``, read by
    supervisor and trainer.

    ``argv`` and ``environment`` contain placeholders for values that exist only on the host (see
    ``so_tui.launch.command``).
    """

    v: int = 2
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
    """For a resume: the user says that the previous attempt has ended, although its host cannot be
    asked.
    """
    called: str = ""
    """What the user calls the run; empty: the name of its preset."""
    checks_s: float | None = None
    """Duration of ``preflight``; None if the user did without it."""

    @property
    def spec(self) -> RunSpec:
        """The spec that is trained, with nothing left to choose."""
        return self.plan.spec

    def resolved(self, values: Mapping[str, str]) -> Launch:
        """Return the launch with the host's values in place of the placeholders, which ``values``
        maps to them.
        """
        environment = tuple(
            replace(change, value=values.get(change.value or "", change.value))
            for change in self.environment
        )
        argv = tuple(values.get(argument, argument) for argument in self.argv)
        return replace(self, argv=argv, environment=environment)


prepare(Launch)
