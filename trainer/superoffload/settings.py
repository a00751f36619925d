"""The engine's settings, and how it shares out the host's memory within them. Besides these it
reads only DeepSpeed's config, which has the accumulation and the clipping.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, get_args

from so_tui.model.sharding import (
    GATHERED_AHEAD,
    StatesFormat,
    copied,
    copy_bytes,
    speculating,
    speculation_bytes,
    state_bytes,
)
from superoffload.errors import OffloadError
from superoffload.gpu_states import SubGroup
from superoffload.shared_states import host_available_bytes

Mode = Literal["superoffload", "zerooffload", "gpu"]
Engine = Literal["so-tui", "deepspeed"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How one rank's optimizer runs.

    Raises:
        OffloadError: For a value that no engine can run with (``settings``).
    """

    mode: Mode = "superoffload"
    """Where the states are and Adam runs. ``zerooffload`` and ``gpu`` use DeepSpeed's own ZeRO-3
    optimizer.
    """
    engine: Engine = "so-tui"
    """Whose optimizer runs in mode ``superoffload``: ours or DeepSpeed's."""
    ratio: float = 0.9
    """Offload ratio: share of the optimizer states in host memory."""
    speculation_bytes: int = 0
    """Host memory for second sets of states, so that clipping need not wait for the norm. Of no use
    without clipping.
    """
    copies_bytes: int = 0
    """Host memory for copies of states, so that ``begin_save`` need not write them before training
    goes on. Second sets of states hold copies too, but those sub-groups do not speculate until they
    are written.
    """
    states: StatesFormat = "fp32"
    """Format of the moments in host memory. Those on the GPU are fp32."""
    seed: int = 0
    """Selects the random bits by which compact moments are rounded."""
    max_skipped_steps: int = 0
    """How many steps in a row may be skipped because a gradient is not finite. Without clipping
    none can be, nor can the very first.
    """
    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    """Of parameter groups that have no ``weight_decay`` of their own."""
    adam_cpus: tuple[int, ...] = ()
    """The Adam worker's cores; if empty, all but one of those that this process may use."""
    run_ahead_parameters: int = GATHERED_AHEAD
    """All-gathered parameters that the host may be ahead of the GPU with; of no effect on one
    rank.
    """
    watchdog_timeout_s: float = 30.0
    """How long the Adam worker may compute without progress before the run fails."""
    available_bytes: Callable[[], int | None] = host_available_bytes
    """Returns how much host memory this process can still allocate; None if unknown."""

    def __post_init__(self) -> None:
        for name, (allowed, kind, least, most) in _NUMBERS.items():
            value: Any = getattr(self, name)
            # A NumPy scalar would be compared in its own precision, in which a bound may round.
            number = value.item() if hasattr(value, "item") else value
            if not (isinstance(value, kind) and least <= number <= most):
                raise _impossible(name, value, allowed)
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise _impossible(name, value, " or ".join(f'"{choice}"' for choice in choices))
        cpus = self.adam_cpus
        if not isinstance(cpus, Collection) or not all(
            isinstance(cpu, Integral) and cpu >= 0 for cpu in cpus
        ):
            raise _impossible("adam_cpus", cpus, "a tuple of CPU numbers")

    @property
    def worker_cpus(self) -> tuple[int, ...]:
        """The Adam worker's cores."""
        if self.adam_cpus:
            return tuple(self.adam_cpus)
        allowed = tuple(sorted(os.sched_getaffinity(0)))
        return allowed[1:] or allowed

    @property
    def replaces_deepspeeds_optimizer(self) -> bool:
        return self.mode == "superoffload" and self.engine == "so-tui"


def _impossible(name: str, value: object, allowed: str) -> OffloadError:
    return OffloadError(
        f"superoffload.Settings: {name} = {value!r} is not possible. Use {allowed}.",
        code="settings",
    )


_BYTES = ("a number of bytes, at least 0", Real, 0, math.inf)
_FINITE = ("a finite number, at least 0", Real, 0, sys.float_info.max)
_BETA = ("a number from 0 to below 1", Real, 0, math.nextafter(1, 0))
_NUMBERS: dict[str, tuple[str, type[Any], float, float]] = {
    "ratio": ("a number from 0 to 1", Real, 0, 1),
    "speculation_bytes": _BYTES,
    "copies_bytes": _BYTES,
    "seed": ("an integer", Integral, -math.inf, math.inf),
    "max_skipped_steps": ("an integer, at least 0", Integral, 0, math.inf),
    "learning_rate": _FINITE,
    "beta1": _BETA,
    "beta2": _BETA,
    "epsilon": _FINITE,
    "weight_decay": _FINITE,
    "run_ahead_parameters": ("a number, at least 0", Real, 0, math.inf),
    "watchdog_timeout_s": ("a number of seconds, above 0", Real, math.nextafter(0, 1), math.inf),
}
"""What a setting may be, in words, as a type, and from and to which number."""
_CHOICES = {"mode": get_args(Mode), "engine": get_args(Engine), "states": get_args(StatesFormat)}


# Room in host memory besides the states: second sets of states, and copies from which a checkpoint
# is written.


_ROUNDING_BYTES = 16 << 20
"""The arrays' alignment takes less."""


class HostRoom(NamedTuple):
    """Sub-groups that have more than one set of states."""

    second: frozenset[int]
    """CPU sub-groups with a second set, so that they can be stepped before the gradient norm is
    known.
    """
    copied: tuple[int, ...]
    """Sub-groups with room for a copy of their states."""


def host_room(
    sub_groups: Sequence[SubGroup],
    settings: Settings,
    ranks: int,
    *,
    clips: bool,
    accumulates: bool,
    host_weights: bool,
) -> HostRoom:
    """Share out what the states of the CPU sub-groups leave of the host's memory: second sets
    first, then copies.

    Args:
        sub_groups: All sub-groups of the rank.
        settings: How much of it each may take at most.
        ranks: How many ranks the host has. All look before one allocates anything, so each finds
            the whole of the host's memory available, and takes its share.
        clips: Whether gradients are clipped; only then are second sets of use.
        accumulates: Whether the states include accumulated gradients.
        host_weights: Whether the weights of the CPU sub-groups are in host memory.
    """
    weight_bytes = sub_groups[0].weights.dtype.itemsize
    numels = [group.weights.numel() for group in sub_groups]
    on_cpu = sorted(
        (index for index, group in enumerate(sub_groups) if not group.on_gpu),
        key=lambda index: sub_groups[index].first_use,
    )
    spare = sys.maxsize  # no limit where the available memory is not known
    if (available := settings.available_bytes()) is not None:
        each = state_bytes(weight_bytes, settings.states, accumulates=accumulates)
        needed = each * sum(numels[index] for index in on_cpu)
        spare = max(0, available // ranks - int(needed) - _ROUNDING_BYTES)
    second: frozenset[int] = frozenset()
    if clips and settings.speculation_bytes:
        each = speculation_bytes(weight_bytes, settings.states, host_weights=host_weights)
        most = int(min(settings.speculation_bytes, spare) / each)
        positions = speculating([numels[index] for index in on_cpu], most)
        second = frozenset(on_cpu[position] for position in positions)
        spare -= int(each * sum(numels[index] for index in second))
    sizes = [
        copy_bytes("fp32" if group.on_gpu else settings.states) * numel
        for group, numel in zip(sub_groups, numels, strict=True)
    ]
    return HostRoom(second, tuple(copied(sizes, second, min(settings.copies_bytes, spare))))
