"""What is read of DeepSpeed's insides, and changed in them. Written for 0.19.8 and for no other version.

``check_version`` is called before anything else here; another version ends the run with a clear message instead of a wrong update. Our
optimizer's place in DeepSpeed is beside this, in ``stage3``; nothing else in the project knows DeepSpeed's insides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import deepspeed
import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
from deepspeed.utils import z3_leaf_module

from superoffload.deepspeed_adapter.stage3 import SuperOffloadStage3
from superoffload.errors import OffloadError
from superoffload.optimizer import SuperOffload
from superoffload.run_ahead import RunAheadLimiter

VERSION = "0.19.8"

Engine = Any
"""A ``deepspeed.DeepSpeedEngine``; DeepSpeed has no type information."""


@dataclass(frozen=True)
class SubGroupState:
    """One sub-group of one rank: flat tensors of equal length, padding included."""

    device: str
    weights: torch.Tensor
    """What the model computes with (bf16, on the GPU); a cast of ``master``."""
    master: torch.Tensor
    exp_avg: torch.Tensor | None
    """None where DeepSpeed keeps the moments out of reach, in the process of its own SuperOffload worker."""
    exp_avg_sq: torch.Tensor | None
    step: int
    set_step: Callable[[int], None]


def check_version(found: str | None = None) -> None:
    """Raises OffloadError unless this is the DeepSpeed that this module was written for."""
    found = found or deepspeed.__version__
    if found != VERSION:
        raise OffloadError(
            f"DeepSpeed {found} is installed, but the offload engine is written for {VERSION} exactly, because it builds on its internals. "
            f"Install it with: pip install deepspeed=={VERSION}"
        )


def join_process_group(**settings: Any) -> None:
    """``deepspeed.init_distributed`` without DeepSpeed's collectives in shared memory.

    On a CPU, with all ranks on one host, DeepSpeed makes a file of 69 MB a rank in /dev/shm, which its code never removes, and aborts an
    ordinary exit. Only inference would use them.
    """
    backend: Any = import_module("deepspeed.comm.torch")  # its package has torch itself under that name
    backend.build_shm_op = lambda: None
    deepspeed.init_distributed(**settings)


def shard(ds_config: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """While this lasts, a module that is made has its parameters cut over the ranks as soon as it is there."""
    context: AbstractContextManager[Any] = deepspeed.zero.Init(config_dict_or_path=dict(ds_config))
    return context


def local_shard(parameter: torch.nn.Parameter) -> tuple[torch.Tensor, int]:
    """What this rank keeps of a parameter that is cut: a flat view, and the place of its first element in the whole, flattened."""
    cut: Any = parameter
    share = cut.ds_tensor.ds_numel
    start = share * comm.get_rank(group=cut.ds_process_group)
    return cut.ds_tensor.data[: max(0, min(share, cut.ds_numel - start))], start


def share_hyperparameters(engine: Engine) -> None:
    """Lets the GPU half of a ratio below 1 follow the learning rate.

    Stage 3 steps GPU-resident sub-groups with a second optimizer whose first parameter group is a copy made at start: no schedule ever
    reaches it. Both optimizers get the same group dictionaries here.
    """
    optimizer = engine.optimizer
    backup = getattr(optimizer, "backup_optimizer", None)
    if backup is None:
        return
    for group, backup_group in zip(optimizer.optimizer.param_groups, backup.param_groups, strict=True):
        for key, value in backup_group.items():
            group.setdefault(key, value)
        group["params"] = []
    backup.param_groups = optimizer.optimizer.param_groups


def limit_run_ahead(engine: Engine, most: int) -> None:
    """Keeps the host at most so many gathered parameters ahead of the GPU; on one rank nothing is gathered.

    What is asked for next is gathered before the host waits, and counted by the plan.
    """
    accelerator = get_accelerator()
    if comm.get_world_size() == 1 or accelerator.is_synchronized_device():
        return
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    # A host that waited busily would take time from CPU Adam on the same core's other thread.
    lead, fetch = RunAheadLimiter(most, partial(accelerator.Event, blocking=True)), coordinator.fetch_sub_module
    numels: dict[int, int] = {}

    def fetch_when_near(module: Any, forward: bool) -> None:
        fetch(module, forward)
        if module.ds_id not in numels:
            numels[module.ds_id] = sum(parameter.ds_numel for parameter in iter_params(module, recurse=z3_leaf_module(module)))
        lead.asked(module, numels[module.ds_id])

    coordinator.fetch_sub_module = fetch_when_near


def super_offload(engine: Engine) -> SuperOffload | None:
    """What steps this engine's sub-groups, where it is ours."""
    optimizer = engine.optimizer
    return optimizer.core if isinstance(optimizer, SuperOffloadStage3) else None


def sub_group_parameters(engine: Engine) -> tuple[tuple[tuple[str, int], ...], ...]:
    """Name and elements (of all ranks together) of the parameters of each sub-group, in order."""
    optimizer = engine.optimizer
    return tuple(tuple((optimizer.param_names[parameter], parameter.ds_numel) for parameter in group) for group in optimizer.fp16_groups)


def sub_group_states(engine: Engine) -> list[SubGroupState]:
    """The optimizer state of every sub-group of this rank, for reading and for writing in place. Moments that do not exist yet are made."""
    optimizer = engine.optimizer
    if isinstance(optimizer, SuperOffloadStage3):
        return [_own_state(optimizer.core, index) for index in range(len(optimizer.fp16_groups))]
    return [_stage3_state(optimizer, index) for index in range(len(optimizer.fp16_groups))]


def _own_state(core: SuperOffload, index: int) -> SubGroupState:
    group = core.sub_groups[index]
    first, second = core.moments(index)
    device = "gpu" if group.on_gpu else "cpu"
    return SubGroupState(device, group.weights, core.master(index), first, second, core.steps_taken, core.set_steps_taken)


def _stage3_state(optimizer: Any, index: int) -> SubGroupState:
    master = optimizer.fp32_partitioned_groups_flat[index]
    device = optimizer.subgroup_to_device[index] if optimizer.offload_optimizer else str(master.device.type)
    weights = optimizer.fp16_partitioned_groups_flat[index]
    # The master is a leaf that requires grad; what is read and written here is its storage.
    flat = master.detach()
    if device == "cpu" and hasattr(optimizer, "superoffload_cpu_optimizer"):
        return SubGroupState(device, weights, flat, None, None, 0, lambda step: None)
    on_backup = optimizer.offload_optimizer and device != "cpu"
    inner = optimizer.backup_optimizer if on_backup else optimizer.optimizer
    state = inner.state[master]
    if not state:
        state["step"] = _first_step(inner, master)
        state["exp_avg"] = torch.zeros_like(flat)
        state["exp_avg_sq"] = torch.zeros_like(flat)

    def set_step(step: int) -> None:
        if isinstance(state["step"], torch.Tensor):
            state["step"].fill_(step)
        else:
            state["step"] = step

    return SubGroupState(device, weights, flat, state["exp_avg"], state["exp_avg_sq"], int(state["step"]), set_step)


def _first_step(inner: Any, master: torch.Tensor) -> int | torch.Tensor:
    """Step 0 in the form the optimizer itself would give it on its first step."""
    if not isinstance(inner, torch.optim.AdamW):
        return 0
    on_device = inner.defaults.get("fused") or inner.defaults.get("capturable")
    return torch.zeros((), dtype=torch.float32, device=master.device if on_device else "cpu")


def publish_weights(engine: Engine) -> None:
    """Casts every master into the weights, and brings the parameters that stay gathered on all ranks up to date."""
    optimizer = engine.optimizer
    states = sub_group_states(engine)
    optimizer._partition_all_parameters()
    for index, state in enumerate(states):
        state.weights.copy_(state.master)
        optimizer._unflatten_partitioned_parameters(index)
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


def set_learning_rate(engine: Engine, learning_rate: float) -> None:
    """For all parameter groups, wherever they are stepped."""
    for group in engine.optimizer.optimizer.param_groups:
        group["lr"] = learning_rate


def replay_bias_correction(engine: Engine) -> None:
    """Brings DeepSpeedCPUAdam's C++ object to where the loaded states are, to the last bit.

    It keeps beta ** step as a product that grows by one factor a step, but starts anew from ``pow`` when the step jumps, as it does after
    loading; the two differ in the last bits. So the steps are counted up again, on empty tensors.
    """
    inner = engine.optimizer.optimizer
    library = getattr(inner, "ds_opt_adam", None)
    steps = max((int(state["step"]) for state in inner.state.values()), default=0)
    if library is None or steps == 0:
        return
    group = inner.param_groups[0]
    beta1, beta2 = group["betas"]
    empty = torch.empty(0)
    # Other betas make it forget where it was.
    for step, first, second in ((1, beta1 / 2, beta2 / 2), *((step, beta1, beta2) for step in range(1, steps + 1))):
        library.adam_update(inner.opt_id, step, group["lr"], first, second, group["eps"], 0.0, True, empty, empty, empty, empty)


def last_gradient_norm(engine: Engine) -> float | None:
    """Global norm of the last step's gradients before clipping; None before the first step."""
    core = super_offload(engine)
    if core is not None:
        return core.gradient_norm()
    norm = engine.get_global_grad_norm()
    return None if norm is None else float(norm)


def end_deepspeed_worker(engine: Engine) -> None:
    """Ends the Adam worker of DeepSpeed's own SuperOffload, which nothing in DeepSpeed does; nothing happens in the other modes."""
    worker = getattr(engine.optimizer, "superoffload_cpu_optimizer", None)
    if worker is not None:
        worker.close()
