"""The engine's settings. Besides these it reads only DeepSpeed's config, which has the accumulation and the clipping."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from so_tui.model.sharding import GATHERED_AHEAD, StatesFormat
from superoffload.shared_memory import host_available_bytes


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How one rank's optimizer runs."""

    mode: Literal["superoffload", "zerooffload", "gpu"] = "superoffload"
    """Where the states are and Adam runs. ``zerooffload`` and ``gpu`` use DeepSpeed's own ZeRO-3 optimizer."""
    engine: Literal["so-tui", "deepspeed"] = "so-tui"
    """Whose optimizer runs in mode ``superoffload``: ours or DeepSpeed's."""
    ratio: float = 0.9
    """Offload ratio: share of the optimizer states in host memory."""
    speculation_bytes: int = 0
    """Host memory for second sets of states, so that clipping need not wait for the norm. Of no use without clipping."""
    copies_bytes: int = 0
    """Host memory for copies of states, so that ``begin_save`` need not write them before training goes on. Second sets of states hold
    copies too, but those sub-groups do not speculate until they are written."""
    states: StatesFormat = "fp32"
    """Format of the moments in host memory. Those on the GPU are fp32."""
    seed: int = 0
    """Selects the random bits by which compact moments are rounded."""
    max_skipped_steps: int = 0
    """How many steps in a row may be skipped because a gradient is not finite. Without clipping none can be, nor can the very first."""
    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    """Of parameter groups that have no ``weight_decay`` of their own."""
    adam_cpus: tuple[int, ...] = ()
    """The Adam worker's cores; if empty, all but one of those that this process may use."""
    run_ahead_parameters: int = GATHERED_AHEAD
    """All-gathered parameters that the host may be ahead of the GPU with; of no effect on one rank."""
    watchdog_timeout_s: float = 30.0
    """How long the Adam worker may compute without progress before the run fails."""
    available_bytes: Callable[[], int | None] = host_available_bytes
    """Returns how much host memory this process can still allocate; None if unknown."""

    @property
    def worker_cpus(self) -> tuple[int, ...]:
        """The Adam worker's cores."""
        if self.adam_cpus:
            return self.adam_cpus
        allowed = tuple(sorted(os.sched_getaffinity(0)))
        return allowed[1:] or allowed

    @property
    def replaces_deepspeeds_optimizer(self) -> bool:
        return self.mode == "superoffload" and self.engine == "so-tui"
