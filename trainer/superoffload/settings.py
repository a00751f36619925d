"""The engine's settings. Besides these it reads only DeepSpeed's config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from superoffload.shared_states import host_available_bytes


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How one rank's optimizer runs."""

    mode: Literal["superoffload", "zerooffload", "gpu"]
    """Where the states are and Adam runs. ``zerooffload`` and ``gpu`` use DeepSpeed's own ZeRO-3 optimizer."""
    engine: Literal["so-tui", "deepspeed"] = "so-tui"
    """Whose optimizer runs in mode ``superoffload``: ours or DeepSpeed's."""
    ratio: float = 0.9
    """Offload ratio: share of the optimizer states in host memory."""
    gradient_accumulation_steps: int = 1
    gradient_clipping: float = 0.0
    """Largest norm of a step's gradients, 0 for no limit."""
    speculation_bytes: int = 0
    """Host memory for second sets of states, so that clipping need not wait for the norm. Of no use without clipping."""
    max_skipped_steps: int = 0
    """How many steps in a row may be skipped because a gradient is not finite. Without clipping none can be, nor can the very first."""
    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    """Of parameter groups that have no ``weight_decay`` of their own."""
    adam_cpus: tuple[int, ...]
    """The Adam worker's cores."""
    run_ahead_parameters: int
    """All-gathered parameters that the host may be ahead of the GPU with; of no effect on one rank."""
    watchdog_timeout_s: float = 30.0
    """How long the Adam worker may compute without progress before the run fails."""
    available_bytes: Callable[[], int | None] = host_available_bytes
    """Returns how much host memory this process can still allocate; None if unknown."""

    @property
    def replaces_deepspeeds_optimizer(self) -> bool:
        return self.mode == "superoffload" and self.engine == "so-tui"
