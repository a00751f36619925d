"""AdamW for DeepSpeed ZeRO-3 with optimizer states in GPU and host memory, stepped by both
processors while backward and forward run.

``initialize`` makes a DeepSpeed engine with this optimizer. Names are imported on first use, so
that ``superoffload.ds_config`` needs neither torch nor DeepSpeed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from superoffload.api import (
        begin_save,
        initialize,
        leave_out_waits,
        load_state,
        replacing_optimizers,
        save_state,
        skipped_step,
        stats,
        synchronize,
        worker_pid,
    )
    from superoffload.checkpoint import Save, saved_master_weights, verify_state
    from superoffload.conversion import (
        DeepSpeedStates,
        Progress,
        deepspeed_states,
        write_states,
        write_universal,
    )
    from superoffload.deepspeed_adapter.engine import (
        close,
        gradient_norm,
        join_process_group,
        local_shard,
        set_learning_rate,
        shard,
    )
    from superoffload.ds_config import Override, engine_config
    from superoffload.errors import (
        NonFiniteGradientError,
        OffloadError,
        StateMismatchError,
        WorkerLostError,
    )
    from superoffload.settings import Settings
    from superoffload.transfers import OffloadStats


__all__ = [
    "DeepSpeedStates",
    "NonFiniteGradientError",
    "OffloadError",
    "OffloadStats",
    "Override",
    "Progress",
    "Save",
    "Settings",
    "StateMismatchError",
    "WorkerLostError",
    "begin_save",
    "close",
    "deepspeed_states",
    "engine_config",
    "gradient_norm",
    "initialize",
    "join_process_group",
    "leave_out_waits",
    "load_state",
    "local_shard",
    "replacing_optimizers",
    "save_state",
    "saved_master_weights",
    "set_learning_rate",
    "shard",
    "skipped_step",
    "stats",
    "synchronize",
    "verify_state",
    "worker_pid",
    "write_states",
    "write_universal",
]

_MODULES = (
    "errors",
    "ds_config",
    "settings",
    "transfers",
    "checkpoint",
    "conversion",
    "deepspeed_adapter.engine",
    "api",
)
"""The modules with these names, those that need least first."""


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in _MODULES:
            if hasattr(found := importlib.import_module(f"{__name__}.{module}"), name):
                return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
