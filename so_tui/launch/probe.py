"""Probes: a few real steps with a plan's settings, compared with the prediction."""

from __future__ import annotations

import hashlib
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import UTC, datetime
from itertools import chain, cycle, islice
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from so_tui.launch.executors import ensure_supervised
from so_tui.launch.lifecycle import start, stop
from so_tui.launch.supervisor.ending import request_stop
from so_tui.machine.types import Machine
from so_tui.model.flops import flops_of
from so_tui.model.profile import profile_of
from so_tui.plan.fit import assess, fetching_of, step_model, target_of
from so_tui.plan.host_memory import steady_bytes
from so_tui.plan.measured import STEP_PARTS, Figures, Passes, Probe
from so_tui.plan.plan import Launch, Plan
from so_tui.plan.planner import make_plan
from so_tui.plan.rates import DIGEST
from so_tui.plan.workload import Workload, seen
from so_tui.runs import RunDirectory, RunReader
from so_tui.runs.records import (
    FINAL_STATES,
    EndRecord,
    MetricRecord,
    RunState,
    Sample,
    StepRecord,
)
from so_tui.spec import RunSpec, SoTuiError, resolve_source
from so_tui.spec.check import write_atomic
from so_tui.trust.decoding import LARGEST_FILE_BYTES, decode_json
from so_tui.trust.files import read_bounded
from so_tui.trust.folders import make_folders
from so_tui.trust.text import so_tui_command
from so_tui.units import thousands

# Rows for a probe without data of its own: documents as long as the plan takes them to be, made of
# the embedded rows' words.
#
# The embedded rows themselves are short and few. They would fill a part of a long sequence, and
# attention would be much cheaper than planned.


EMBEDDED_ROWS = "builtin:tiny/rows.jsonl"
_CHARACTERS_PER_TOKEN = 3.6
"""Of the embedded tokenizer in the embedded rows."""
_ROOM = 1.25
"""A document that is to fill a sequence is longer, and is cut."""
_MOST_CHARACTERS = 32 << 20
"""In the file; its documents are trained several times if a step needs more."""


class _Row(Struct, frozen=True):
    """A row in the Alpaca format."""

    instruction: str
    output: str
    input: str = ""


def write_rows(spec: RunSpec, workload: Workload, folder: Path) -> Path:
    """Write the rows for a probe of a spec.

    Args:
        spec: What is probed.
        workload: What is known of the spec's data.
        folder: Where to write; the file is named by its content.

    Raises:
        OSError: The file cannot be written.
    """
    text = b"".join(msgspec.json.encode(row) + b"\n" for row in _rows_for(spec, workload))
    make_folders(folder)
    path = folder / f"rows-{hashlib.sha256(text).hexdigest()[:16]}.jsonl"
    write_atomic(path, text)
    return path


def _rows_for(spec: RunSpec, workload: Workload) -> Iterator[_Row]:
    """Yield enough documents for a step, each of as many tokens as attention's cost of the data
    follows; of a whole sequence if unknown.
    """
    length = spec.data.sequence_length
    tokens = min(length, round(workload.attended_tokens) or length)
    characters = round(tokens * _CHARACTERS_PER_TOKEN * (_ROOM if tokens == length else 1))
    wanted = (
        spec.ranks * spec.train.micro_batch * spec.gradient_accumulation_steps * length // tokens
        + 1
    )
    prompt = round(characters * (1 - min(1.0, workload.trained_share / workload.useful_share)))
    words = _words()
    for _ in range(max(1, min(wanted, _MOST_CHARACTERS // characters))):
        yield _Row(_text(words, prompt) or "Write.", _text(words, characters - prompt))


def _words() -> Iterator[str]:
    """Yield the words of the embedded rows, over and over."""
    lines = read_bounded(Path(resolve_source(EMBEDDED_ROWS)), LARGEST_FILE_BYTES).splitlines()
    rows = [decode_json(line, _Row) for line in lines]
    return cycle(
        list(chain.from_iterable(f"{row.instruction} {row.output}".split() for row in rows))
    )


def _text(words: Iterator[str], characters: int) -> str:
    """Return the next words, with this many characters in all."""
    # Each word and its space take two characters at least.
    return " ".join(islice(words, (characters + 1) // 2))[:characters]


WARMUP_STEPS = 2
MEASURED_STEPS = 4
_POLL_S, _ENDING_POLL_S = 0.5, 0.05
"""Between looks at a run; the second once its trainer has written the last record."""
_GRACE_S = 20.0
"""What a run that is given up may take to stop before it is killed. It saves nothing."""

_TIMES = ("step_s", "forward_s", "backward_s", "exposed_optimizer_s")
_SIZES = ("gpu_reserved_bytes", "gpu_device_bytes", "host_bytes")
"""Figures in seconds and in bytes."""

Data = Literal["random", "spec"]
"""What a probe trains on: random weights and rows made of the embedded ones, so that nothing is
downloaded, or the spec's own.
"""


class Measured(Struct, frozen=True, kw_only=True):
    """What was measured of a short run."""

    figures: Figures
    workload: Workload
    steps: int
    held_back_steps: int = 0
    """Those without a speculative step that was final; all of them where nothing speculates."""


def probe_spec(
    spec: RunSpec, data: Data, *, rows: Path | None = None, measured_steps: int = MEASURED_STEPS
) -> RunSpec:
    """Return the spec of a short run with the same settings, without checkpoints, evaluation and
    trackers, that records every step.

    ``rows`` is what a probe with random weights trains on (``write_rows``); without it the embedded
    rows.
    """
    model, source = spec.model, replace(spec.data, held_out=0.0, evaluation="", evaluation_split="")
    if data == "random":
        model = replace(model, weights="random", tokenizer="builtin:tiny")
        source = replace(
            source,
            source=str(rows) if rows else EMBEDDED_ROWS,
            subset="",
            split="train",
            format="alpaca",
        )
    return replace(
        spec,
        name="probe",
        model=model,
        data=source,
        train=replace(spec.train, log_interval=1, evaluate_every_steps=0, warmup_ratio=0.0),
        checkpoint=replace(
            spec.checkpoint, every_steps=0, every_minutes=0.0, at_end=False, export=False
        ),
        tracking=replace(spec.tracking, tensorboard=False, wandb=False),
        benchmark=replace(spec.benchmark, warmup_steps=WARMUP_STEPS, measured_steps=measured_steps),
    )


class _Ran(Struct, frozen=True):
    """What a run recorded."""

    run: RunDirectory
    state: RunState
    records: list[MetricRecord]
    samples: list[Sample]

    @property
    def steps(self) -> list[StepRecord]:
        return [record for record in self.records if isinstance(record, StepRecord)]

    def counted(self, plan: Plan) -> list[StepRecord]:
        """Return the steps after the warm-up; all if there are no others. Raises SoTuiError if it
        recorded no step.
        """
        steps = self.steps
        if not steps:
            raise SoTuiError(f"{self.run.name} recorded no step")
        return [step for step in steps if step.step > plan.spec.benchmark.warmup_steps] or steps


def run_to_end(
    launch: Launch,
    runs_dir: Path,
    report: Callable[[MetricRecord], None],
    *,
    limit_s: float = 1800.0,
) -> _Ran:
    """Start a run, wait for its end, and return what it recorded.

    Args:
        launch: From ``prepare``.
        runs_dir: Where to make the run directory.
        report: Receives every record.
        limit_s: How long the run may take, in seconds.

    Raises:
        InputError, Refused: As for ``start``.
        SoTuiError: The run failed, or took too long and was stopped, or killed.
    """
    run = start(launch, runs_dir=runs_dir)
    reader, deadline = RunReader(run), time.monotonic() + limit_s
    records: list[MetricRecord] = []
    samples: list[Sample] = []
    try:
        while True:
            final = reader.state is not None and reader.state.state in FINAL_STATES
            update = reader.poll()  # the state is read last: what came before it is known next time
            sampled = list(chain.from_iterable(update.samples.values()))
            for record in update.records:
                report(record)
            records += update.records
            samples += sampled
            state = update.state
            if state is not None and final and not (update.records or sampled):
                break
            if time.monotonic() > deadline:
                stop(run, grace_s=_GRACE_S)
                raise SoTuiError(
                    f"{run.name} took longer than {limit_s:,.0f} s; "
                    f"`{so_tui_command('logs', str(run.path))}` shows what it did"
                )
            ensure_supervised(run)
            ending = bool(records) and isinstance(records[-1], EndRecord)
            time.sleep(_ENDING_POLL_S if ending else _POLL_S)
    except BaseException:  # also an interrupt, whose user does not wait
        request_stop(run, grace_s=_GRACE_S)
        raise
    if state.state != "finished":
        raise SoTuiError(
            f"{run.name} {state.state}: {state.reason}. `{so_tui_command('logs', str(run.path))}` "
            "shows what its processes wrote"
        )
    return _Ran(run, state, records, samples)


def measured_of(ran: _Ran, plan: Plan) -> Measured:
    """Return what a finished run measured of its steps after the warm-up. Raises SoTuiError if it
    recorded no step.
    """
    steps, counted = ran.steps, ran.counted(plan)
    used = {rank.gpu for rank in plan.binding}
    device = [
        gpu.memory_used_bytes or 0
        for sample in ran.samples
        for gpu in sample.gpus
        if gpu.index in used
    ]
    reserved = max(step.gpu_memory_peak_bytes or 0 for step in steps)
    return Measured(
        figures=Figures(
            **{name: median(getattr(step, name) for step in counted) for name in _TIMES},
            gpu_reserved_bytes=reserved,
            gpu_device_bytes=max(device, default=0) if reserved else 0,
            host_bytes=max(step.host_memory_bytes or 0 for step in steps),
        ),
        workload=_workload_of(counted, plan),
        steps=len(counted),
        held_back_steps=_held_back(steps, {step.step for step in counted}),
    )


def _held_back(steps: Sequence[StepRecord], counted: Collection[int]) -> int:
    """Return in how many of the counted steps no speculative step was kept."""
    kept_before = [0, *(step.kept_steps for step in steps)]
    return sum(
        step.step in counted and step.kept_steps == before
        for step, before in zip(steps, kept_before, strict=False)
    )


def _workload_of(steps: Sequence[StepRecord], plan: Plan) -> Workload:
    """Return the workload of these steps, from their counts, the attention FLOPs that they
    executed, and what the run saw of its data.
    """
    positions = len(steps) * plan.tokens_per_step
    useful = sum(step.useful_tokens for step in steps)
    executed = sum(step.model_tflops_per_gpu * 1e12 * step.step_s for step in steps) * plan.gpus
    flops = flops_of(plan.spec.model)
    attention = (executed - 6.0 * flops.active_parameters * useful) / 3.0

    def attention_of(length: int) -> float:
        return flops.attention_forward([length]) * useful / length

    shorter = range(1, plan.spec.data.sequence_length)
    data = seen(plan.spec)
    return Workload(
        attended_tokens=1.0 + bisect_left(shorter, attention, key=attention_of),
        trained_share=sum(step.trained_tokens for step in steps) / positions,
        useful_share=useful / positions,
        row_shares=data.workload.row_shares if data else (),
    )


def predicted_of(spec: RunSpec, machine: Machine, workload: Workload) -> tuple[Plan, Figures]:
    """Return the plan of a spec for this workload without any probe's correction, and its figures
    as a probe measures them.
    """
    plan = make_plan(spec, machine, workload=workload, probed=False)
    step = plan.step
    return plan, Figures(
        step_s=step.total_s if step else 0.0,
        **{name: getattr(step, name) if step else 0.0 for name in _TIMES[1:]},
        gpu_reserved_bytes=plan.gpu_reserved_bytes,
        gpu_device_bytes=plan.gpu_bytes,
        host_bytes=steady_bytes(plan.breakdown, plan.gpus),
    )


def probe_of(found: Measured, plan: Plan, machine: Machine) -> Probe:
    """Return the record of a finished probe: measured, and predicted for the same data and as many
    steps that waited for the norm.
    """
    return Probe(
        measured=datetime.now(UTC).isoformat(timespec="seconds"),
        model=profile_of(plan.spec.model).key,
        mode=plan.mode,
        ranks=plan.gpus,
        settings=settings_text(plan),
        workload=found.workload,
        predicted=_predicted_for(found, plan, machine),
        actual=found.figures,
        constants=DIGEST,
        step_parts=STEP_PARTS,
        host_weights=plan.spec.offload.keeps_weights_on_host,
        computing=_computing(plan.spec, machine, found.workload),
    )


def _computing(spec: RunSpec, machine: Machine, workload: Workload) -> Passes | None:
    """Return what is predicted of passes that fetch weights as if the GPU had them; None where it
    has.
    """
    target = target_of(spec, machine, workload=workload, probed=False)
    model = step_model(assess(spec, target).placement, target)
    fetching = fetching_of(model) if model else None
    return fetching.computing if fetching else None


def _predicted_for(found: Measured, plan: Plan, machine: Machine) -> Figures:
    """Return the predicted figures; times are medians over the measured steps, each predicted as it
    was taken.

    A step whose norm exceeds the limit takes longer, though the plan is right.
    """
    _, predicted = predicted_of(plan.spec, machine, found.workload)
    if not plan.host_optional_bytes or not found.held_back_steps:
        return predicted
    _, waiting = predicted_of(
        plan.spec.changed("offload", speculation="off"), machine, found.workload
    )
    kept = found.steps - found.held_back_steps

    taken = [predicted] * kept + [waiting] * found.held_back_steps
    return replace(
        predicted, **{name: median(getattr(each, name) for each in taken) for name in _TIMES}
    )


def settings_text(plan: Plan) -> str:
    """Return a plan's settings in words: ``superoffload 0.90, micro-batch 4 x 4,096, full,
    gradient_clipping 1``.

    Probes whose steps take other time or memory have other settings: a probe replaces one of the
    same settings.
    """
    spec = plan.spec
    mode = plan.mode if plan.mode == "gpu" else f"{plan.mode} {plan.ratio:.2f}"
    steps = (
        "" if spec.gradient_accumulation_steps == 1 else f" x {spec.gradient_accumulation_steps}"
    )
    micro_batch = (
        f"micro-batch {spec.train.micro_batch} x {thousands(spec.data.sequence_length)}{steps}"
    )
    model, train, offload = spec.model, spec.train, spec.offload
    # The other settings that decide what a step does, and their usual values, which are left out.
    others = (
        ("gradient_clipping", f"{train.gradient_clipping:g}", "0"),
        ("speculation", offload.speculation if train.gradient_clipping else "auto", "auto"),
        ("sequence_parallel", str(train.sequence_parallel), "1"),
        ("activation_offload", model.activation_offload, "auto off"),
        ("tiled_mlp", model.tiled_mlp, "auto off"),
        ("attention", model.attention, "auto"),
        ("kernels", model.kernels, "auto"),
        ("parameters", offload.parameters, "auto none"),
        ("states", offload.states, "fp32"),
        ("engine", offload.engine, "so-tui"),
    )
    named = (f"{key} {value}" for key, value, usual in others if value not in usual.split())
    return ", ".join((mode, micro_batch, model.activation_checkpointing, *named))


def compared(probe: Probe) -> Iterator[tuple[str, float, float, float | None]]:
    """Yield name, predicted, measured and relative error (predicted / measured - 1) of each figure
    that was measured.
    """
    for name in (*_TIMES, *_SIZES):
        unit = 2.0**30 if name in _SIZES else 1.0
        predicted, actual = (getattr(of, name) / unit for of in (probe.predicted, probe.actual))
        if actual:
            error = predicted / actual - 1 if predicted else None
            yield name.replace("_bytes", "_gib"), predicted, actual, error
