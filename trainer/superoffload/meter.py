"""Times and bytes of the offload engine, collected while it runs and reported for the last step."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from superoffload.transfers import Mark, Transfer, Transfers


class OffloadStats(Struct, frozen=True, kw_only=True):
    """Times of one step of this rank, and counts of steps. All zero where DeepSpeed's own optimizer
    runs, which does not report them.
    """

    adam_busy_s: float = 0.0
    """Time for which the Adam worker computed."""
    adam_bytes: int = 0
    """Host memory traffic of that computation: what it must at least read and write."""
    exposed_wait_s: float = 0.0
    """Time for which the GPU had nothing to do but wait for the worker, its copies or the gradient
    norm.
    """
    exposed_in_forward_s: float = 0.0
    """The part of ``exposed_wait_s`` in the forward pass: nothing was left to compute until a
    layer's new weights had arrived.
    """
    host_wait_s: float = 0.0
    """Time for which the engine blocked the main thread. The GPU may still have had work during
    it.
    """
    d2h_bytes: int = 0
    d2h_s: float = 0.0
    """Time during which gradients were being copied; without a GPU, the time of the plain
    copies.
    """
    h2d_bytes: int = 0
    h2d_s: float = 0.0
    kept_steps: int = 0
    """Steps so far in which sub-groups were stepped before the norm was known, and that was
    final.
    """
    redone_steps: int = 0
    """Those in which the norm exceeded the limit, so that the sub-groups were stepped again."""
    skipped_steps: int = 0
    """Steps so far that were not taken because a gradient was not finite."""

    @property
    def adam_bytes_per_s(self) -> float:
        return self.adam_bytes / self.adam_busy_s if self.adam_busy_s else 0.0

    @property
    def d2h_bytes_per_s(self) -> float:
        return self.d2h_bytes / self.d2h_s if self.d2h_s else 0.0

    @property
    def h2d_bytes_per_s(self) -> float:
        return self.h2d_bytes / self.h2d_s if self.h2d_s else 0.0


@dataclass(frozen=True)
class LayerWait:
    """Between ``begin`` and ``end`` the computing stream had nothing to do: a layer's weights were
    updated, copied and all-gathered.
    """

    begin: Mark
    end: Mark
    updated: tuple[Mark, ...]
    """When the host had queued what it waited for, and when this rank's new weights were on the
    GPU. What follows is all-gathering.
    """

    def seconds(self, transfers: Transfers) -> float:
        """Return for how long the optimizer was the reason."""
        until_updated = max(
            (transfers.seconds(self.begin, mark) for mark in self.updated), default=0.0
        )
        return max(0.0, min(transfers.seconds(self.begin, self.end), until_updated))


@dataclass
class _Interval:
    """Measurements from the end of one step to the end of the next."""

    layer_waits: list[LayerWait] = field(default_factory=list)
    """Waits for weights, in forward."""
    step_waits: list[tuple[Mark, Mark]] = field(default_factory=list)
    """Waits in ``step``, for the gradient norm and, if it waits for them, for all weights."""
    host_wait_s: float = 0.0
    adam_busy_s: float = 0.0
    adam_bytes: int = 0
    d2h: list[Transfer] = field(default_factory=list)
    h2d: list[Transfer] = field(default_factory=list)


class Meter:
    """Collects measurements of the current step in ``current``.

    The training thread adds most of them, the worker client's thread Adam's time and the copies to
    the GPU.
    """

    def __init__(self, transfers: Transfers) -> None:
        self.current = _Interval()
        self._last = _Interval()
        self._transfers = transfers

    def end_step(self) -> None:
        self._last, self.current = self.current, _Interval()

    def leave_out_waits(self) -> None:
        """Drop the waits for weights since the last step: they were not part of a step's forward
        pass.
        """
        self.current.layer_waits.clear()

    def stats(self) -> OffloadStats:
        """Return the measurements of the last step, from the end of the step before it. May wait
        for the GPU.
        """
        last, seconds = self._last, self._transfers.seconds
        in_forward = sum(wait.seconds(self._transfers) for wait in last.layer_waits)
        return OffloadStats(
            adam_busy_s=last.adam_busy_s,
            adam_bytes=last.adam_bytes,
            exposed_wait_s=in_forward + sum(seconds(*wait) for wait in last.step_waits),
            exposed_in_forward_s=in_forward,
            host_wait_s=last.host_wait_s,
            d2h_bytes=sum(transfer.bytes for transfer in last.d2h),
            d2h_s=sum(seconds(transfer.begin, transfer.end) for transfer in last.d2h),
            h2d_bytes=sum(transfer.bytes for transfer in last.h2d),
            h2d_s=sum(seconds(transfer.begin, transfer.end) for transfer in last.h2d),
        )
