"""Where the optimizer works: on the GPU, on the CPU, or overlapped between both.

The trainer knows this module only. It makes a DeepSpeed ZeRO-3 engine for a run's offload mode and saves, loads, measures and ends what
DeepSpeed itself has no way to save, load, measure or end.

All functions are called by every rank, from the main thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch

from so_tui.model.profile import profile_of
from so_tui.model.sharding import run_ahead_parameters
from so_tui.plan.types import RankBinding
from so_tui.spec.types import RunSpec
from superoffload import checkpoint, resharding
from superoffload.deepspeed_adapter import engine as adapter
from superoffload.deepspeed_adapter import stage3
from superoffload.ds_config import engine_config
from superoffload.errors import OffloadError
from superoffload.meter import OffloadStats

shard = adapter.shard
local_shard = adapter.local_shard

ParameterGroups = Sequence[dict[str, Any]]
"""As torch's optimizers take them: ``{"params": [...], "weight_decay": ...}``; frozen parameters are left out by the caller or here."""


def initialize(
    model: torch.nn.Module,
    parameter_groups: ParameterGroups,
    ds_config: Mapping[str, Any],
    spec: RunSpec,
    binding: RankBinding,
    *,
    watchdog_timeout_s: float = 30.0,
) -> Any:
    """A ``deepspeed.DeepSpeedEngine`` whose optimizer is AdamW with the spec's settings, working where ``spec.offload`` says.

    ``ds_config`` is the run's DeepSpeed config (ZeRO-3). The learning rate of a step is what the engine's parameter groups say when the
    step's last backward begins: set it before. ``watchdog_timeout_s``: how long our Adam worker may compute without progress
    before it counts as stuck. Raises OffloadError for another DeepSpeed version or a mode that cannot run here.
    """
    adapter.check_version()
    groups = _trainable(parameter_groups)
    if spec.offload.mode == "superoffload" and spec.offload.engine == "so-tui":
        engine = _initialize_super_offload(model, groups, ds_config, spec, binding, watchdog_timeout_s)
    else:
        config = {"zero_allow_untested_optimizer": True, **ds_config}
        engine, *_ = deepspeed.initialize(model=model, optimizer=_deepspeed_optimizer(groups, spec), config=config)
        adapter.share_hyperparameters(engine)
    adapter.limit_run_ahead(engine, run_ahead_parameters(profile_of(spec.model).largest_layer))
    engine.so_tui_spec = spec
    return engine


def uses_worker(engine: Any) -> bool:
    """Whether Adam runs in a process of its own, on the binding's ``adam_cpus``."""
    return worker_pid(engine) is not None


def worker_pid(engine: Any) -> int | None:
    """Process of our Adam worker, where there is one."""
    core = adapter.super_offload(engine)
    return core.worker_pid if core else None


def set_learning_rate(engine: Any, learning_rate: float) -> None:
    """For the step whose last backward begins next: sub-groups are stepped while backward runs."""
    adapter.set_learning_rate(engine, learning_rate)


def save_state(engine: Any, folder: Path) -> int:
    """Writes this rank's masters, moments and step counts into ``folder``; returns the bytes. Every rank calls it; none waits for another.

    Raises OffloadError when the state in memory is not one to keep (after a non-finite gradient), OSError when the disk does not take it.
    """
    synchronize(engine)
    states = adapter.sub_group_states(engine)
    return checkpoint.write(Path(folder), _manifest(engine, states), states)


def load_state(engine: Any, folder: Path) -> None:
    """Puts this rank's share of a saved state into the engine and rebuilds the weights from it, as if training had never stopped.

    The state may come from any number of ranks and any offload mode and ratio: it is the state of AdamW, found by parameter name. Raises
    StateMismatchError, before anything is changed, when it belongs to another model or lacks the moments; OffloadError when it is torn.
    """
    synchronize(engine)
    states = adapter.sub_group_states(engine)
    resharding.read(Path(folder), _manifest(engine, states), states)
    adapter.replay_bias_correction(engine)
    adapter.publish_weights(engine)


def verify_state(folder: Path) -> None:
    """Proves a saved state of all ranks readable: all files there, of the right size, and a thousandth of their bytes as written.

    One process does it for all; no engine is needed. Raises OffloadError with what is wrong.
    """
    checkpoint.verify(folder)


def gradient_norm(engine: Any) -> float | None:
    """Global norm of the last step's gradients, before clipping; None before the first step. May wait for the GPU."""
    return adapter.last_gradient_norm(engine)


def stats(engine: Any) -> OffloadStats:
    """What the last step cost, from the end of the step before. May wait for the GPU."""
    core = adapter.super_offload(engine)
    return core.stats() if core else OffloadStats()


def leave_out_waits(engine: Any) -> None:
    """Keeps what was waited for since the last step (to save or to evaluate) out of the next step's ``stats``."""
    core = adapter.super_offload(engine)
    if core:
        core.leave_out_waits()


def synchronize(engine: Any) -> None:
    """Waits until the weights are those of the last step. Raises OffloadError when the state in memory is not sound."""
    core = adapter.super_offload(engine)
    if core:
        core.synchronize()


def close(engine: Any) -> None:
    """Ends what the engine started and gives its memory back. Safe to call twice."""
    adapter.end_deepspeed_worker(engine)
    engine.destroy()


def _trainable(parameter_groups: ParameterGroups) -> list[dict[str, Any]]:
    groups = [{**group, "params": [parameter for parameter in group["params"] if parameter.requires_grad]} for group in parameter_groups]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise OffloadError("The model has no trainable parameter.")
    return groups


def _settings(spec: RunSpec) -> dict[str, Any]:
    train = spec.train
    return {
        "lr": train.learning_rate,
        "betas": (train.beta1, train.beta2),
        "eps": train.epsilon,
        "weight_decay": train.weight_decay,
    }


def _initialize_super_offload(
    model: torch.nn.Module,
    groups: list[dict[str, Any]],
    ds_config: Mapping[str, Any],
    spec: RunSpec,
    binding: RankBinding,
    watchdog_timeout_s: float,
) -> Any:
    settings = stage3.SuperOffloadSettings(
        ratio=spec.offload.ratio,
        accumulation=spec.gradient_accumulation_steps,
        clipping=spec.train.gradient_clipping,
        cpus=binding.adam_cpus or binding.cpus,
        watchdog_timeout_s=watchdog_timeout_s,
    )
    config = engine_config(ds_config)
    with stage3.own_super_offload(settings):
        engine, *_ = deepspeed.initialize(model=model, optimizer=_torch_adamw(groups, spec), config=config)
    if adapter.super_offload(engine) is None:
        raise OffloadError(f"DeepSpeed did not take our optimizer; it made a {type(engine.optimizer).__name__}.")
    return engine


def _deepspeed_optimizer(groups: list[dict[str, Any]], spec: RunSpec) -> torch.optim.Optimizer:
    mode = spec.offload.mode
    if mode == "gpu":
        return _torch_adamw(groups, spec)
    if mode == "superoffload" and not torch.cuda.is_available():
        raise OffloadError('DeepSpeed\'s own SuperOffload runs on CUDA only. Use offload.engine = "so-tui" or mode = "zerooffload".')
    if mode in ("zerooffload", "superoffload"):
        return _cpu_adam(groups, spec)
    raise OffloadError(f"offload.mode = {mode} must be resolved by the planner before training starts.")


def _torch_adamw(groups: list[dict[str, Any]], spec: RunSpec) -> torch.optim.Optimizer:
    fast: dict[str, Any] = {"fused": True} if torch.cuda.is_available() else {"foreach": True}
    return torch.optim.AdamW(groups, **_settings(spec), **fast)


def _cpu_adam(groups: list[dict[str, Any]], spec: RunSpec) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(groups, **_settings(spec), adamw_mode=True)  # type: ignore[no-any-return]


def _manifest(engine: Any, states: Sequence[adapter.SubGroupState]) -> checkpoint.Manifest:
    spec: RunSpec = engine.so_tui_spec
    return checkpoint.Manifest(
        deepspeed=deepspeed.__version__,
        mode=spec.offload.mode,
        engine=spec.offload.engine if spec.offload.mode == "superoffload" else "deepspeed",
        ratio=spec.offload.ratio if spec.offload.mode != "gpu" else 0.0,
        rank=torch.distributed.get_rank(),
        ranks=torch.distributed.get_world_size(),
        sub_groups=checkpoint.records(states, adapter.sub_group_parameters(engine)),
    )
