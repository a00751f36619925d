"""The one module that reads DeepSpeed's insides. Written for 0.19.8 and for no other version.

``check_version`` is called before anything else here; another version ends the run with a clear message instead of a wrong update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import deepspeed
import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.superoffload import superoffload_stage3
from deepspeed.runtime.torch_autocast import sort_dtypes
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from so_tui.plan.layout import gpu_sub_groups, sub_group_slices
from so_tui.plan.memory import OWN_LARGEST_BUCKET
from so_tui_trainer.offload.errors import OffloadError
from so_tui_trainer.offload.sub_groups import Gradient, SubGroup
from so_tui_trainer.offload.superoffload import SuperOffload

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


def cut_over_ranks(ds_config: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """While this lasts, a module that is made has its parameters cut over the ranks as soon as it is there."""
    context: AbstractContextManager[Any] = deepspeed.zero.Init(config_dict_or_path=dict(ds_config))
    return context


def own_part(parameter: torch.nn.Parameter) -> tuple[torch.Tensor, int]:
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


def parameter_names(engine: Engine) -> tuple[tuple[str, ...], ...]:
    """Names of the parameters of each sub-group, in order."""
    optimizer = engine.optimizer
    return tuple(tuple(optimizer.param_names[parameter] for parameter in group) for group in optimizer.fp16_groups)


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


# -- our own optimizer in DeepSpeed's place ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SuperOffloadSettings:
    ratio: float
    accumulation: int
    clipping: float
    cpus: Sequence[int]
    silence_limit_s: float


def super_offload(engine: Engine) -> SuperOffload | None:
    """What steps this engine's sub-groups, where it is ours."""
    optimizer = engine.optimizer
    return optimizer.core if isinstance(optimizer, SuperOffloadStage3) else None


def super_offload_config(ds_config: Mapping[str, Any], sub_group_size: int) -> dict[str, Any]:
    """The run's config with what our optimizer needs. DeepSpeed asks for its SuperOffload class where ``super_offload`` is set."""
    config = deepcopy(dict(ds_config))
    config.pop("data_types", None)  # gradients are handed over in the weights' type and added up in fp32 by the worker
    config["zero_allow_untested_optimizer"] = True
    config["zero_force_ds_cpu_optimizer"] = False
    zero = config["zero_optimization"]
    zero["offload_optimizer"] = {"device": "cpu", "super_offload": True, "ratio": 1.0, "pin_memory": False}
    zero["sub_group_size"] = sub_group_size
    zero["reduce_bucket_size"] = min(int(zero.get("reduce_bucket_size", OWN_LARGEST_BUCKET)), OWN_LARGEST_BUCKET)
    # Parameters that stay gathered would have to be gathered again right after the step, when most have not landed.
    zero["stage3_param_persistence_threshold"] = 0
    return config


@contextmanager
def own_super_offload(settings: SuperOffloadSettings) -> Iterator[None]:
    """While this lasts, an engine that wants DeepSpeed's SuperOffload optimizer gets ours."""
    original = superoffload_stage3.SuperOffloadOptimizer_Stage3
    superoffload_stage3.SuperOffloadOptimizer_Stage3 = partial(SuperOffloadStage3, settings)
    try:
        yield
    finally:
        superoffload_stage3.SuperOffloadOptimizer_Stage3 = original


class SuperOffloadStage3(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """ZeRO-3 as far as the reduced gradients; from there on ``SuperOffload``.

    DeepSpeed keeps partitioning, gathering, hooks, buckets and reduction. Taken over are: the cut into sub-groups (``plan.layout``), the
    creation of states, what happens to a reduced gradient, and the step. Every gathering of parameters first waits for their weights.
    """

    def __init__(self, settings: SuperOffloadSettings, *arguments: Any, **keywords: Any) -> None:
        self._settings = settings
        self._ungated: list[tuple[Any, str, Any]] = []
        super().__init__(*arguments, **keywords)

    def _configure_offloading(self, offload_optimizer_config: Any, offload_param_config: Any) -> None:
        super()._configure_offloading(offload_optimizer_config, offload_param_config)
        if self.offload_param:
            raise OffloadError("offload.parameters: weights in CPU memory are not supported with SuperOffload.")

    def _create_fp16_sub_groups(self, params_group: list[Any]) -> list[list[Any]]:
        slices = sub_group_slices([parameter.partition_numel() for parameter in params_group], self.sub_group_size)
        return [params_group[start:stop] for start, stop in slices]

    def _setup_for_real_optimizer(self) -> None:
        settings = self._settings
        numels = [weights.numel() for weights in self.fp16_partitioned_groups_flat]
        on_gpu = gpu_sub_groups(numels, settings.ratio)
        place = {parameter.ds_id: place for place, parameter in enumerate(self.module.parameters())}
        self.core = SuperOffload(
            [self._sub_group(index, index < on_gpu, place) for index in range(len(numels))],
            self.optimizer,
            accumulation=settings.accumulation,
            clipping=settings.clipping,
            cpus=settings.cpus,
            all_reduce=lambda values: comm.all_reduce(values, group=self.dp_process_group),
            silence_limit_s=settings.silence_limit_s,
        )
        self.fp32_partitioned_groups_flat = [self.core.master(index) for index in range(len(numels))]
        self.subgroup_to_device = {index: "gpu" if index < on_gpu else "cpu" for index in range(len(numels))}
        self._member = {
            parameter.ds_id: (index, member) for index, group in enumerate(self.fp16_groups) for member, parameter in enumerate(group)
        }
        for group in self.optimizer.param_groups:
            group["params"] = []
        for dtype, bucket in self.ipg_buckets.items():
            bucket.buffer = torch.empty(self.reduce_bucket_size, dtype=dtype, device=get_accelerator().current_device_name())
        # Names that other methods of the base class expect.
        self.grad_partitions_flat_buffer = None
        self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition: dict[int, torch.Tensor] = {}
        self._gate_gathering()
        comm.barrier()

    def _sub_group(self, index: int, on_gpu: bool, place: Mapping[int, int]) -> SubGroup:
        parameters = self.fp16_groups[index]
        weights = self.fp16_partitioned_groups_flat[index]
        rank = comm.get_rank(group=self.dp_process_group)
        offsets = [0]
        for parameter in parameters:
            share = parameter.partition_numel()
            real = min(share, max(0, parameter.ds_numel - rank * share))
            weights[offsets[-1] + real : offsets[-1] + share].zero_()  # padding is whatever was in memory, NaN for instance
            offsets.append(offsets[-1] + share)
        return SubGroup(
            weights=weights,
            parameter_group=self.sub_group_to_group_id[index],
            names=tuple(self.param_names[parameter] for parameter in parameters),
            offsets=tuple(offsets[:-1]),
            on_gpu=on_gpu,
            first_use=min(place[parameter.ds_id] for parameter in parameters),
        )

    def _gate_gathering(self) -> None:
        """DeepSpeed gathers through two functions that it hangs on every parameter; both wait for the weights now."""

        def gated(function: Callable[..., Any], own: Any) -> Callable[..., Any]:
            def gather(param_list: Any = None, *arguments: Any, **keywords: Any) -> Any:
                parameters = [own] if param_list is None else list(param_list)
                self.core.land({self._member[parameter.ds_id][0] for parameter in parameters if parameter.ds_id in self._member})
                return function(parameters, *arguments, **keywords)

            return gather

        for parameter in self.module.parameters():
            for name in ("all_gather", "all_gather_coalesced"):
                original = getattr(parameter, name)
                self._ungated.append((parameter, name, original))
                setattr(parameter, name, gated(original, parameter))

    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[torch.Tensor]) -> None:
        gradients = [
            Gradient(*self._member[parameter.ds_id], self._kept(partition))
            for parameter, partition in zip(params_to_release, grad_partitions, strict=True)
        ]
        self.core.receive(gradients, boundary=self.is_gradient_accumulation_boundary())
        for parameter in params_to_release:
            if not get_accelerator().is_synchronized_device() and parameter.grad is not None:
                parameter.grad.record_stream(get_accelerator().current_stream())
            parameter.grad = None

    def _kept(self, partition: torch.Tensor) -> torch.Tensor:
        """A lone gradient in a bucket is reduced inside the bucket, which the next one overwrites while this one is still being copied."""
        if get_accelerator().is_synchronized_device():
            return partition
        storage = partition.untyped_storage().data_ptr()
        in_bucket = any(storage == bucket.buffer.untyped_storage().data_ptr() for bucket in self.ipg_buckets.values())
        return partition.clone() if in_bucket else partition

    def independent_gradient_partition_epilogue(self) -> None:
        """As in the base class, but the host does not wait for the GPU."""
        for dtype in sort_dtypes(self.ipg_buckets.keys()):
            self._DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads(dtype)
        if not get_accelerator().resolves_data_dependency():
            get_accelerator().default_stream().wait_stream(self.reduce_and_partition_stream)
        for parameter_id in self.params_already_reduced:
            self.params_already_reduced[parameter_id] = False
        self._epilogue_ran_this_backward = True
        self.core.end_of_backward()

    def step(self, closure: None = None) -> None:
        self._pre_step()
        self._partition_all_parameters()
        self.core.step()
        self._global_grad_norm = None  # ``last_gradient_norm`` reads it when somebody asks

    def _get_fp32_opt_state_partition(self, param: Any, release_swap_buffers: bool, optim_state_key: str | None = None) -> Any:
        """What DeepSpeed's ``safe_get_*`` and ``safe_set_*`` read and write in place: this rank's share of a master, or of a moment."""
        self.core.settle()
        index, member = self._member[param.ds_id]
        first, second = self.core.moments(index)
        states = {None: self.core.master(index), "exp_avg": first, "exp_avg_sq": second}
        begin, end = self.core.sub_groups[index].span(member)
        return states[optim_state_key][begin:end], index

    def _get_fp32_grad_state_partition(self, param: Any, release_swap_buffers: bool) -> Any:
        raise OffloadError("SuperOffload keeps no gradients: they are handed to the optimizer while backward runs.")

    def refresh_fp32_params(self) -> None:
        """Masters from the weights, when these were changed by hand: otherwise the next step undoes the change."""
        self.core.settle()
        super().refresh_fp32_params()

    def state_dict(self) -> dict[str, Any]:
        raise OffloadError("This optimizer's state is saved by so_tui_trainer.offload.save_state.")

    def load_state_dict(self, *arguments: Any, **keywords: Any) -> None:
        raise OffloadError("This optimizer's state is loaded by so_tui_trainer.offload.load_state.")

    def destroy(self) -> None:
        self.core.close()
        self.fp32_partitioned_groups_flat = []
        for parameter, name, original in self._ungated:
            setattr(parameter, name, original)
        self._ungated.clear()
        super().destroy()
