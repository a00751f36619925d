"""Combine samples into their mean and peak. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from so_tui.runs.sample import ForeignProcess, GpuSample, NodeSample, Rollup, Sample

Weighted = list[tuple[Any, int]]
"""Values with their numbers of samples."""
Combine = Callable[[Weighted], Any]

_GPU_FIELDS = tuple(
    field.name
    for field in msgspec.structs.fields(GpuSample)
    if field.name not in ("index", "throttling")
)
MOST_FOREIGN = 3
"""Foreign processes of a sample."""


def single(sample: Sample) -> Rollup:
    """Return a single sample as a roll-up."""
    return Rollup(samples=1, mean=sample, peak=sample)


def roll_up(parts: Sequence[Rollup]) -> Rollup:
    """Combine consecutive roll-ups (at least one) into one.

    The mean is weighted by samples; its ``interval_s`` and CPU seconds are sums over the interval. The peak takes the maximum of every
    value separately; its CPU seconds are those of the busiest part, scaled to the interval. Both name every reason for throttling, and the
    busiest foreign processes.
    """
    weights = [part.samples for part in parts]
    means, peaks = [part.mean for part in parts], [part.peak for part in parts]
    interval_s = sum(mean.interval_s for mean in means)
    mean = _combined(means, weights, _mean)
    peak = _combined(peaks, weights, _peak)
    return Rollup(
        samples=sum(weights),
        mean=msgspec.structs.replace(
            mean,
            interval_s=interval_s,
            run_cpu_s=sum(sample.run_cpu_s for sample in means),
            supervisor_cpu_s=sum(sample.supervisor_cpu_s for sample in means),
        ),
        peak=msgspec.structs.replace(
            peak,
            interval_s=interval_s,
            run_cpu_s=max(_share(sample.run_cpu_s, sample.interval_s) for sample in peaks)
            * interval_s,
            supervisor_cpu_s=max(
                _share(sample.supervisor_cpu_s, sample.interval_s) for sample in peaks
            )
            * interval_s,
        ),
    )


def _combined(samples: list[Sample], weights: list[int], combine: Combine) -> Sample:
    """Combine nodes, GPUs and memory, for the nodes and GPUs of the newest sample."""
    newest = samples[-1]
    weighted = list(zip(samples, weights, strict=True))
    return msgspec.structs.replace(
        newest,
        nodes=tuple(
            _node(
                [
                    (other, w)
                    for sample, w in weighted
                    for other in sample.nodes
                    if other.id == node.id
                ],
                combine,
            )
            for node in newest.nodes
        ),
        gpus=tuple(
            _gpu(
                [
                    (other, w)
                    for sample, w in weighted
                    for other in sample.gpus
                    if other.index == gpu.index
                ],
                combine,
            )
            for gpu in newest.gpus
        ),
        run_memory_bytes=combine([(sample.run_memory_bytes, w) for sample, w in weighted]),
        foreign=_busiest(process for sample in samples for process in sample.foreign),
        placement=(),  # it has no mean, and is of interest where it is now
    )


def _node(nodes: list[tuple[NodeSample, int]], combine: Combine) -> NodeSample:
    newest = nodes[-1][0]
    weights = [weight for _, weight in nodes]
    cores = zip(*(node.cores for node, _ in nodes), strict=False)
    return msgspec.structs.replace(
        newest,
        cores=tuple(combine(list(zip(core, weights, strict=True))) for core in cores),
        memory_used_bytes=combine([(node.memory_used_bytes, weight) for node, weight in nodes]),
        file_cache_bytes=combine([(node.file_cache_bytes, weight) for node, weight in nodes]),
    )


def _gpu(gpus: list[tuple[GpuSample, int]], combine: Combine) -> GpuSample:
    combined = {
        name: combine([(getattr(gpu, name), weight) for gpu, weight in gpus])
        for name in _GPU_FIELDS
    }
    reasons = sorted({reason for gpu, _ in gpus for reason in gpu.throttling})
    return GpuSample(index=gpus[-1][0].index, throttling=tuple(reasons), **combined)


def _busiest(processes: Iterable[ForeignProcess]) -> tuple[ForeignProcess, ...]:
    """Return each process once, when it was busiest."""
    ascending = sorted(processes, key=lambda process: process.cores)
    return tuple(
        sorted(
            {process.pid: process for process in ascending}.values(),
            key=lambda process: -process.cores,
        )[:MOST_FOREIGN]
    )


def _mean(values: Weighted) -> Any:
    """Return the weighted mean of the measured values, as an integer if they are; None if nothing was measured."""
    known = [(value, weight) for value, weight in values if value is not None]
    if not known:
        return None
    mean = sum(value * weight for value, weight in known) / sum(weight for _, weight in known)
    return round(mean) if isinstance(known[0][0], int) else mean


def _peak(values: Weighted) -> Any:
    return max((value for value, _ in values if value is not None), default=None)


def _share(cpu_s: float, interval_s: float) -> float:
    return cpu_s / interval_s if interval_s > 0 else 0.0
