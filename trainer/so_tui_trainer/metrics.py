"""The one owner of a run's figures: what each rank measured is gathered, and rank 0 writes one record a logged step.

Definitions are in ``docs/metrics.md``; formulas in ``so_tui.model.flops``.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from so_tui.machine.memory import pss_bytes
from so_tui.model.architecture import Architecture, architecture
from so_tui.model.flops import Flops, flops_of, hw_flops, model_flops, peak_flops, seed_tflops_total
from so_tui.model.loss import recomputed_logits
from so_tui.runs import MetricsWriter
from so_tui.runs.records import EndRecord, MetricRecord, StepRecord, WarningRecord
from so_tui.spec import RunSpec
from so_tui_trainer.clocks import Laps, StepTimes
from so_tui_trainer.data.batches import Work
from so_tui_trainer.failures import NonFiniteError
from so_tui_trainer.ranks import Ranks
from so_tui_trainer.trackers import Sidecars, Tracker

_MEMORY_INTERVAL_S = 20.0
"""Summing up the proportional memory of a process tree walks all its pages: milliseconds per gigabyte."""


class Recorder:
    """Writes records on rank 0, for the run itself and for its trackers; elsewhere it does nothing."""

    def __init__(self, writer: MetricsWriter | None, attempt: int, trackers: tuple[Tracker, ...] = ()) -> None:
        self._writer = writer
        self._sidecars = Sidecars(trackers)
        self.attempt = attempt
        self._lost, self._why = 0, ""

    @property
    def hanging(self) -> bool:
        """Whether a tracker did not end."""
        return self._sidecars.hanging

    def write(self, record: MetricRecord) -> None:
        """Raises OSError for an end record that cannot be written. What else a full disk does not take is only lost, and said later."""
        if self._writer is None:
            return
        self._sidecars.offer(record)
        try:
            self._tell_of_loss()
            self._writer.append(record)
        except OSError as error:
            if isinstance(record, EndRecord):
                raise
            if not self._lost:
                print(f"records of the run cannot be written: {error}", file=sys.stderr, flush=True)
            self._lost, self._why = self._lost + 1, error.strerror or str(error)
        self._tell()

    def end_tracking(self) -> None:
        """Let the trackers send what they have; what they could not do is a warning."""
        self._sidecars.close()
        self._tell()

    def close(self) -> None:
        """After the last record."""
        if self._writer is not None:
            self._writer.close()

    def _tell(self) -> None:
        for trouble in self._sidecars.troubles():
            message, suggestion = f"{trouble}; nothing more is sent there", "The run's own records are whole; nothing else is lost"
            self.write(WarningRecord(attempt=self.attempt, time=time.time(), message=message, suggestion=suggestion))

    def _tell_of_loss(self) -> None:
        """As soon as there is room again. Raises OSError."""
        if self._lost and self._writer is not None:
            message = f"{self._lost} records could not be written ({self._why}); training went on"
            suggestion = "Free space on the disk of the run directory; nothing of the training is lost"
            self._writer.append(WarningRecord(attempt=self.attempt, time=time.time(), message=message, suggestion=suggestion))
            self._lost = 0


class Step(NamedTuple):
    """A finished step as the loop hands it over: nothing in it has waited for the GPU."""

    number: int
    work: Work
    learning_rate: float
    loss: Tensor
    """This rank's share of the step's loss; the sum over ranks is the token-weighted mean times the number of ranks."""
    laps: Laps
    router_loss: Tensor | None = None
    """As ``loss``: this rank's share of the load-balancing loss."""


class Gauges(NamedTuple):
    """What only the offload engine knows of a step."""

    gradient_norm: float | None
    adam_busy_s: float
    exposed_in_forward_s: float
    """How long the forward pass waited for weights of the step before: it is the optimizer's time, not the forward's."""


class AllRankMetrics(NamedTuple):
    """What the ranks measured, put together."""

    loss: float
    gpu_memory_peak_bytes: int | None
    host_memory_bytes: int
    slowest_rank: int
    adam_busy_s: float
    router_loss: float | None


class Metrics:
    """Turns steps into records, at logging steps only; watches for values that are not finite in between."""

    def __init__(self, spec: RunSpec, ranks: Ranks, recorder: Recorder, parameters: int) -> None:
        self._spec, self._ranks, self._recorder, self._parameters = spec, ranks, recorder, parameters
        self._shape: Architecture = architecture(spec.model.config)
        self._flops: Flops = flops_of(spec.model)
        self._peak = peak_flops(torch.cuda.get_device_name(ranks.device)) if ranks.device.type == "cuda" else None
        self._first_bad_step = torch.zeros((), dtype=torch.int64, device=ranks.device)
        self._memory_bytes, self._memory_at = 0, -math.inf
        self._measured: list[Step] = []
        self._gauges: dict[int, Gauges] = {}

    def watch(self, step: Step) -> None:
        """Remember on the device the first step whose loss was not finite; keep a benchmark's steps."""
        bad = ~torch.isfinite(step.loss) & (self._first_bad_step == 0)
        self._first_bad_step = torch.where(bad, step.number, self._first_bad_step)
        if self._spec.benchmark.measured_steps and step.number > self._spec.benchmark.warmup_steps:
            self._measured.append(step)

    def check(self) -> None:
        """Waits for the GPU. Raises NonFiniteError, on all ranks alike, when some rank's loss was not finite in any step so far."""
        self._raise_if_bad(row[0] for row in self._ranks.table([float(self._first_bad_step)]))

    def log(self, step: Step, gauges: Gauges) -> StepRecord:
        """The record of a step, written by rank 0. Waits for the GPU. Raises NonFiniteError on all ranks alike."""
        times = _optimizer_apart(step.laps.read(), gauges.exposed_in_forward_s)
        if self._spec.benchmark.measured_steps:
            self._gauges[step.number] = gauges
        alone = times.data + times.optimizer + times.other
        peak = float(torch.cuda.max_memory_reserved(self._ranks.device)) if self._ranks.device.type == "cuda" else 0.0
        table = self._ranks.table(
            [
                float(self._first_bad_step),
                float(step.loss),
                alone,
                peak,
                float(self._host_memory()),
                gauges.adam_busy_s,
                0.0 if step.router_loss is None else float(step.router_loss),
            ]
        )
        bad, losses, alone_s, peaks, memory, busy, router = zip(*table, strict=True)
        self._raise_if_bad(bad)
        if gauges.gradient_norm is not None and not math.isfinite(gauges.gradient_norm):
            raise NonFiniteError(step.number, "gradient norm")
        everyone = AllRankMetrics(
            loss=sum(losses) / self._ranks.size,
            gpu_memory_peak_bytes=int(max(peaks)) or None,
            host_memory_bytes=int(sum(memory)),
            # In forward and backward the ranks wait for each other; who is late shows in what each does alone.
            slowest_rank=alone_s.index(max(alone_s)),
            adam_busy_s=max(busy),
            router_loss=None if step.router_loss is None else sum(router) / self._ranks.size,
        )
        record = self._record(step, times, gauges.gradient_norm, everyone)
        self._recorder.write(record)
        return record

    def summary(self) -> dict[str, float]:
        """Medians over a benchmark's measured steps, by this rank's clock; empty in a normal run. Waits for the GPU.

        What the engine measures is known of logged steps only: Adam's time, and how long a forward pass waited for the optimizer. Where
        there are any, the medians of these parts are over them.
        """
        if not self._measured:
            return {}
        logged = [step for step in self._measured if step.number in self._gauges]
        every, split = self._measured_rates(self._measured), self._measured_rates(logged or self._measured)
        medians = {name: statistics.median(rates[name] for rates in every) for name in every[0]}
        for name in ("forward_s", "exposed_optimizer_s"):
            medians[name] = statistics.median(rates[name] for rates in split)
        if logged:
            medians["adam_busy_s"] = statistics.median(self._gauges[step.number].adam_busy_s for step in logged)
        return medians | {"measured_steps": float(len(every))}

    def _measured_rates(self, steps: Iterable[Step]) -> list[dict[str, Any]]:
        nothing = Gauges(None, 0.0, 0.0)
        return [
            self._rates(step.work, _optimizer_apart(step.laps.read(), self._gauges.get(step.number, nothing).exposed_in_forward_s))
            for step in steps
        ]

    def _record(self, step: Step, times: StepTimes, gradient_norm: float | None, everyone: AllRankMetrics) -> StepRecord:
        rates = self._rates(step.work, times)
        return StepRecord(
            attempt=self._recorder.attempt,
            time=time.time(),
            step=step.number,
            loss=everyone.loss,
            learning_rate=step.learning_rate,
            gradient_norm=gradient_norm,
            useful_tokens=step.work.useful_tokens,
            trained_tokens=step.work.trained_tokens,
            mfu=rates["model_tflops_per_gpu"] * 1e12 / self._peak if self._peak else None,
            gpu_memory_peak_bytes=everyone.gpu_memory_peak_bytes,
            host_memory_bytes=everyone.host_memory_bytes,
            slowest_rank=everyone.slowest_rank,
            adam_busy_s=everyone.adam_busy_s or None,
            router_loss=everyone.router_loss,
            **rates,
        )

    def _rates(self, work: Work, times: StepTimes) -> dict[str, Any]:
        """Every field of a record that is a time or a quantity by time."""
        checkpointing, lengths = self._spec.model.repeats_whole_layers, work.document_lengths.tolist()
        model = model_flops(self._flops, work.useful_tokens, lengths)
        hardware = executed_flops(self._spec, self._flops, self._shape, work)
        seed = seed_tflops_total(
            self._parameters, self._shape, self._spec.data.sequence_length, work.sequences, times.total, checkpointing=checkpointing
        )
        return {
            "step_s": times.total,
            "data_s": times.data,
            "forward_s": times.forward,
            "backward_s": times.backward,
            "exposed_optimizer_s": times.optimizer,
            "other_s": times.other,
            "useful_tokens_per_s_total": work.useful_tokens / times.total,
            "model_tflops_per_gpu": model / times.total / self._ranks.size / 1e12,
            "hw_tflops_per_gpu": hardware / times.total / self._ranks.size / 1e12,
            "seed_tflops_total": seed,
        }

    def _raise_if_bad(self, first_bad_steps: Iterable[float]) -> None:
        if bad := [int(step) for step in first_bad_steps if step]:
            raise NonFiniteError(min(bad), "loss")

    def _host_memory(self) -> int:
        """Proportional set size of this rank and its children (Adam workers), looked up now and then."""
        if time.monotonic() - self._memory_at > _MEMORY_INTERVAL_S:
            self._memory_at = time.monotonic()
            self._memory_bytes = sum(pss_bytes(pid) or 0 for pid in _tree(os.getpid()))
        return self._memory_bytes


def executed_flops(spec: RunSpec, flops: Flops, shape: Architecture, work: Work) -> float:
    """What all GPUs execute for a step: with what is computed again, padding included. The head runs on trained tokens only."""
    lengths = work.document_lengths.tolist()
    executed = hw_flops(flops, work.computed_tokens, lengths, checkpointing=spec.model.repeats_whole_layers, head_recomputed=False)
    executed -= 6.0 * flops.head_parameters * (work.computed_tokens - work.trained_tokens)
    micro_batches = spec.gradient_accumulation_steps * spec.ranks
    twice = recomputed_logits(work.trained_tokens // micro_batches, shape.vocabulary)
    return executed + 2.0 * shape.hidden * twice * micro_batches


def _optimizer_apart(times: StepTimes, exposed_in_forward_s: float) -> StepTimes:
    moved = min(exposed_in_forward_s, times.forward)
    return times._replace(forward=times.forward - moved, optimizer=times.optimizer + moved)


def _tree(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = [child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    except OSError:  # it ended meanwhile
        return
    for child in children:
        yield from _tree(int(child))
