"""What the offload engine costs: collected while it runs, told for the last optimizer step."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from superoffload.transfers import Mark, Transfer, Transfers


class OffloadStats(Struct, frozen=True, kw_only=True):
    """Times of one step, this rank. All zero in the modes in which DeepSpeed's own optimizer runs (it does not tell)."""

    adam_busy_s: float = 0.0
    """Seconds the Adam worker computed."""
    exposed_wait_s: float = 0.0
    """Seconds for which the GPU had nothing to do but wait for the worker, its copies or the gradient norm."""
    exposed_in_forward_s: float = 0.0
    """The part of it that fell into the forward pass: waiting for the weights of the step before."""
    host_wait_s: float = 0.0
    """Seconds for which the main thread was held up by the engine. Not all of it is lost: the GPU may still have had work."""
    to_host_bytes: int = 0
    to_host_s: float = 0.0
    """Seconds during which gradients were being copied (0 on a machine without GPU: nothing is copied)."""
    to_gpu_bytes: int = 0
    to_gpu_s: float = 0.0


@dataclass
class Interval:
    """Measurements from the end of one step to the end of the next."""

    landing: list[tuple[Mark, Mark]] = field(default_factory=list)
    """Waits for weights, in forward."""
    stepping: list[tuple[Mark, Mark]] = field(default_factory=list)
    """Waits for the norm, in ``step``."""
    host_wait_s: float = 0.0
    adam_busy_s: float = 0.0
    to_host: list[Transfer] = field(default_factory=list)
    to_gpu: list[Transfer] = field(default_factory=list)


class Meter:
    """Whoever measures adds to ``current``. The link's thread adds what it alone knows: Adam's time, and copies to the GPU."""

    def __init__(self, transfers: Transfers) -> None:
        self.current = Interval()
        self._last = Interval()
        self._transfers = transfers

    def end_step(self) -> None:
        self._last, self.current = self.current, Interval()

    def leave_out_waits(self) -> None:
        """Forget who waited for weights since the last step: it was no forward pass of a step."""
        self.current.landing.clear()

    def stats(self) -> OffloadStats:
        """From the end of the step before the last to the end of the last one. May wait for the GPU."""
        last, seconds = self._last, self._transfers.seconds
        landing = sum(seconds(*wait) for wait in last.landing)
        return OffloadStats(
            adam_busy_s=last.adam_busy_s,
            exposed_wait_s=landing + sum(seconds(*wait) for wait in last.stepping),
            exposed_in_forward_s=landing,
            host_wait_s=last.host_wait_s,
            to_host_bytes=sum(transfer.bytes for transfer in last.to_host),
            to_host_s=sum(seconds(transfer.begin, transfer.end) for transfer in last.to_host),
            to_gpu_bytes=sum(transfer.bytes for transfer in last.to_gpu),
            to_gpu_s=sum(seconds(transfer.begin, transfer.end) for transfer in last.to_gpu),
        )
