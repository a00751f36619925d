"""Training parts of a validation: short runs of one shape in different settings, beside what is predicted for each."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from so_tui.folders import probes_dir
from so_tui.launch import partitioning
from so_tui.launch.executors.local import LocalExecutor
from so_tui.launch.preparation import launch_of, usable_machine
from so_tui.launch.probe import (
    MEASURED_STEPS,
    WARMUP_STEPS,
    measured_of,
    probe_of,
    probe_spec,
    records_and_samples,
    run_to_end,
)
from so_tui.machine.numa import distance
from so_tui.machine.types import Machine, NumaNode
from so_tui.model.architecture import architecture
from so_tui.plan import calibration, make_plan
from so_tui.plan.published import with_layers
from so_tui.plan.types import DeepSpeedBinding, MemoryPolicy, Plan, RankBinding
from so_tui.runs import RunDirectory, delete_run
from so_tui.runs.records import MetricRecord, PhaseRecord, StepRecord
from so_tui.runs.state import read_state
from so_tui.spec import RunSpec, SoTuiError, find_preset, with_values
from so_tui.spec.as_published import EXAMPLE_SEQUENCES, as_published
from so_tui.trust.printable import so_tui_command
from so_tui.validation.cpu_adam import CpuAdam
from so_tui.validation.phases import phase_seconds
from so_tui.validation.report import Placed, TrainingFound
from so_tui.validation.runner import Measure, Measurement

_GPU_SHAPE, _CPU_SHAPE = "qwen3-4b-random", "tiny"
_LAYERS = (36, 28, 20, 14, 10, 6, 4)
"""Of the 4B shape, whose whole training should fit one GPU without offload."""
_START_S, _STEPS = 60.0, WARMUP_STEPS + MEASURED_STEPS
"""What starting, loading and ending take, and the steps of a run."""
_CPU_RUN_S = 35.0

_LOSS_STEPS = 200
_LOSS_LEARNING_RATE = "3e-4"
"""A tenth of the preset's, at which rounding grows until two runs of the same arithmetic differ by 6 % at a step; here by 0.2 %."""
_LOSS_STEP_S = 0.1
"""At most, of ``tiny`` on GPUs."""

_PLAIN = {
    "offload.mode": "superoffload",
    "offload.engine": "so-tui",
    "train.gradient_clipping": "0",
    "offload.ratio": "0.9",
}
_CLIPPED = _PLAIN | {"train.gradient_clipping": "1"}
_ON_GPU = {"offload.mode": "gpu", "train.gradient_clipping": "0"}
_ZEROOFFLOAD = {
    "offload.mode": "zerooffload",
    "offload.ratio": "1.0",
    "train.gradient_clipping": "0",
}


class Part(Struct, frozen=True, kw_only=True):
    """One run: a title, settings beside those of the shape, on how many ranks, bound how."""

    key: str
    title: str
    settings: dict[str, str] = {}
    ranks: int = 1
    placed: Placed = "bound"
    published: bool = False
    """With the settings of DeepSpeed's SuperOffload examples."""
    losses_only: bool = False
    """Many steps of ``tiny`` in place of a few of the shape: for its losses, not for its speed."""
    partitioned: bool = False
    """With partitions of cache and memory bandwidth for main and Adam cores."""

    @property
    def needs_deepspeeds_adam(self) -> bool:
        return self.published or self.settings.get("offload.mode") == "zerooffload"


def shape_for(machine: Machine) -> RunSpec:
    """Return what is trained: the largest of the shapes that fits one GPU without offload; without GPUs, ``tiny``."""
    if not machine.gpus:
        return with_values(
            find_preset(_CPU_SHAPE).spec, {"gpus": "1", "train.gradient_accumulation": "1"}
        )
    changes = {
        "gpus": "1",
        "train.micro_batch": str(EXAMPLE_SEQUENCES),
        "train.gradient_accumulation": "1",
    }
    spec = with_values(
        find_preset(_GPU_SHAPE).spec,
        changes | {"model.activation_checkpointing": "full", "model.kernels": "plain"},
    )
    shapes = [with_layers(spec, layers) for layers in _LAYERS]
    return next(
        (
            shape
            for shape in shapes
            if make_plan(with_values(shape, {"offload.mode": "gpu"}), machine).verdict == "fits"
        ),
        shapes[-1],
    )


def shape_name(spec: RunSpec) -> str:
    """Return the shape in words."""
    return f"{spec.name}, {architecture(spec.model.config).layers} layers"


def parts_of(machine: Machine, gpus: int, *, partitions: bool = False) -> Iterator[Part]:
    """Yield the training parts for a machine, the most telling first.

    Args:
        machine: Where.
        gpus: The most GPUs that a run may have.
        partitions: Whether runs may partition cache and memory bandwidth here.
    """
    yield from _parts(machine, gpus) if machine.gpus else _parts_without_gpus()
    if partitions:
        title = "our engine, cache and memory bandwidth partitioned"
        yield Part(key="ours-partitioned", title=title, settings=_PLAIN, partitioned=True)


def _parts_without_gpus() -> Iterator[Part]:
    yield Part(key="ours", title="SuperOffload with our engine, without clipping", settings=_PLAIN)
    yield Part(key="zerooffload", title="ZeRO-Offload", settings=_ZEROOFFLOAD)
    yield Part(key="ours-clipped", title="our engine with clipping", settings=_CLIPPED)


def _parts(machine: Machine, gpus: int) -> Iterator[Part]:
    several = [ranks for ranks in (2, 4) if ranks <= gpus]
    yield Part(key="gpu", title="no offload", settings=_ON_GPU)
    yield Part(
        key="ours",
        title="SuperOffload with our engine, ratio 0.9, without clipping",
        settings=_PLAIN,
    )
    yield Part(
        key="unbound", title="our engine, ranks not bound", settings=_PLAIN, placed="unbound"
    )
    if len(_usable_nodes(machine)) > 1:
        yield Part(
            key="wrong-node",
            title="our engine, bound to the wrong NUMA node",
            settings=_PLAIN,
            placed="wrong-node",
        )
    # While these run, DeepSpeed's CPU Adam is compiled for the parts after them.
    for ranks in (1, *several):
        yield from _loss_parts(ranks)
    yield Part(
        key="published",
        title="DeepSpeed's SuperOffload as published, its default for clipping",
        published=True,
    )
    yield Part(key="zerooffload", title="ZeRO-Offload", settings=_ZEROOFFLOAD)
    for ranks in several:
        yield Part(
            key=f"ours-{ranks}",
            title=f"our engine on {ranks} GPUs, the same global batch",
            settings=_PLAIN,
            ranks=ranks,
        )
        yield Part(
            key=f"gpu-{ranks}",
            title=f"no offload on {ranks} GPUs, the same global batch",
            settings=_ON_GPU,
            ranks=ranks,
        )
    yield Part(key="ours-clipped", title="our engine with clipping", settings=_CLIPPED)
    explicit = {"offload.config": "published-clipping", "train.gradient_clipping": "0"}
    yield Part(
        key="published-unclipped",
        title="DeepSpeed's SuperOffload as published, clipping 0",
        settings=explicit,
        published=True,
    )
    if several:
        for ranks in (1, 2):
            yield _published_losses(ranks)
    for ranks in several:
        title = f"DeepSpeed's SuperOffload as published on {ranks} GPUs"
        yield Part(key=f"published-{ranks}", title=title, ranks=ranks, published=True)
    for ratio in ("0.5", "0.7", "1.0"):
        yield Part(
            key=f"ours-{ratio}",
            title=f"our engine, ratio {ratio}",
            settings=_PLAIN | {"offload.ratio": ratio},
        )
    for states in ("bf16-moments", "int8-moments"):
        yield Part(
            key=f"ours-{states}",
            title=f"our engine, {states}",
            settings=_PLAIN | {"offload.states": states},
        )


def _loss_parts(ranks: int) -> Iterator[Part]:
    """Yield the runs whose losses must agree step by step, whatever the number of GPUs: clipped, because the norm is over all of them."""
    where = "on 1 GPU" if ranks == 1 else f"on {ranks} GPUs, the same global batch"
    if ranks == 1:
        settings = _ON_GPU | {"train.gradient_clipping": "1"}
        yield Part(
            key="losses-gpu",
            title=f"tiny without offload {where}",
            settings=settings,
            losses_only=True,
        )
    yield Part(
        key=f"losses-{ranks}",
        title=f"tiny with our engine {where}",
        settings=_CLIPPED,
        ranks=ranks,
        losses_only=True,
    )


def _published_losses(ranks: int) -> Part:
    """Return the run that shows whether DeepSpeed's own SuperOffload learns on so many GPUs, which users of several doubt."""
    settings = {"offload.config": "published-clipping", "train.gradient_clipping": "1"}
    title = f"tiny with DeepSpeed's SuperOffload on {ranks} GPU{'s' * (ranks > 1)}"
    return Part(
        key=f"losses-published-{ranks}",
        title=title,
        settings=settings,
        ranks=ranks,
        published=True,
        losses_only=True,
    )


def spec_of(shape: RunSpec, part: Part) -> RunSpec:
    """Return the spec of a part: as many sequences a step as the shape has, whatever the number of ranks."""
    if part.losses_only:
        shape = with_values(
            find_preset(_CPU_SHAPE).spec,
            {"train.steps": str(_LOSS_STEPS), "train.learning_rate": _LOSS_LEARNING_RATE},
        )
    sequences = shape.train.micro_batch * shape.gradient_accumulation_steps
    ranks = {"gpus": str(part.ranks), "train.micro_batch": str(max(1, sequences // part.ranks))}
    spec = with_values(shape, ranks)
    if part.published:
        spec = as_published(spec)
        # Data and learning rate stay, so that losses can be compared.
        train = replace(spec.train, learning_rate=shape.train.learning_rate)
        spec = replace(
            spec, data=replace(spec.data, sequence_length=shape.data.sequence_length), train=train
        )
    return with_values(spec, part.settings) if part.settings else spec


def placed(plan: Plan, machine: Machine, how: Placed) -> Plan:
    """Return a plan whose ranks are bound as planned, not at all, or each to the cores and memory of another NUMA node."""
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
    """Return the NUMA nodes with cores that this process may use: a job may have those of one superchip only."""
    allowed = set(machine.allowed_cpus)
    return [node for node in machine.cpu_nodes if allowed.intersection(node.cpus)]


def can_partition(machine: Machine, shape: RunSpec) -> bool:
    """Return whether runs of our engine may partition cache and memory bandwidth here."""
    plan = make_plan(with_values(shape, _PLAIN), usable_machine(machine, os.environ))
    return partitioning.possible(plan.binding)


def measurements(
    machine: Machine, shape: RunSpec, parts: Sequence[Part], cpu_adam: CpuAdam
) -> list[Measurement]:
    """Return the measurements of these parts."""

    def measure(part: Part) -> Measure:
        return partial(_measure, part=part, shape=shape, machine=machine, cpu_adam=cpu_adam)

    usable = usable_machine(machine, os.environ)
    return [
        Measurement(part.key, part.title, _estimate_s(usable, shape, part), measure(part))
        for part in parts
    ]


def _estimate_s(machine: Machine, shape: RunSpec, part: Part) -> float:
    if not machine.gpus:
        return _CPU_RUN_S
    if part.losses_only:
        return _START_S + _LOSS_STEPS * _LOSS_STEP_S
    try:
        step_s = make_plan(spec_of(shape, part), machine).step_s
    except SoTuiError:  # when it is measured, the report says why
        step_s = None
    return _START_S + _STEPS * (step_s or 10.0)


def _measure(
    tell: Callable[[str], None],
    limit_s: float,
    *,
    part: Part,
    shape: RunSpec,
    machine: Machine,
    cpu_adam: CpuAdam,
) -> TrainingFound:
    """Train a few steps of a part and return its figures beside the prediction. The run is deleted; one that failed keeps its folder.

    Plans of the same model use the figures from then on, as those of a probe.
    """
    deadline = time.monotonic() + limit_s
    usable = usable_machine(machine, os.environ)
    if part.needs_deepspeeds_adam:
        tell(f"{part.title}: DeepSpeed's CPU Adam is compiled unless it is cached")
        cpu_adam.wait(limit_s)
    elif part.losses_only:
        cpu_adam.begin()
    begun = time.time()
    measured_steps = _LOSS_STEPS - WARMUP_STEPS if part.losses_only else MEASURED_STEPS
    spec = probe_spec(spec_of(shape, part), "random", measured_steps=measured_steps)
    plan = placed(make_plan(spec, usable), usable, part.placed)
    records: list[MetricRecord] = []

    def report(record: MetricRecord) -> None:
        records.append(record)
        if isinstance(record, StepRecord):
            tell(f"{part.title}: step {record.step}, {record.step_s:.3f} s, loss {record.loss:.4f}")
        elif isinstance(record, PhaseRecord):
            tell(f"{part.title}: {record.phase}")

    executor = LocalExecutor({partitioning.VARIABLE: "on" if part.partitioned else "off"})
    run = run_to_end(
        launch_of(plan, usable),
        probes_dir(),
        report,
        executor=executor,
        limit_s=deadline - time.monotonic(),
    )
    if part.partitioned and not _was_partitioned(run):
        raise SoTuiError(
            f"the partitions were not made: `{so_tui_command('logs', str(run.path))}` shows why"
        )
    measured = measured_of(run, plan)
    found = probe_of(measured, plan, usable)
    if part.placed == "bound" and not (part.published or part.partitioned or part.losses_only):
        calibration.store(machine, probe=found)
    state = read_state(run)
    with suppress(OSError):  # what is left of it is below the probes, where nothing lists it
        delete_run(run)
    over = time.time()
    phases = phase_seconds(
        records, begun, state.attempt_started or begun, state.ended or over, over
    )
    steps = [record for record in records if isinstance(record, StepRecord)]
    counted = [step for step in steps if step.step > WARMUP_STEPS] or steps
    seconds = sum(step.step_s for step in counted)
    return TrainingFound(
        settings=part.settings | ({"as-published": "true"} if part.published else {}),
        ranks=plan.gpus,
        placed=part.placed,
        clipping=plan.spec.train.gradient_clipping,
        steps=len(counted),
        held_back_steps=measured.held_back_steps,
        partitioned=part.partitioned,
        measured=found.actual,
        predicted=found.predicted,
        workload=found.workload,
        useful_tokens_per_s=sum(step.useful_tokens for step in counted) / seconds,
        model_tflops_per_gpu=sum(step.model_tflops_per_gpu * step.step_s for step in counted)
        / seconds,
        example_tflops=sum(step.seed_tflops_total * step.step_s for step in counted) / seconds,
        losses=tuple(step.loss if math.isfinite(step.loss) else None for step in steps),
        losses_only=part.losses_only,
        phases=phases,
    )


def _was_partitioned(run: RunDirectory) -> bool:
    _, samples = records_and_samples(run)
    return any(place.mpam_groups for sample in samples for place in sample.placement)
