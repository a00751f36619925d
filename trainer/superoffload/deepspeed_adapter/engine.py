"""Reads and changes internals of DeepSpeed 0.18.9 to 0.19.8, and of no other version.

``check_version`` is called first: with another version the run ends with a clear message instead of
a wrong update. ``stage3`` puts our optimizer into DeepSpeed. Nothing else in the project depends on
DeepSpeed's internals.
"""

from __future__ import annotations

import fcntl
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from copy import deepcopy
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import CPUAdamBuilder
from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
from deepspeed.utils import z3_leaf_module
from packaging.version import Version
from torch import Tensor
from torch.utils.cpp_extension import _get_build_directory

from superoffload.deepspeed_adapter.stage3 import SuperOffloadStage3, publish_weights
from superoffload.errors import OffloadError
from superoffload.gpu_states import SubGroupState, initial_state
from superoffload.optimizer import SuperOffload
from superoffload.settings import Settings
from superoffload.transfers import RunAheadLimiter

# Loads DeepSpeed's CPU Adam kernel, which torch compiles where it is first needed.


def load_cpu_adam() -> None:
    """Load the kernel, compiling it if it is not cached. Call it before ``DeepSpeedCPUAdam`` is
    made.

    While torch compiles, a file named ``lock`` stands in the build folder. A process that is killed
    leaves it there, and every later one would wait for it forever. So one process at a time gets
    this far, by a lock that the kernel releases, and removes such a file.

    Raises:
        RuntimeError, OSError, AssertionError: DeepSpeed or the compiler refuses.
    """
    builder = CPUAdamBuilder()
    folder = Path(_get_build_directory(builder.name, False))
    with (folder / "so-tui.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        builder.load(verbose=False)


OLDEST, NEWEST = "0.18.9", "0.19.8"
"""The range of supported versions. ``make test-system`` runs the engine's tests with the oldest,
one between and the newest.
"""

Engine = Any
"""A ``deepspeed.DeepSpeedEngine``; DeepSpeed has no type information."""


def check_version(found: str | None = None) -> None:
    """Raise OffloadError (``deepspeed-version``) unless this is a DeepSpeed version that this
    module was tested with, or one between.
    """
    found = found or deepspeed.__version__
    if not Version(OLDEST) <= Version(Version(found).base_version) <= Version(NEWEST):
        raise OffloadError(
            f"DeepSpeed {found} is installed, but the offload engine changes DeepSpeed's "
            f"internals and works with {OLDEST} to {NEWEST} only. Install one with: pip install "
            f"deepspeed=={NEWEST}",
            code="deepspeed-version",
        )


def import_muon() -> None:
    """Import DeepSpeed's Muon without compiling its functions, in this process.

    ``deepspeed.initialize`` imports it to check the class of any optimizer. Its decorators compile
    functions, for which torch imports its compiler's backend: most of a second of every start, also
    where Muon is not used.
    """
    compiler: Any = import_module("deepspeed.runtime.compiler")
    at_once = compiler.compile
    compiler.compile = lambda: lambda function: function
    try:
        with suppress(ImportError):  # which DeepSpeed takes for a version without Muon
            import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        compiler.compile = at_once


def join_process_group(**settings: Any) -> None:
    """Call ``deepspeed.init_distributed`` without DeepSpeed's shared-memory collectives.

    On a CPU, with all ranks on one host, those create a file of 69 MB a rank in /dev/shm that is
    never removed, and make an ordinary exit abort. Only inference would use them.
    """
    backend: Any = import_module(
        "deepspeed.comm.torch"
    )  # the attribute deepspeed.comm.torch is torch itself
    backend.build_shm_op = lambda: None
    deepspeed.init_distributed(**settings)


def shard(ds_config: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Return a context in which the parameters of every new module are sharded over the ranks as
    soon as it is constructed.
    """
    config = deepcopy(dict(ds_config))
    # Shards are in host memory only until the optimizer is made, which puts them where they are
    # pinned. Pinned piece by piece they would be rounded up, and their memory retained.
    if offload := config.get("zero_optimization", {}).get("offload_param"):
        offload["pin_memory"] = False
    result: AbstractContextManager[Any] = deepspeed.zero.Init(config_dict_or_path=config)
    return result


def local_shard(parameter: torch.nn.Parameter) -> tuple[Tensor, int]:
    """Return this rank's shard of a sharded parameter.

    Returns:
        A flat view without padding, and the position of its first element in the flattened
        parameter.
    """
    sharded: Any = parameter
    numel = sharded.ds_tensor.ds_numel
    start = numel * comm.get_rank(group=sharded.ds_process_group)
    return sharded.ds_tensor.data[: max(0, min(numel, sharded.ds_numel - start))], start


@contextmanager
def keeping_buffers(model: torch.nn.Module) -> Iterator[None]:
    """Keep the types of a model's buffers while DeepSpeed makes its engine.

    Until 0.18.9 it casts all of them with the parameters: rotary frequencies in bf16 turn late
    tokens by wrong angles.
    """
    kept = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    yield
    for module, name, buffer in kept:
        made = getattr(module, name)
        if made.dtype != buffer.dtype:
            setattr(module, name, buffer.to(made.device))


def finish(engine: Engine, settings: Settings) -> None:
    """Finish an engine that DeepSpeed has made, with whichever optimizer."""
    _share_hyperparameters(engine)
    _limit_run_ahead(engine, settings.run_ahead_parameters)
    engine.superoffload_settings = settings


def _share_hyperparameters(engine: Engine) -> None:
    """Make DeepSpeed's GPU sub-groups follow the learning rate where its offload ratio is below 1.

    Stage 3 steps them with a second optimizer whose first parameter group is a copy made at start,
    which no schedule reaches. Afterwards both optimizers share the same group dictionaries.
    """
    optimizer = engine.optimizer
    backup = getattr(optimizer, "backup_optimizer", None)
    if backup is None:
        return
    for group, backup_group in zip(
        optimizer.optimizer.param_groups, backup.param_groups, strict=True
    ):
        for key, value in backup_group.items():
            group.setdefault(key, value)
        group["params"] = []
    backup.param_groups = optimizer.optimizer.param_groups


def _limit_run_ahead(engine: Engine, limit: int) -> None:
    """Keep the host at most ``limit`` all-gathered parameters ahead of the GPU.

    No effect on one rank, which all-gathers nothing, unless its weights are in host memory. The
    next all-gather is queued before the host waits; the plan counts it.
    """
    accelerator = get_accelerator()
    moves_weights = comm.get_world_size() > 1 or engine.optimizer.offload_param
    if not moves_weights or accelerator.is_synchronized_device():
        return
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    # Blocking events: a host that spins while it waits takes time from CPU Adam on the same core's
    # other thread.
    limiter = RunAheadLimiter(limit, partial(accelerator.Event, blocking=True))
    fetch = coordinator.fetch_sub_module
    numels: dict[int, int] = {}

    def fetch_within_limit(module: Any, forward: bool) -> None:
        fetch(module, forward)
        if module.ds_id not in numels:
            numels[module.ds_id] = sum(
                parameter.ds_numel
                for parameter in iter_params(module, recurse=z3_leaf_module(module))
            )
        limiter.before_use(module, numels[module.ds_id])

    coordinator.fetch_sub_module = fetch_within_limit


def super_offload(engine: Engine) -> SuperOffload | None:
    """Return the optimizer that steps this engine's sub-groups, if it is ours."""
    optimizer = engine.optimizer
    return optimizer.core if isinstance(optimizer, SuperOffloadStage3) else None


def sub_group_parameters(engine: Engine) -> tuple[tuple[tuple[str, int], ...], ...]:
    """Return the name and the elements, over all ranks, of the parameters of each sub-group, in
    order.
    """
    optimizer = engine.optimizer
    return tuple(
        tuple((optimizer.param_names[parameter], parameter.ds_numel) for parameter in group)
        for group in optimizer.fp16_groups
    )


def sub_group_states(engine: Engine) -> list[SubGroupState]:
    """Return this rank's optimizer states, to be read or written in place. Moments that do not
    exist yet are created.
    """
    if core := super_offload(engine):
        return core.states()
    optimizer = engine.optimizer
    return [_stage3_state(optimizer, index) for index in range(len(optimizer.fp16_groups))]


def _stage3_state(optimizer: Any, index: int) -> SubGroupState:
    leaf = optimizer.fp32_partitioned_groups_flat[index]
    device = (
        optimizer.subgroup_to_device[index]
        if optimizer.offload_optimizer
        else str(leaf.device.type)
    )
    weights = optimizer.fp16_partitioned_groups_flat[index]
    # The tensor is a leaf that requires grad; only its storage is read and written here.
    flat = leaf.detach()
    if device == "cpu" and hasattr(optimizer, "superoffload_cpu_optimizer"):
        return SubGroupState(
            device, weights, flat, None, lambda first, second: None, 0, lambda step: None
        )
    on_backup = optimizer.offload_optimizer and device != "cpu"
    inner = optimizer.backup_optimizer if on_backup else optimizer.optimizer
    state = inner.state[leaf]
    if not state:
        state.update(initial_state(inner, flat))

    def set_step(step: int) -> None:
        if isinstance(state["step"], Tensor):
            state["step"].fill_(step)
        else:
            state["step"] = step

    def set_moments(first: Tensor, second: Tensor) -> None:
        state["exp_avg"].copy_(first)
        state["exp_avg_sq"].copy_(second)

    return SubGroupState(
        device,
        weights,
        flat,
        lambda: (state["exp_avg"], state["exp_avg_sq"]),
        set_moments,
        int(state["step"]),
        set_step,
    )


def publish_states(engine: Engine) -> None:
    """Make everything that depends on the optimizer states follow them, after loading them."""
    _replay_bias_correction(engine)
    publish_weights(engine.optimizer, sub_group_states(engine))


def set_learning_rate(engine: Engine, learning_rate: float) -> None:
    """Set the learning rate of the step whose last backward begins next, of all parameter groups.
    Raises OffloadError (``learning-rate``) if it is impossible.
    """
    if not (math.isfinite(learning_rate) and learning_rate >= 0):
        raise OffloadError(
            f"The learning rate is {learning_rate}. Use a finite number, at least 0.",
            code="learning-rate",
        )
    for group in engine.optimizer.optimizer.param_groups:
        group["lr"] = learning_rate


def _replay_bias_correction(engine: Engine) -> None:
    """Bring DeepSpeedCPUAdam's C++ object to the loaded step, exact to the last bit.

    It computes beta ** step as a product that grows by one factor per step, but restarts from
    ``pow`` when the step jumps, as it does after loading. The two differ in the last bits, so the
    steps are counted up again, on empty tensors.
    """
    inner = engine.optimizer.optimizer
    library = getattr(inner, "ds_opt_adam", None)
    steps = max((int(state["step"]) for state in inner.state.values()), default=0)
    if library is None or steps == 0:
        return
    group = inner.param_groups[0]
    beta1, beta2 = group["betas"]
    empty = torch.empty(0)
    # A step with other betas makes it restart.
    for step, first, second in (
        (1, beta1 / 2, beta2 / 2),
        *((step, beta1, beta2) for step in range(1, steps + 1)),
    ):
        library.adam_update(
            inner.opt_id,
            step,
            group["lr"],
            first,
            second,
            group["eps"],
            0.0,
            True,
            empty,
            empty,
            empty,
            empty,
        )


def gradient_norm(engine: Engine) -> float | None:
    """Return the norm of the last step's gradients over all ranks, before clipping; None before the
    first step. May wait for the GPU.
    """
    if optimizer := super_offload(engine):
        return optimizer.gradient_norm()
    norm = engine.get_global_grad_norm()
    return None if norm is None else float(norm)


def close(engine: Engine) -> None:
    """End the processes that the engine started and release its memory. Safe to call twice."""
    # DeepSpeed itself never ends the Adam worker of its own SuperOffload.
    worker = getattr(engine.optimizer, "superoffload_cpu_optimizer", None)
    if worker is not None:
        worker.close()
    engine.destroy()
