"""A whole validation of this machine: which measurements, in which folder, continued where the last
one ended.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache, cached_property, partial
from pathlib import Path
from threading import Event

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from so_tui import __version__
from so_tui.doctor import findings
from so_tui.folders import probes_dir
from so_tui.launch.helper import stream_tool
from so_tui.launch.helper_jobs import measure_alone, measure_rates
from so_tui.launch.launch import launch_of, usable_machine
from so_tui.launch.probe import (
    MEASURED_STEPS,
    WARMUP_STEPS,
    measured_of,
    probe_of,
    probe_spec,
    run_to_end,
)
from so_tui.machine.host import distance
from so_tui.machine.types import Machine, NumaNode
from so_tui.model.shape import architecture
from so_tui.plan import measured as calibration
from so_tui.plan.plan import DeepSpeedBinding, MemoryPolicy, Plan, RankBinding
from so_tui.plan.planner import make_plan
from so_tui.runs import delete_run
from so_tui.runs.records import MetricRecord, PhaseRecord, StepRecord
from so_tui.spec import RunSpec, find_preset, with_values
from so_tui.spec.errors import SoTuiError, first_line, reject
from so_tui.spec.presets import EXAMPLE_SEQUENCES, as_published
from so_tui.validation import report, show
from so_tui.validation.report import (
    CopiesFound,
    CopyRates,
    MachineFound,
    Outcome,
    Placed,
    RatesFound,
    Report,
    Result,
    TrainingFound,
    machine_found,
)

# DeepSpeed's CPU Adam, which the parts with its optimizers need: compiled once, beside parts whose
# speed does not count.


class _CpuAdam:
    """Compiles in a helper process, which takes one to three minutes unless it is cached. A
    context: what still compiles is ended.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "compile")
        self._cancel = Event()

    def __enter__(self) -> _CpuAdam:
        return self

    def __exit__(self, *_error: object) -> None:
        self._cancel.set()
        self._thread.shutdown()

    @cached_property
    def compiled(self) -> Future[object]:
        """The compilation, which begins when it is asked for first."""
        return self._thread.submit(lambda: list(stream_tool("build_ops", {}, self._cancel)))

    def wait(self, limit_s: float) -> None:
        """Wait until it is compiled. What DeepSpeed says against its own kernel is said by the run
        that needs it.

        Raises:
            SoTuiError: It takes longer, or the helper failed.
        """
        try:
            self.compiled.result(limit_s)
        except FutureTimeout as error:
            raise SoTuiError(
                f"DeepSpeed's CPU Adam is not compiled after {limit_s:,.0f} s"
            ) from error


# Runs measurements one after the other, as many as fit into the time, and writes the report after
# each.


_LOG = logging.getLogger(__name__)
OVERRUN_S = 60.0
"""What a part may take beyond three times its estimate, or beyond the time of all parts, before it
is given up.
"""
_LONG_S = 10.0
"""From what estimate on a part tells how fast this machine is."""


Tell = Callable[[str, float], None]
"""Receives what is being measured, and the share of all measurements' estimated time that is over.
"""


Measure = Callable[[Callable[[str], None], float], Result]
"""Measures, telling in words what it does. Gives up after so many seconds, and ends what it
started. May raise anything.
"""


_Measurement = tuple[Outcome, Measure]
"""One part of a report, as it is before it is measured, and what measures it."""


def _run_parts(
    report: Report,
    measurements: Sequence[_Measurement],
    seconds: float,
    write: Callable[[Report], None],
    tell: Tell,
) -> Report:
    """Measure what the report lacks.

    Measurements are in the order of their importance. One that does not fit into what is left of
    the time, judged by how long those before it took, is left out, and a shorter one after it is
    tried. One that fails, or takes much longer than its estimate, says so in the report, and the
    next one follows. What failed is tried again by the next run.

    Args:
        report: What was measured before.
        measurements: What to measure.
        seconds: How long all of it may take.
        write: Saves the report; called after each measurement, and before the first.
        tell: Shows progress.

    Returns:
        The report as it was written last.

    Raises:
        KeyboardInterrupt: The user stopped; what was measured until then is written.
    """
    known = {outcome.key: outcome for outcome in report.outcomes}
    outcomes = tuple(known.get(pending.key, pending) for pending, _ in measurements)
    report = replace(report, outcomes=outcomes)
    write(report)
    deadline, over_s = time.monotonic() + seconds, 0.0
    whole_s = sum(pending.estimate_s for pending, _ in measurements) or 1.0
    for measurement, outcome in zip(measurements, outcomes, strict=True):
        if outcome.state != "measured":
            share = over_s / whole_s
            tell(outcome.title, share)
            pace = _pace(report.outcomes)
            report = report.with_outcome(_outcome(measurement, pace, deadline, tell, share))
            write(report)
        over_s += measurement[0].estimate_s
    tell("done", 1.0)
    return report


def _pace(outcomes: Sequence[Outcome]) -> float:
    """Return how long measurements take here as a share of their estimates: the median of the long
    ones so far; 1 before there is any.
    """
    shares = [
        found.seconds / found.estimate_s
        for found in outcomes
        if found.seconds and found.state == "measured" and found.estimate_s >= _LONG_S
    ]
    return statistics.median(shares or [1.0])


def _outcome(
    measurement: _Measurement, pace: float, deadline: float, tell: Tell, share: float
) -> Outcome:
    (pending, measure), begun = measurement, time.monotonic()
    left_s, expected_s = deadline - begun, pace * pending.estimate_s
    if expected_s > left_s:
        reason = f"takes about {expected_s:,.0f} s, and {max(0.0, left_s):,.0f} s were left"
        return replace(pending, state="left-out", reason=reason)
    limit_s = min(3 * pending.estimate_s, left_s) + OVERRUN_S
    try:
        result = measure(lambda text: tell(text, share), limit_s)
        found = replace(pending, state="measured", result=result)
    # Whatever stands in the way of one part is in the report, and the others go on.
    except Exception as error:  # noqa: BLE001
        _LOG.info("%s failed", pending.key, exc_info=True)
        reason = f"{type(error).__name__}: {first_line(error)}"
        found = replace(
            pending,
            state="timed-out" if time.monotonic() - begun >= limit_s else "failed",
            reason=str(error) if isinstance(error, SoTuiError) else reason,
        )
    return replace(found, seconds=time.monotonic() - begun)


# Parts of a validation that measure the machine itself: what it has, its rates, and copies between
# its GPUs and memories.


_COPY_S = 6.0
"""About how long one pair of GPU and node takes, the start of its process included."""


def _machine_measurements(machine: Machine, folder: Path) -> list[_Measurement]:
    """Return the machine's parts of a report that is written to ``folder``."""
    gpus = usable_machine(machine).gpus
    parts = [
        _measurement(
            "machine",
            "the machine, and what is wrong with it",
            5.0,
            partial(_machine, machine, folder),
        ),
        _measurement(
            "rates",
            "rates of Adam, products and copies",
            60.0 if gpus else 30.0,
            partial(_rates, machine),
        ),
    ]
    if gpus:
        pairs = len(gpus) * len(machine.cpu_nodes) + (len(gpus) > 1)
        title = "copies between every GPU and every NUMA node"
        parts.append(_measurement("copies", title, _COPY_S * pairs, partial(_copies, machine)))
    return parts


def _measurement(key: str, title: str, estimate_s: float, measure: Measure) -> _Measurement:
    return Outcome(key=key, title=title, estimate_s=estimate_s), measure


def _machine(
    machine: Machine, folder: Path, _tell: Callable[[str], None], _limit_s: float
) -> MachineFound:
    return machine_found(machine, findings(machine, None, checkpoints=folder))


def _rates(machine: Machine, tell: Callable[[str], None], limit_s: float) -> RatesFound:
    return RatesFound(rates=measure_rates(machine, tell, timeout_s=limit_s)[0])


def _copies(machine: Machine, tell: Callable[[str], None], limit_s: float) -> CopiesFound:
    answer = measure_alone("copies", machine, "validate", tell, limit_s)
    return CopiesFound(copies=msgspec.convert(answer["copies"], tuple[CopyRates, ...]))


# Training parts of a validation: short runs of one shape in different settings, beside what is
# predicted for each.


_GPU_SHAPE, _CPU_SHAPE = "qwen3-4b-random", "tiny"
_LAYERS = (36, 28, 20, 14, 10, 6, 4)
"""Of the 4B shape, whose whole training should fit one GPU without offload."""
_START_S, _STEPS = 60.0, WARMUP_STEPS + MEASURED_STEPS
"""What starting, loading and ending take, and the steps of a run."""
_CPU_RUN_S = 35.0

_LOSS_STEPS = 200
_LOSS_LEARNING_RATE = "3e-4"
"""A tenth of the preset's, at which rounding grows until two runs of the same arithmetic differ by
6 % at a step; here by 0.2 %.
"""
_LOSS_STEP_S = 0.1
"""At most, of ``tiny`` on GPUs."""


class _Part(Struct, frozen=True, forbid_unknown_fields=True):
    """One run of ``parts.toml``: its title, its settings in addition to those of the shape, the
    number of ranks and how they are bound.
    """

    key: str
    title: str
    settings: dict[str, str] = {}
    ranks: int = 1
    least_gpus: int = 1
    """GPUs that a run may have at least, if more than it has ranks."""
    placed: Placed = "bound"
    published: bool = False
    """With the settings of DeepSpeed's SuperOffload examples."""
    losses_only: bool = False
    """Many steps of ``tiny`` in place of a few of the shape: for its losses, not for its speed."""


def _shape_for(machine: Machine) -> RunSpec:
    """Return what is trained: the largest of the shapes that fits one GPU without offload; without
    GPUs, ``tiny``.
    """
    changes = {"gpus": "1", "train.gradient_accumulation": "1"}
    if not machine.gpus:
        return with_values(find_preset(_CPU_SHAPE).spec, changes)
    changes |= {
        "train.micro_batch": str(EXAMPLE_SEQUENCES),
        "model.activation_checkpointing": "full",
        "model.kernels": "plain",
    }
    spec = with_values(find_preset(_GPU_SHAPE).spec, changes)
    for layers in _LAYERS:
        shape = with_layers(spec, layers)
        on_gpu = with_values(shape, {"offload.mode": "gpu"})
        if make_plan(on_gpu, machine).verdict == "fits":
            break
    return shape


def with_layers(spec: RunSpec, layers: int) -> RunSpec:
    """Return a spec of the same shape with another number of layers."""
    model = spec.model
    old = architecture(model.config).layers
    blocks = tuple(
        replace(block, repeat=layers) if block.repeat == old else block
        for block in model.parameters
    )
    config = model.config | {"num_hidden_layers": layers}
    return spec.changed("model", config=config, parameters=blocks)


def _shape_name(spec: RunSpec) -> str:
    """Return the shape in words."""
    return f"{spec.name}, {architecture(spec.model.config).layers} layers"


@cache
def _parts() -> dict[str, tuple[_Part, ...]]:
    """Return the parts for machines with ``gpus``, and with ``cpus`` alone."""
    return msgspec.toml.decode(
        Path(__file__).with_name("parts.toml").read_bytes(), type=dict[str, tuple[_Part, ...]]
    )


def _parts_of(machine: Machine, gpus: int) -> list[_Part]:
    """Return the training parts for a machine, the most telling first.

    Args:
        machine: Where.
        gpus: The most GPUs that a run may have.
    """
    if not machine.gpus:
        return [*_parts()["cpus"]]
    several_nodes = len(_usable_nodes(machine)) > 1
    return [
        part
        for part in _parts()["gpus"]
        if max(part.ranks, part.least_gpus) <= gpus
        and (several_nodes or part.placed != "wrong-node")
    ]


def _spec_of(shape: RunSpec, part: _Part) -> RunSpec:
    """Return the spec of a part: as many sequences a step as the shape has, whatever the number of
    ranks.
    """
    if part.losses_only:
        shape = with_values(
            find_preset(_CPU_SHAPE).spec,
            {"train.steps": str(_LOSS_STEPS), "train.learning_rate": _LOSS_LEARNING_RATE},
        )
    sequences = shape.train.micro_batch * shape.gradient_accumulation_steps
    ranks = {"gpus": str(part.ranks), "train.micro_batch": str(max(1, sequences // part.ranks))}
    spec = with_values(shape, ranks)
    if part.published:
        # Data, learning rate and decay stay, so that losses can be compared.
        found = as_published(spec)
        names = ("learning_rate", "schedule", "warmup_ratio", "weight_decay")
        kept = {name: getattr(spec.train, name) for name in names}
        spec = replace(found, data=spec.data).changed("train", **kept)
    return with_values(spec, part.settings)


def _placed(plan: Plan, machine: Machine, how: Placed) -> Plan:
    """Return a plan whose ranks are bound as planned, not at all, or each to the cores and memory
    of another NUMA node.
    """
    if how == "bound":
        return plan
    return replace(plan, binding=tuple(_moved(rank, machine, how) for rank in plan.binding))


def _moved(rank: RankBinding, machine: Machine, how: Placed) -> RankBinding:
    allowed = tuple(sorted(machine.allowed_cpus))
    policy = MemoryPolicy(mode="default")
    cpus = main = adam = allowed
    if how == "wrong-node":
        others = [node for node in _usable_nodes(machine) if node.id != rank.numa_node]
        node = max(
            others, key=lambda other: distance(machine.numa_nodes, other, rank.numa_node or 0) or 0
        )
        cpus = tuple(cpu for cpu in node.cpus if cpu in set(allowed))[: len(rank.cpus)]
        split = max(1, len(cpus) - len(rank.adam_cpus)) if rank.adam_cpus else len(cpus)
        main, adam = cpus[:split], cpus[split:] or cpus
        policy = MemoryPolicy(mode="bind", nodes=(node.id,))
    # Without DeepSpeed's flag: it could not express this, and the trainer's own binding decides.
    launcher = DeepSpeedBinding(cpus=cpus, numactl=(), omp_num_threads=len(cpus), matches=True)
    adam = adam if rank.adam_cpus else ()
    return replace(
        rank,
        cpus=cpus,
        main_cpus=main,
        adam_cpus=adam,
        memory_policy=policy,
        deepspeed=launcher,
        deepspeed_unlisted=None,
    )


def _usable_nodes(machine: Machine) -> list[NumaNode]:
    """Return the NUMA nodes with cores that this process may use: a job may have those of one
    superchip only.
    """
    allowed = set(machine.allowed_cpus)
    return [node for node in machine.cpu_nodes if allowed.intersection(node.cpus)]


def _training_measurements(
    machine: Machine, shape: RunSpec, parts: Sequence[_Part], cpu_adam: _CpuAdam
) -> list[_Measurement]:
    """Return the measurements of these parts."""
    usable = usable_machine(machine)
    return [
        _measurement(
            part.key,
            part.title,
            _estimate_s(usable, shape, part),
            partial(_measure, part=part, shape=shape, machine=machine, cpu_adam=cpu_adam),
        )
        for part in parts
    ]


def _estimate_s(machine: Machine, shape: RunSpec, part: _Part) -> float:
    if not machine.gpus:
        return _CPU_RUN_S
    if part.losses_only:
        return _START_S + _LOSS_STEPS * _LOSS_STEP_S
    try:
        step_s = make_plan(_spec_of(shape, part), machine).step_s
    except SoTuiError:  # when it is measured, the report says why
        step_s = None
    return _START_S + _STEPS * (step_s or 10.0)


def _measure(
    tell: Callable[[str], None],
    limit_s: float,
    *,
    part: _Part,
    shape: RunSpec,
    machine: Machine,
    cpu_adam: _CpuAdam,
) -> TrainingFound:
    """Train a few steps of a part and return its figures beside the prediction. The run is deleted;
    one that failed keeps its folder.

    Plans of the same model use the figures from then on, as those of a probe.
    """
    deadline = time.monotonic() + limit_s
    usable = usable_machine(machine)
    if part.published or part.settings.get("offload.mode") == "zerooffload":
        tell(f"{part.title}: DeepSpeed's CPU Adam is compiled unless it is cached")
        cpu_adam.wait(limit_s)
    elif part.losses_only:
        _ = cpu_adam.compiled
    measured_steps = _LOSS_STEPS - WARMUP_STEPS if part.losses_only else MEASURED_STEPS
    spec = probe_spec(_spec_of(shape, part), "random", measured_steps=measured_steps)
    plan = _placed(make_plan(spec, usable), usable, part.placed)

    def report(record: MetricRecord) -> None:
        if isinstance(record, StepRecord):
            tell(f"{part.title}: step {record.step}, {record.step_s:.3f} s, loss {record.loss:.4f}")
        elif isinstance(record, PhaseRecord):
            tell(f"{part.title}: {record.phase}")

    ran = run_to_end(
        launch_of(plan, usable), probes_dir(), report, limit_s=deadline - time.monotonic()
    )
    measured, counted = measured_of(ran, plan), ran.counted(plan)
    found = probe_of(measured, plan, usable)
    if part.placed == "bound" and not (part.published or part.losses_only):
        calibration.store(machine, probe=found)
    with suppress(OSError):  # what is left of it is below the probes, where nothing lists it
        delete_run(ran.run)
    seconds = sum(step.step_s for step in counted)

    def mean_of(name: str) -> float:
        total: float = sum(getattr(step, name) * step.step_s for step in counted)
        return total / seconds

    return TrainingFound(
        settings=part.settings | ({"as-published": "true"} if part.published else {}),
        ranks=plan.gpus,
        placed=part.placed,
        clipping=plan.spec.train.gradient_clipping,
        steps=measured.steps,
        held_back_steps=measured.held_back_steps,
        measured=found.actual,
        predicted=found.predicted,
        workload=found.workload,
        useful_tokens_per_s=sum(step.useful_tokens for step in counted) / seconds,
        model_tflops_per_gpu=mean_of("model_tflops_per_gpu"),
        example_tflops=mean_of("seed_tflops_total"),
        losses=tuple(step.loss if math.isfinite(step.loss) else None for step in ran.steps),
        losses_only=part.losses_only,
    )


SHARED = "shared"
"""Folder, below that of the report, of the form without names."""


def validate(
    machine: Machine, folder: Path, *, seconds: float, gpus: int, share: bool, tell: Tell
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
        KeyboardInterrupt: The user stopped. What was measured is in the folder, and a later call
            continues.
    """
    usable = usable_machine(machine)
    gpus = min(gpus, len(usable.gpus))
    shape = _shape_for(usable)
    begun = _begun(machine, folder, gpus, _shape_name(shape))

    def write(found: Report) -> None:
        show.write(folder, found)
        if share:
            show.write(folder / SHARED, report.shared(found))

    with _CpuAdam() as cpu_adam:
        return _run_parts(
            begun,
            [
                *_machine_measurements(machine, folder),
                *_training_measurements(machine, shape, _parts_of(usable, gpus), cpu_adam),
            ],
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
    if replace(found, begun=new.begun, outcomes=(), agreement=()) != new:
        raise reject(
            "another-report",
            "--out",
            str(folder),
            f"has a report of {found.host or 'a shared one'}, so-tui {found.so_tui}, {found.gpus} "
            f"GPUs, {found.shape}",
            "Name another folder with --out, or delete that report.",
        )
    return found
