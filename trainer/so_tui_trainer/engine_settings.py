"""Map a run's spec and a rank's binding to the settings of the offload engine, which has no notion of either."""

from __future__ import annotations

from so_tui.machine.memory import available_bytes
from so_tui.machine.system_files import SystemFiles
from so_tui.model.profile import profile_of
from so_tui.model.sharding import run_ahead_parameters
from so_tui.plan.types import RankBinding
from so_tui.spec.types import RunSpec
from superoffload.errors import OffloadError
from superoffload.settings import Settings


def engine_settings(spec: RunSpec, binding: RankBinding) -> Settings:
    """Return the engine's settings for one rank of a run.

    Raises:
        OffloadError: If the offload mode is still ``auto`` (``mode-not-resolved``).
    """
    offload, train = spec.offload, spec.train
    if offload.mode == "auto":
        raise OffloadError(
            "offload.mode is still auto. The planner must choose a mode before training starts.",
            code="mode-not-resolved",
        )
    return Settings(
        mode=offload.mode,
        engine=offload.engine,
        ratio=offload.ratio,
        gradient_accumulation_steps=spec.gradient_accumulation_steps,
        gradient_clipping=train.gradient_clipping,
        learning_rate=train.learning_rate,
        beta1=train.beta1,
        beta2=train.beta2,
        epsilon=train.epsilon,
        weight_decay=train.weight_decay,
        adam_cpus=binding.adam_cpus or binding.cpus,
        run_ahead_parameters=run_ahead_parameters(profile_of(spec.model).largest_layer),
        available_bytes=lambda: available_bytes(SystemFiles()),  # which, unlike the engine's own default, also reads control group limits
    )
