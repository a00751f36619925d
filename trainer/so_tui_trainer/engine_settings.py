"""Map a run's spec and a rank's binding to the settings of the offload engine, which has no notion
of either.
"""

from __future__ import annotations

import sys

from so_tui.machine.host import available_bytes
from so_tui.machine.system_files import SystemFiles
from so_tui.model.profile import WEIGHT_BYTES, profile_of
from so_tui.model.sharding import run_ahead_parameters, state_bytes
from so_tui.plan.plan import HOST_MARGIN, NOTHING_OPTIONAL, OptionalMemory, RankBinding
from so_tui.spec.run_spec import RunSpec, StatesFormat
from superoffload.errors import OffloadError
from superoffload.settings import Settings


def engine_settings(
    spec: RunSpec, binding: RankBinding, optional: OptionalMemory = NOTHING_OPTIONAL
) -> Settings:
    """Return the engine's settings for one rank of a run.

    Args:
        spec: The run's spec.
        binding: The rank's.
        optional: What the plan gives to second states and to copies. They get less where other
            processes hold memory that it counted on.

    Raises:
        OffloadError: If the offload mode is still ``auto`` (``mode-not-resolved``).
    """
    offload, train = spec.offload, spec.train
    if offload.mode == "auto":
        raise OffloadError(
            "offload.mode is still auto. The planner must choose a mode before training starts.",
            code="mode-not-resolved",
        )
    room_bytes = _room_bytes(spec)
    speculation_bytes = min(optional.second_states_bytes, room_bytes)
    return Settings(
        mode=offload.mode,
        engine=offload.engine,
        ratio=offload.ratio,
        speculation_bytes=speculation_bytes,
        copies_bytes=min(optional.copies_bytes, room_bytes - speculation_bytes),
        states=states_format(spec),
        seed=train.seed,
        max_skipped_steps=train.max_skipped_steps,
        learning_rate=train.learning_rate,
        beta1=train.beta1,
        beta2=train.beta2,
        epsilon=train.epsilon,
        weight_decay=train.weight_decay,
        adam_cpus=binding.adam_cpus or binding.cpus,
        run_ahead_parameters=run_ahead_parameters(profile_of(spec.model).largest_layer, spec.ranks),
        # Unlike the engine's own default, it also reads control group limits.
        available_bytes=lambda: available_bytes(SystemFiles()),
    )


def states_format(spec: RunSpec) -> StatesFormat:
    """Return the format of a run's moments in host memory: DeepSpeed's optimizers have one only."""
    return spec.offload.states if spec.offload.own_engine else "fp32"


def _room_bytes(spec: RunSpec) -> int:
    """Return the memory of a rank's host beside its states, for second states and for copies, where
    other processes may hold memory that the plan counted on.

    No result depends on them, so a run on a host that is fuller than planned is slower and does not
    fail.
    """
    available = available_bytes(SystemFiles())
    if available is None:
        return sys.maxsize
    each = state_bytes(
        WEIGHT_BYTES, spec.offload.states, accumulates=spec.gradient_accumulation_steps > 1
    )
    states = each * profile_of(spec.model).layout(spec.ranks, spec.offload).cpu_numel
    return max(0, int((1 - HOST_MARGIN) * available / spec.ranks_per_host - states))
