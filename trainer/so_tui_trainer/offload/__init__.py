"""Where the optimizer works: on the GPU, on the CPU, or overlapped between both.

The trainer knows this module only. It makes a DeepSpeed ZeRO-3 engine for a run's offload mode and saves, loads, measures and ends what
DeepSpeed itself has no way to save, load, measure or end.

All functions are called by every rank, from the main thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import deepspeed
import torch

from so_tui.plan.types import RankBinding
from so_tui.spec.types import RunSpec
from so_tui_trainer.offload import checkpoint, deepspeed_0_19_8
from so_tui_trainer.offload.errors import NonFiniteGradientError, OffloadError, StateMismatchError, WorkerLostError
from so_tui_trainer.offload.stats import OffloadStats

__all__ = [
    "NonFiniteGradientError",
    "OffloadError",
    "OffloadStats",
    "StateMismatchError",
    "WorkerLostError",
    "close",
    "gradient_norm",
    "initialize",
    "load_state",
    "save_state",
    "settle",
    "stats",
]

ParameterGroups = Sequence[dict[str, Any]]
"""As torch's optimizers take them: ``{"params": [...], "weight_decay": ...}``; frozen parameters are left out by the caller or here."""


def initialize(
    model: torch.nn.Module, parameter_groups: ParameterGroups, ds_config: Mapping[str, Any], spec: RunSpec, binding: RankBinding
) -> Any:
    """A ``deepspeed.DeepSpeedEngine`` whose optimizer is AdamW with the spec's settings, working where ``spec.offload`` says.

    ``ds_config`` is the run's DeepSpeed config (ZeRO-3). The learning rate of a step is what the engine's parameter groups say when the
    step's last backward begins: set it before. Raises OffloadError for another DeepSpeed version or a mode that cannot run here.
    """
    deepspeed_0_19_8.check_version()
    groups = _trainable(parameter_groups)
    config = deepcopy(dict(ds_config))
    if spec.offload.mode == "gpu":
        optimizer = _torch_adamw(groups, spec)
    elif spec.offload.mode in ("zerooffload", "superoffload"):
        optimizer = _cpu_adam(groups, spec)
    else:
        raise OffloadError(f"offload.mode = {spec.offload.mode} must be resolved by the planner before training starts.")
    if spec.offload.mode == "superoffload" and not torch.cuda.is_available():
        raise OffloadError('DeepSpeed\'s own SuperOffload runs on CUDA only. Use offload.engine = "so-tui" or mode = "zerooffload".')
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    deepspeed_0_19_8.share_hyperparameters(engine)
    engine.so_tui_spec = spec
    return engine


def save_state(engine: Any, folder: Path) -> int:
    """Writes this rank's masters, moments and step counts into ``folder``; returns the bytes. Every rank calls it; none waits for another.

    Raises OffloadError when the state in memory is not one to keep (after a non-finite gradient), OSError when the disk does not take it.
    """
    settle(engine)
    states = deepspeed_0_19_8.sub_group_states(engine)
    return checkpoint.write(Path(folder), _manifest(engine, states), states)


def load_state(engine: Any, folder: Path) -> None:
    """Puts this rank's saved state into the engine and rebuilds the weights from it, so that training goes on as if it had never stopped.

    Raises StateMismatchError when it was saved by a different run (ranks, sub-groups, parameters, ratio, DeepSpeed version).
    """
    settle(engine)
    states = deepspeed_0_19_8.sub_group_states(engine)
    checkpoint.read(Path(folder), _manifest(engine, states), states)
    deepspeed_0_19_8.replay_bias_correction(engine)
    deepspeed_0_19_8.publish_weights(engine)


def gradient_norm(engine: Any) -> float | None:
    """Global norm of the last step's gradients, before clipping; None before the first step. May wait for the GPU."""
    return deepspeed_0_19_8.last_gradient_norm(engine)


def stats(engine: Any) -> OffloadStats:
    """What the last step cost. May wait for the GPU."""
    return OffloadStats()


def settle(engine: Any) -> None:
    """Waits until the weights are those of the last step."""


def close(engine: Any) -> None:
    """Ends what the engine started and gives its memory back. Safe to call twice."""
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


def _torch_adamw(groups: list[dict[str, Any]], spec: RunSpec) -> torch.optim.Optimizer:
    fast: dict[str, Any] = {"fused": True} if torch.cuda.is_available() else {"foreach": True}
    return torch.optim.AdamW(groups, **_settings(spec), **fast)


def _cpu_adam(groups: list[dict[str, Any]], spec: RunSpec) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(groups, **_settings(spec), adamw_mode=True)  # type: ignore[no-any-return]


def _manifest(engine: Any, states: Sequence[deepspeed_0_19_8.SubGroupState]) -> checkpoint.Manifest:
    spec: RunSpec = engine.so_tui_spec
    return checkpoint.Manifest(
        deepspeed=deepspeed.__version__,
        mode=spec.offload.mode,
        engine=spec.offload.engine if spec.offload.mode == "superoffload" else "deepspeed",
        ratio=spec.offload.ratio if spec.offload.mode != "gpu" else 0.0,
        rank=torch.distributed.get_rank(),
        ranks=torch.distributed.get_world_size(),
        sub_groups=checkpoint.records(states, deepspeed_0_19_8.parameter_names(engine)),
    )
