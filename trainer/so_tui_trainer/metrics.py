"""All figures of a run. Each rank measures, the ranks gather, and rank 0 writes one record for each
logged step.

``docs/metrics.md`` has the definitions, ``so_tui.model.flops`` the formulas.
"""

from __future__ import annotations

import math
import statistics
import sys
import threading
import time
from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import psutil
import torch
from msgspec.structs import replace
from torch import Tensor

from so_tui.machine.host import pss_bytes
from so_tui.model.flops import (
    Flops,
    flops_of,
    hw_flops,
    model_flops,
    peak_flops,
    recomputed_logits,
    seed_tflops_total,
)
from so_tui.model.profile import in_tiles
from so_tui.model.shape import Architecture, architecture
from so_tui.runs.directory import RunDirectory
from so_tui.runs.records import StepRecord
from so_tui.runs.samples import write_network_rate
from so_tui.spec import RunSpec
from so_tui_trainer.data.batches import StepCounts
from so_tui_trainer.failures import NonFiniteError
from so_tui_trainer.older_versions import all_gather_single, reduce_scatter_single
from so_tui_trainer.ranks import Ranks
from so_tui_trainer.recorder import Recorder
from superoffload.transfers import Event, OffloadStats, seconds_between, transfers_for

# Measure the parts of a step without waiting for the GPU: laps are CUDA events in the stream, read
# when a record is due.


StepPart = Literal["data", "forward", "backward", "optimizer", "other"]


class _StepTimes(NamedTuple):
    """Seconds of one step on one rank; the parts sum to ``total``."""

    data: float
    forward: float
    backward: float
    optimizer: float
    other: float

    @property
    def total(self) -> float:
        return sum(self)


class _Laps(NamedTuple):
    """The laps of one step."""

    marks: list[tuple[StepPart, Event]]
    """The part that a lap belongs to, and when it ended; before them, when the step began."""

    def read(self) -> _StepTimes:
        """Return the seconds of each part. Waits until the GPU has passed the last lap."""
        seconds = dict.fromkeys(_StepTimes._fields, 0.0)
        for (_, begin), (part, end) in pairwise(self.marks):
            seconds[part] += seconds_between(begin, end)
        return _StepTimes(**seconds)


class StepClock:
    """Clock of a rank. A step lasts from the end of the one before; what happens in between
    (records, control) is in ``other``.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = transfers_for(device)
        self.restart()

    def restart(self) -> None:
        """Exclude the time since the last lap (a checkpoint, an evaluation)."""
        self._laps = _Laps([])
        self.lap("other")

    def lap(self, part: StepPart) -> None:
        """Assign the time since the last lap to ``part``."""
        self._laps.marks.append((part, self._clock.mark()))

    def end_step(self) -> _Laps:
        """Return the step's laps, and start the next step where the last one ended."""
        laps = self._laps
        self._laps = _Laps(laps.marks[-1:])
        return laps


# How much host memory a rank has, measured beside training.
#
# For a hundred gigabytes the kernel takes more than a second, in which training would stand still.


_INTERVAL_S = 20.0
_SETTLES_S = 120.0
"""While memory is touched for the first time, it is read at each interval, whatever that costs."""
_COST_SHARE = 0.01
"""Most of the time that reads may take after that."""


def _rank_memory_bytes() -> int:
    """Return the proportional set size of this process and its descendants (Adam workers): pages
    that they share count once.
    """
    own = psutil.Process()
    return sum(pss_bytes(each.pid) or 0 for each in (own, *own.children(recursive=True)))


class _HostMemory:
    """The memory of this rank, followed by a thread from the first measurement on.

    Attributes:
        latest_bytes: The newest measurement.
    """

    def __init__(self) -> None:
        self.latest_bytes = _rank_memory_bytes()
        # It ends with the process: nothing depends on it.
        threading.Thread(target=self._follow, name="host memory", daemon=True).start()

    def _follow(self) -> None:
        began, pause_s = time.monotonic(), _INTERVAL_S
        while True:
            time.sleep(pause_s)
            before = time.monotonic()
            self.latest_bytes = _rank_memory_bytes()
            after = time.monotonic()
            if after - began >= _SETTLES_S:
                pause_s = max(_INTERVAL_S, (after - before) / _COST_SHARE)


class Step(NamedTuple):
    """A completed step, as the loop hands it over; nothing in it has waited for the GPU."""

    number: int
    counts: StepCounts
    learning_rate: float
    loss: Tensor
    """This rank's share of the loss. The sum over ranks is the mean over trained tokens times the
    number of ranks.
    """
    laps: _Laps
    router_loss: Tensor | None = None
    """This rank's share of the load-balancing loss, like ``loss``."""


class Metrics:
    """Makes records of logged steps, and checks all losses for being finite."""

    def __init__(self, spec: RunSpec, ranks: Ranks, recorder: Recorder, parameters: int) -> None:
        """Prepare the formulas of a run.

        Args:
            spec: The run's spec.
            ranks: The process group.
            recorder: Writes the records.
            parameters: Number of parameters of the model.
        """
        self._spec, self._ranks, self._recorder = spec, ranks, recorder
        self._parameters = parameters
        self._shape = architecture(spec.model.config)
        self._flops = flops_of(spec.model)
        self._peak = peak_flops(ranks.device_name)
        self._first_bad_step = torch.zeros((), dtype=torch.int64, device=ranks.device)
        self._measured: list[Step] = []
        self._engine_stats: dict[int, OffloadStats] = {}

    @cached_property
    def _memory(self) -> _HostMemory:
        """Begun at the first record, when a step has touched what it needs."""
        return _HostMemory()

    def watch(self, step: Step) -> None:
        """Note, on the device, the first step whose loss is not finite; collect a benchmark's
        steps.
        """
        bad = ~torch.isfinite(step.loss) & (self._first_bad_step == 0)
        self._first_bad_step = torch.where(bad, step.number, self._first_bad_step)
        if self._spec.benchmark.measured_steps and step.number > self._spec.benchmark.warmup_steps:
            self._measured.append(step)

    def check(self) -> None:
        """Check all steps so far. Waits for the GPU.

        Raises:
            NonFiniteError: A loss of some rank was not finite; raised on all ranks.
        """
        self._raise_if_bad(
            row[0] for row in self._ranks.all_gather_row([float(self._first_bad_step)])
        )

    def log(
        self, step: Step, gradient_norm: float | None, engine_stats: OffloadStats
    ) -> StepRecord:
        """Write the record of a step on rank 0. Waits for the GPU. All ranks must call it.

        Args:
            step: The step.
            gradient_norm: Global norm before clipping; None if the engine does not compute it.
            engine_stats: What the step cost on this rank.

        Raises:
            NonFiniteError: A loss or the gradient norm was not finite; raised on all ranks.
        """
        laps = step.laps.read()
        own = _separate_exposed_optimizer(laps, engine_stats.exposed_in_forward_s)
        unsynchronised = own.data + own.optimizer + own.other
        peak = (
            float(torch.cuda.max_memory_reserved(self._ranks.device))
            if self._ranks.device.type == "cuda"
            else 0.0
        )
        table = self._ranks.all_gather_row(
            [
                float(self._first_bad_step),
                float(step.loss),
                unsynchronised,
                peak,
                float(self._memory.latest_bytes),
                engine_stats.adam_busy_s,
                0.0 if step.router_loss is None else float(step.router_loss),
                engine_stats.exposed_in_forward_s,
            ]
        )
        bad, losses, unsynchronised_s, peaks, memory, busy, router, waited_s = zip(
            *table, strict=True
        )
        self._raise_if_bad(bad)
        if gradient_norm is not None and not math.isfinite(gradient_norm):
            raise NonFiniteError(step.number, "gradient norm")
        # All ranks wait for the last one's weights: the others do in the all-gather.
        engine_stats = replace(engine_stats, exposed_in_forward_s=max(waited_s))
        if self._spec.benchmark.measured_steps:
            self._engine_stats[step.number] = engine_stats
        times = _separate_exposed_optimizer(laps, engine_stats.exposed_in_forward_s)
        rates = self._rates(step.counts, times)
        record = StepRecord(
            attempt=self._recorder.attempt,
            time=time.time(),
            step=step.number,
            loss=sum(losses) / self._ranks.size,
            learning_rate=step.learning_rate,
            gradient_norm=gradient_norm,
            useful_tokens=step.counts.useful_tokens,
            trained_tokens=step.counts.trained_tokens,
            mfu=rates["model_tflops_per_gpu"] * 1e12 / self._peak if self._peak else None,
            gpu_memory_peak_bytes=int(max(peaks)) or None,
            host_memory_bytes=int(sum(memory)),
            # Ranks wait for each other in forward and backward, so only the other parts show which
            # rank is late.
            slowest_rank=unsynchronised_s.index(max(unsynchronised_s)),
            adam_busy_s=max(busy) or None,
            router_loss=None if step.router_loss is None else sum(router) / self._ranks.size,
            adam_bytes_per_s=engine_stats.adam_bytes_per_s or None,
            d2h_bytes_per_s=engine_stats.d2h_bytes_per_s or None,
            h2d_bytes_per_s=engine_stats.h2d_bytes_per_s or None,
            kept_steps=engine_stats.kept_steps,
            redone_steps=engine_stats.redone_steps,
            skipped_steps=engine_stats.skipped_steps,
            **rates,
        )
        self._recorder.write(record)
        return record

    def summary(self) -> dict[str, float]:
        """Return medians over a benchmark's measured steps, by this rank's clock; empty in a normal
        run. Waits for the GPU.

        The engine's figures (Adam's time, waits of the forward pass) exist for logged steps only.
        If there are any, the medians that depend on them are over logged steps.
        """
        if not self._measured:
            return {}
        every = {step.number: self._measured_rates(step) for step in self._measured}
        logged = every.keys() & self._engine_stats.keys()
        medians = {
            name: statistics.median(rates[name] for rates in every.values())
            for name in next(iter(every.values()))
        }
        for name in ("forward_s", "exposed_optimizer_s"):
            medians[name] = statistics.median(every[number][name] for number in logged or every)
        if logged:
            medians["adam_busy_s"] = statistics.median(
                self._engine_stats[number].adam_busy_s for number in logged
            )
        return medians | {"measured_steps": float(len(every))}

    def _measured_rates(self, step: Step) -> dict[str, Any]:
        stats = self._engine_stats.get(step.number, OffloadStats())
        times = _separate_exposed_optimizer(step.laps.read(), stats.exposed_in_forward_s)
        return self._rates(step.counts, times)

    def _rates(self, counts: StepCounts, times: _StepTimes) -> dict[str, Any]:
        """Return every field of a record that is a time or a quantity per time."""
        checkpointing = self._spec.model.repeats_products
        lengths = counts.document_lengths.tolist()
        model = model_flops(self._flops, counts.useful_tokens, lengths)
        hardware = executed_flops(self._spec, self._flops, self._shape, counts)
        seed = seed_tflops_total(
            self._parameters,
            self._shape,
            self._spec.data.sequence_length,
            counts.sequences,
            times.total,
            checkpointing=checkpointing,
        )
        return {
            "step_s": times.total,
            "data_s": times.data,
            "forward_s": times.forward,
            "backward_s": times.backward,
            "exposed_optimizer_s": times.optimizer,
            "other_s": times.other,
            "useful_tokens_per_s_total": counts.useful_tokens / times.total,
            "model_tflops_per_gpu": model / times.total / self._ranks.size / 1e12,
            "hw_tflops_per_gpu": hardware / times.total / self._ranks.size / 1e12,
            "seed_tflops_total": seed,
        }

    def _raise_if_bad(self, first_bad_steps: Iterable[float]) -> None:
        if bad := [int(step) for step in first_bad_steps if step]:
            raise NonFiniteError(min(bad), "loss")


def executed_flops(spec: RunSpec, flops: Flops, shape: Architecture, counts: StepCounts) -> float:
    """Return the FLOPs that all GPUs execute in a step, with recomputation and padding. The head
    runs on trained tokens only.
    """
    lengths = counts.document_lengths.tolist()
    executed = hw_flops(
        flops,
        counts.computed_tokens,
        lengths,
        policy=spec.model.policy,
        tiled=in_tiles(spec, shape),
    )
    executed -= 6.0 * flops.head_parameters * (counts.computed_tokens - counts.trained_tokens)
    micro_batches = spec.gradient_accumulation_steps * spec.ranks
    twice = recomputed_logits(counts.trained_tokens // micro_batches, shape.vocabulary)
    return executed + 2.0 * shape.hidden * twice * micro_batches


def _separate_exposed_optimizer(times: _StepTimes, exposed_in_forward_s: float) -> _StepTimes:
    """Move the forward pass's wait for weights to the optimizer's time."""
    moved = min(exposed_in_forward_s, times.forward)
    return times._replace(forward=times.forward - moved, optimizer=times.optimizer + moved)


# Measure how fast the ranks of several nodes all-gather and reduce-scatter, which ZeRO-3 does with
# all weights and gradients.


_FIRST_BYTES, _MOST_BYTES = 1 << 20, 1 << 28
"""Of a whole tensor. Buckets and layers of large models have some hundred megabytes; a slow network
is measured with less.
"""
_LONG_ENOUGH_S = 0.05
_REPEATS = 3


def record_network_rate(ranks: Ranks, run: RunDirectory, attempt: int, nodes: int) -> None:
    """Measure the rate, a second or two, and record it for the plans of later runs."""
    bytes_per_s = _measure_network_rate(ranks)
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()  # training finds the GPU as it would be without this
    if ranks.first:
        try:
            write_network_rate(run, attempt, nodes, bytes_per_s)
        except OSError as error:
            print(
                f"the rate of the network cannot be recorded: {error}", file=sys.stderr, flush=True
            )


def _measure_network_rate(ranks: Ranks) -> float:
    """Return how many bytes a second enter each node, and leave it, while all ranks exchange a
    large tensor.

    As in a ring, each byte but a rank's own share passes through every node once (see
    ``so_tui.plan.rates``).
    """
    whole_bytes = _FIRST_BYTES
    while True:
        both_s = _both_s(ranks, whole_bytes)
        if both_s >= _LONG_ENOUGH_S or whole_bytes >= _MOST_BYTES:
            return 2 * whole_bytes * (ranks.size - 1) / ranks.size / both_s
        whole_bytes *= 4


def _both_s(ranks: Ranks, whole_bytes: int) -> float:
    """Return the seconds of an all-gather and a reduce-scatter of that many bytes on the slowest
    rank, at best.
    """
    share = torch.zeros(max(1, whole_bytes // 4 // ranks.size), device=ranks.device)
    whole = torch.empty(share.numel() * ranks.size, device=ranks.device)
    seconds = []
    for _ in range(1 + _REPEATS):  # the first one connects the ranks
        ranks.barrier()
        began = time.perf_counter()
        all_gather_single(whole, share)
        reduce_scatter_single(share, whole)
        if ranks.device.type == "cuda":
            torch.cuda.synchronize(ranks.device)
        seconds.append(time.perf_counter() - began)
    return max(min(row) for row in ranks.all_gather_row(seconds[1:]))
