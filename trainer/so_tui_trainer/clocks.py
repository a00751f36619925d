"""Measure the parts of a step without waiting for the GPU: laps are CUDA events in the stream, read when a record is due."""

from __future__ import annotations

import time
from typing import Literal, NamedTuple

import torch

StepPart = Literal["data", "forward", "backward", "optimizer", "other"]
STEP_PARTS: tuple[StepPart, ...] = ("data", "forward", "backward", "optimizer", "other")


class StepTimes(NamedTuple):
    """Seconds of one step on one rank; the parts sum to ``total``."""

    data: float
    forward: float
    backward: float
    optimizer: float
    other: float

    @property
    def total(self) -> float:
        return sum(self)


class Laps:
    """The laps of one step."""

    def __init__(self, start: torch.cuda.Event | float) -> None:
        self._stamps: list[tuple[StepPart, torch.cuda.Event | float]] = []
        self._start = start

    def add(self, part: StepPart, stamp: torch.cuda.Event | float) -> None:
        """Add a lap that ends at ``stamp`` and belongs to ``part``."""
        self._stamps.append((part, stamp))

    def read(self) -> StepTimes:
        """Return the seconds of each part. Waits until the GPU has passed the last lap."""
        seconds = dict.fromkeys(STEP_PARTS, 0.0)
        before = self._start
        for part, stamp in self._stamps:
            seconds[part] += _elapsed_s(before, stamp)
            before = stamp
        return StepTimes(**seconds)


class StepClock:
    """Clock of a rank. A step lasts from the end of the one before; what happens in between (records, control) is in ``other``."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._last = self._stamp()
        self._laps = Laps(self._last)

    def restart(self) -> None:
        """Exclude the time since the last lap (a checkpoint, an evaluation)."""
        self._last = self._stamp()
        self._laps = Laps(self._last)

    def lap(self, part: StepPart) -> None:
        """Assign the time since the last lap to ``part``."""
        self._last = self._stamp()
        self._laps.add(part, self._last)

    def end_step(self) -> Laps:
        """Return the step's laps, and start the next step."""
        laps, self._laps = self._laps, Laps(self._last)
        return laps

    def _stamp(self) -> torch.cuda.Event | float:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _elapsed_s(start: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3
