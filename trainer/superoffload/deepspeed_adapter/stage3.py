"""Our optimizer as a replacement for DeepSpeed's SuperOffload optimizer. It overrides internals of
one DeepSpeed version (``engine``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import (
    FP32_FLAT_GROUPS,
    OPTIMIZER_STATE_DICT,
    PARTITION_COUNT,
    ZERO_STAGE,
)
from deepspeed.runtime.superoffload import superoffload_stage3
from deepspeed.runtime.torch_autocast import sort_dtypes
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import z3_leaf_module
from torch import Tensor

from so_tui.model.sharding import gpu_sub_groups, sub_group_slices
from superoffload.conversion import deepspeed_states
from superoffload.errors import OffloadError
from superoffload.gpu_states import Gradient, SubGroup, SubGroupState
from superoffload.optimizer import SuperOffload
from superoffload.settings import Settings, host_room
from superoffload.shared_states import HostWeights


def publish_weights(optimizer: Any, states: Iterable[SubGroupState]) -> None:
    """Cast the master weights of a ZeRO-3 optimizer's sub-groups to the weights, on all ranks, and
    update the parameters that every rank holds whole (persistent ones).
    """
    optimizer._partition_all_parameters()
    for index, state in enumerate(states):
        state.weights.copy_(state.master_weights)
        optimizer._unflatten_partitioned_parameters(index)
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


# Shards in host memory: how they get there, and how ZeRO-3 all-gathers them from there.
#
# DeepSpeed copies a shard to the GPU where it gathers it, and lets the host wait for each copy
# where there are several ranks. We queue the copies of all parameters that are gathered together
# before DeepSpeed looks at them.


def _place(
    groups: Sequence[Sequence[Any]], numels: list[int], on_gpu: int, device: torch.device
) -> tuple[list[Tensor], HostWeights | None]:
    """Move the shards of each sub-group into one tensor: the first sub-groups' to the GPU, the
    others' to host memory.

    Every sub-group's former memory is freed before the next one is moved.

    Args:
        groups: The parameters of each sub-group.
        numels: Elements of each sub-group's shards.
        on_gpu: How many of them have their states on the GPU.
        device: The GPU.

    Returns:
        The weights of each sub-group, and the ``HostWeights`` of the others; None where there are
        no others.
    """
    dtype = groups[0][0].ds_tensor.dtype
    host = None
    if on_gpu < len(numels):
        host = HostWeights([0] * on_gpu + numels[on_gpu:], dtype)
    found = []
    for index, (group, numel) in enumerate(zip(groups, numels, strict=True)):
        weights = (
            torch.empty(numel, dtype=dtype, device=device)
            if host is None or index < on_gpu
            else host.weights(index)
        )
        targets = torch.split(weights, [parameter.partition_numel() for parameter in group])
        for parameter, target in zip(group, targets, strict=True):
            target.copy_(parameter.ds_tensor)
            parameter.ds_tensor.data = target
        found.append(weights)
    return found, host


@contextmanager
def _shards_on_gpu(parameters: Sequence[Any]) -> Iterator[Tensor | None]:
    """Return a context in which the shards of parameters are on the GPU, copied on the current
    stream. The host does not wait for the copies.

    One rank gathers nothing: there DeepSpeed's own copies are the weights.
    """
    on_host = [
        parameter
        for parameter in parameters
        if parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE
        and parameter.ds_tensor.device != parameter.device
    ]
    if not on_host or comm.get_world_size(group=on_host[0].ds_process_group) == 1:
        yield None
        return
    shards = [parameter.ds_tensor for parameter in on_host]
    numels = [shard.numel() for shard in shards]
    copies = torch.empty(sum(numels), dtype=shards[0].dtype, device=on_host[0].device)
    for parameter, shard, copy in zip(on_host, shards, torch.split(copies, numels), strict=True):
        copy.copy_(shard, non_blocking=True)
        copy.__dict__.update(shard.__dict__)  # DeepSpeed keeps what it knows of a shard there
        parameter.ds_tensor = copy
    try:
        yield copies
    finally:
        for parameter, shard in zip(on_host, shards, strict=True):
            parameter.ds_tensor = shard


# Makes ZeRO-3 wait for new weights where it is about to use them, by replacing functions of its
# objects.


class _Waits:
    """The functions that were replaced for one optimizer.

    Args:
        core: The rank's optimizer.
        members: By DeepSpeed's id of a trainable parameter, its sub-group and its position there.

    Attributes:
        originals: Puts DeepSpeed's own functions back when it is closed.
    """

    def __init__(self, core: SuperOffload, members: Mapping[int, tuple[int, int]]) -> None:
        self._core, self._members = core, members
        self.originals = ExitStack()

    def before_all_gather(self, module: Any) -> None:
        """Wrap the two functions with which DeepSpeed all-gathers a parameter, so that both wait
        for its new weights and find them.
        """

        def waiting(function: Callable[..., Any], own: Any) -> Callable[..., Any]:
            def all_gather(param_list: Any = None, *arguments: Any, **keywords: Any) -> Any:
                parameters = [own] if param_list is None else list(param_list)
                self._core.wait_for_weights(self._sub_groups(parameters))
                with _shards_on_gpu(parameters) as copies:
                    handle = function(parameters, *arguments, **keywords)
                    if copies is not None and hasattr(handle, "wait"):
                        # The collective may still read them until the handle has been waited for.
                        handle.shards = copies
                    return handle

            return all_gather

        for parameter in module.parameters():
            for name in ("all_gather", "all_gather_coalesced"):
                self._replace(parameter, name, waiting(getattr(parameter, name), parameter))

    def before_layers(self, coordinator: Any) -> None:
        """Wrap the function with which DeepSpeed makes the computing stream wait for a layer's
        weights, to measure these waits.

        On a GPU the all-gathers, and their waits, are in a stream of their own: how long they take
        says nothing about the computation.
        """
        fetch: Callable[[Any, bool], None] = coordinator.fetch_sub_module
        sub_groups: dict[int, frozenset[int]] = {}

        def measured_fetch(current_submodule: Any, forward: bool) -> None:
            key = current_submodule.ds_id
            if key not in sub_groups:
                sub_groups[key] = self._sub_groups(
                    iter_params(current_submodule, recurse=z3_leaf_module(current_submodule))
                )
            with self._core.measuring_wait(sub_groups[key]):
                fetch(current_submodule, forward)

        self._replace(coordinator, "fetch_sub_module", measured_fetch)

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        self.originals.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, function)

    def _sub_groups(self, parameters: Any) -> frozenset[int]:
        ids = self._members.keys() & {parameter.ds_id for parameter in parameters}
        return frozenset(self._members[number][0] for number in ids)


@contextmanager
def own_super_offload(settings: Settings) -> Iterator[None]:
    """Make DeepSpeed create our optimizer wherever it would create its own SuperOffload optimizer.

    If initialization fails within the context, our worker and memory are released.
    """
    original = superoffload_stage3.SuperOffloadOptimizer_Stage3
    made: list[SuperOffloadStage3] = []

    def make(*arguments: Any, **keywords: Any) -> SuperOffloadStage3:
        made.append(SuperOffloadStage3(settings, *arguments, **keywords))
        return made[-1]

    superoffload_stage3.SuperOffloadOptimizer_Stage3 = make
    try:
        yield
    except BaseException:
        for optimizer in made:
            optimizer.release()
        raise
    finally:
        superoffload_stage3.SuperOffloadOptimizer_Stage3 = original


class SuperOffloadStage3(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """ZeRO-3 up to the reduced gradients, ``SuperOffload`` from there on.

    DeepSpeed shards parameters, all-gathers them, and runs hooks, buckets and reductions. We
    replace the division into sub-groups (``so_tui.model.sharding``), the creation of states, the
    handling of a reduced gradient, and the step. Every all-gather first waits for its parameters'
    new weights. With ``offload_param`` the weights of the CPU sub-groups are in host memory.
    """

    def __init__(self, settings: Settings, *arguments: Any, **keywords: Any) -> None:
        self._settings = settings
        offload_param = keywords.get("offload_param_config")
        if offload_param is not None and offload_param.device == OffloadDeviceEnum.nvme:
            raise OffloadError(
                'Weights on an NVMe disk (offload_param with device "nvme") are not supported with '
                'SuperOffload. Use the device "cpu".',
                code="offload-param",
            )
        super().__init__(*arguments, **keywords)

    def _create_param_groups_fp16_flat_cpu_memory(self) -> None:
        """Have the base class cut host memory that does not exist into sub-groups:
        ``_setup_for_real_optimizer`` places the weights.
        """
        for group in self.trainable_param_groups:
            numel = sum(parameter.partition_numel() for parameter in group["params"])
            self.param_groups_fp16_flat_cpu_memory.append(
                torch.empty(numel, dtype=self.dtype, device="meta")
            )

    def _move_to_flat_buffer(
        self, param_list: list[Any], flat_buffer: Tensor, avoid_copy: bool = False
    ) -> None:
        for parameter in param_list:
            parameter.ds_tensor.final_location = "not-nvme"

    def _create_fp16_sub_groups(self, params_group: list[Any]) -> list[list[Any]]:
        slices = sub_group_slices(
            [parameter.partition_numel() for parameter in params_group], self.sub_group_size
        )
        return [params_group[start:stop] for start, stop in slices]

    def _setup_for_real_optimizer(self) -> None:
        settings = self._settings
        numels = [weights.numel() for weights in self.fp16_partitioned_groups_flat]
        on_gpu = gpu_sub_groups(numels, settings.ratio)
        device = torch.device(get_accelerator().current_device_name())
        host_weights = None
        if self.offload_param:
            self.fp16_partitioned_groups_flat[:], host_weights = _place(
                self.fp16_groups, numels, on_gpu, device
            )
            self.param_groups_fp16_flat_cpu_memory.clear()
        order = {
            parameter.ds_id: position for position, parameter in enumerate(self.module.parameters())
        }
        try:
            sub_groups = [
                self._sub_group(index, index < on_gpu, order) for index in range(len(numels))
            ]
            room = host_room(
                sub_groups,
                settings,
                int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1),
                clips=bool(self.clip_grad),
                accumulates=self.gradient_accumulation_steps > 1,
                host_weights=host_weights is not None,
            )
            # so that all ranks have looked at the host's memory before one takes any
            comm.barrier()
            self.core = SuperOffload(
                sub_groups,
                self.optimizer,
                settings,
                room,
                device=device,
                host_weights=host_weights,
                gradient_accumulation_steps=self.gradient_accumulation_steps,
                clipping=self.clip_grad,
                all_reduce=lambda values: comm.all_reduce(values, group=self.dp_process_group),
            )
        except BaseException:
            if host_weights:
                host_weights.close()
            raise
        self._refer_to_master_weights()
        self.subgroup_to_device = {
            index: "gpu" if index < on_gpu else "cpu" for index in range(len(numels))
        }
        self._member = {
            parameter.ds_id: (index, member)
            for index, group in enumerate(self.fp16_groups)
            for member, parameter in enumerate(group)
        }
        for group in self.optimizer.param_groups:
            group["params"] = []
        for dtype, bucket in self.ipg_buckets.items():
            bucket.buffer = torch.empty(self.reduce_bucket_size, dtype=dtype, device=device)
        # Other methods of the base class expect these attributes.
        self.grad_partitions_flat_buffer = None
        self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition: dict[int, Tensor] = {}
        self._waits = _Waits(self.core, self._member)
        self._waits.before_all_gather(self.module)
        self._waits.before_layers(self.parameter_offload.get_param_coordinator())
        comm.barrier()

    def _sub_group(self, index: int, on_gpu: bool, order: Mapping[int, int]) -> SubGroup:
        parameters = self.fp16_groups[index]
        weights = self.fp16_partitioned_groups_flat[index]
        rank = comm.get_rank(group=self.dp_process_group)
        numels = [parameter.partition_numel() for parameter in parameters]
        for parameter, shard in zip(parameters, torch.split(weights, numels), strict=True):
            # Padding is uninitialised memory, which may hold NaN.
            shard[max(0, parameter.ds_numel - rank * len(shard)) :].zero_()
        return SubGroup(
            weights=weights,
            # DeepSpeed 0.18.9 and 0.19.0 themselves do not count groups of frozen parameters.
            parameter_group=next(
                number
                for number, group in enumerate(self.optimizer.param_groups)
                if any(parameters[0] is member for member in group["params"])
            ),
            names=tuple(self.param_names[parameter] for parameter in parameters),
            offsets=tuple(accumulate(numels[:-1], initial=0)),
            on_gpu=on_gpu,
            places=tuple(rank * numel for numel in numels),
            first_use=min(order[parameter.ds_id] for parameter in parameters),
        )

    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[Tensor]) -> None:
        gradients = [
            Gradient(*self._member[parameter.ds_id], self._outside_bucket(partition))
            for parameter, partition in zip(params_to_release, grad_partitions, strict=True)
        ]
        boundary = self.is_gradient_accumulation_boundary  # a method since DeepSpeed 0.19.4
        self.core.receive(gradients, boundary=boundary() if callable(boundary) else boundary)
        for parameter in params_to_release:
            if not get_accelerator().is_synchronized_device() and parameter.grad is not None:
                parameter.grad.record_stream(get_accelerator().current_stream())
            parameter.grad = None

    def _outside_bucket(self, partition: Tensor) -> Tensor:
        """Return a gradient in memory that the next bucket does not overwrite while the gradient is
        still being copied.

        A gradient that is by itself in a bucket is reduced inside the bucket.
        """
        if get_accelerator().is_synchronized_device():
            return partition
        storage = partition.untyped_storage().data_ptr()
        in_bucket = any(
            storage == bucket.buffer.untyped_storage().data_ptr()
            for bucket in self.ipg_buckets.values()
        )
        return partition.clone() if in_bucket else partition

    def independent_gradient_partition_epilogue(self) -> None:
        """Do as the base class does, without making the host wait for the GPU."""
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
        self.overflow = (
            not self.core.step()
        )  # The engine counts a step that was skipped and leaves its scheduler alone.
        self._refer_to_master_weights()
        self._global_grad_norm = None  # ``gradient_norm`` reads it on demand

    def _refer_to_master_weights(self) -> None:
        """Tell the base class where the master weights are: after a speculative step, in the other
        set of states.
        """
        self.fp32_partitioned_groups_flat = [state.master_weights for state in self.core.states()]

    def _get_fp32_opt_state_partition(
        self, param: Any, release_swap_buffers: bool, optim_state_key: str | None = None
    ) -> Any:
        """Return this rank's shard of the master weights or of a moment, for DeepSpeed's
        ``safe_get_*`` and ``safe_set_*``.

        Raises OffloadError (``compact-moments``) for a ``safe_set_*`` of compact moments, which
        would change a copy only.
        """
        self.core.synchronize()
        index, member = self._member[param.ds_id]
        group = self.core.sub_groups[index]
        # Only the functions that set pass False.
        if (
            optim_state_key is not None
            and not release_swap_buffers
            and self._settings.states != "fp32"
            and not group.on_gpu
        ):
            raise OffloadError(
                f'Moments cannot be set one by one with states "{self._settings.states}". Use '
                'Settings(states="fp32").',
                code="compact-moments",
            )
        state, shard = self.core.state(index), slice(*group.span(member))
        if optim_state_key is None:
            return state.master_weights[shard], index
        assert state.moments is not None
        moments = dict(zip(("exp_avg", "exp_avg_sq"), state.moments(), strict=True))
        return moments[optim_state_key][shard], index

    def _get_fp32_grad_state_partition(self, param: Any, release_swap_buffers: bool) -> Any:
        raise OffloadError(
            "SuperOffload stores no gradients: the optimizer takes them over while backward runs.",
            code="no-stored-gradients",
        )

    def refresh_fp32_params(self) -> None:
        """Copy the weights to the master weights after a change by hand, which the next step would
        otherwise undo.
        """
        self.core.synchronize()
        super().refresh_fp32_params()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's states as DeepSpeed's ZeRO-3 optimizer has them in its checkpoints,
        which ``zero_to_fp32.py`` can read.

        They are copies, 12 bytes of host memory a parameter. ``superoffload.save_state`` needs
        none.
        """
        self.core.synchronize()
        kept = [
            tuple(tensor.cpu().clone() for tensor in state.tensors())
            for state in self.core.states()
        ]
        states = {
            index: {"step": self.core.steps_taken, "exp_avg": first, "exp_avg_sq": second}
            for index, (_, first, second) in enumerate(kept)
        }
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        return {
            ZERO_STAGE: ZeroStageEnum.weights,
            PARTITION_COUNT: self.partition_count,
            OPTIMIZER_STATE_DICT: {"state": states, "param_groups": groups},
            FP32_FLAT_GROUPS: [master_weights for master_weights, _, _ in kept],
        }

    def load_state_dict(
        self,
        state_dict_list: Any,
        load_optimizer_states: bool = True,
        *arguments: Any,
        checkpoint_folder: str | None = None,
        **others: Any,
    ) -> None:
        """Load what ``state_dict`` returned, by as many ranks and sub-groups.

        Args:
            state_dict_list: Those of all ranks.
            load_optimizer_states: Whether to load the moments, too.
            arguments: Of no effect, as are ``others``: where else DeepSpeed could take master
                weights from.
            checkpoint_folder: Of a universal checkpoint, which any ranks and sub-groups may have
                saved. It is loaded instead.

        Raises:
            OffloadError: If the sub-groups differ (``other-sub-groups``), or the universal
                checkpoint is of another model (``other-parameters``) or cannot be read (codes of
                ``deepspeed_states``).
        """
        self.core.synchronize()
        if checkpoint_folder:
            self._load_universal(Path(checkpoint_folder), moments=load_optimizer_states)
        else:
            rank = comm.get_rank(group=self.dp_process_group)
            self._load_flat(state_dict_list[rank], moments=load_optimizer_states)
        publish_weights(self, self.core.states())

    def _load_flat(self, saved: Mapping[str, Any], *, moments: bool) -> None:
        """Load what ``state_dict`` returned on this rank; ``moments``: with the moments, the step,
        and what AdamW's parameter groups say of learning rates and the like.
        """
        flat, optimizer_state = saved[FP32_FLAT_GROUPS], saved[OPTIMIZER_STATE_DICT]
        states = self.core.states()
        if [weights.numel() for weights in flat] != [state.weights.numel() for state in states]:
            raise OffloadError(
                f"The checkpoint has {len(flat)} sub-groups, of other sizes than the {len(states)} "
                "here: its sub_group_size or its number of ranks was another. "
                "superoffload.load_state loads what superoffload.save_state saved with any.",
                code="other-sub-groups",
            )
        for index, (state, weights) in enumerate(zip(states, flat, strict=True)):
            state.master_weights.copy_(weights)
            if moments:
                kept = optimizer_state["state"][index]
                state.set_moments(kept["exp_avg"], kept["exp_avg_sq"])
        if moments:
            groups = zip(self.optimizer.param_groups, optimizer_state["param_groups"], strict=True)
            for group, values in groups:
                group.update(values)
            self.core.set_steps_taken(
                max((int(kept["step"]) for kept in optimizer_state["state"].values()), default=0)
            )

    def _load_universal(self, folder: Path, *, moments: bool) -> None:
        """Load a universal checkpoint; ``moments``: with the moments and the step."""
        saved = deepspeed_states(folder)
        parameters = {
            self.param_names[parameter]: parameter
            for parameter in chain.from_iterable(self.fp16_groups)
        }
        numels = {name: parameter.ds_numel for name, parameter in parameters.items()}
        if names := sorted({name for name, _ in saved.numels.items() ^ numels.items()}):
            raise OffloadError(
                f"{folder} is of another model: {len(names)} parameters differ in name or size, "
                f"{', '.join(names[:3])} first.",
                code="other-parameters",
            )
        states = self.core.states()
        tensors = [[state.master_weights] for state in states]
        moments = moments and saved.moments
        if moments:
            for found in tensors:
                found += (torch.zeros(found[0].numel()) for _ in range(2))
        rank = comm.get_rank(group=self.dp_process_group)
        for name, kinds in saved.read():
            index, member = self._member[parameters[name].ds_id]
            begin, end = self.core.sub_groups[index].span(member)
            for target, whole in zip(tensors[index], kinds, strict=False):
                shard = whole[rank * (end - begin) : (rank + 1) * (end - begin)]
                target[begin : begin + len(shard)].copy_(shard)
        if moments:
            for state, (_, first, second) in zip(states, tensors, strict=True):
                state.set_moments(first, second)
            self.core.set_steps_taken(saved.adam_step)

    def destroy(self) -> None:
        self.release()
        super().destroy()

    def release(self) -> None:
        """End the worker, release the memory and all references to it, and restore DeepSpeed's
        functions.
        """
        self.core.close()
        self.fp32_partitioned_groups_flat = []
        self._waits.originals.close()
