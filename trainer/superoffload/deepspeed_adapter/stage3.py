"""Our SuperOffload optimizer in the place of DeepSpeed's. It reads DeepSpeed's insides: written for 0.19.8, as ``adapter`` is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.superoffload import superoffload_stage3
from deepspeed.runtime.torch_autocast import sort_dtypes
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from so_tui.model.sharding import gpu_sub_groups, sub_group_slices
from superoffload.errors import OffloadError
from superoffload.optimizer import SuperOffload
from superoffload.sub_groups import Gradient, SubGroup


@dataclass(frozen=True)
class SuperOffloadSettings:
    ratio: float
    accumulation: int
    clipping: float
    cpus: Sequence[int]
    watchdog_timeout_s: float


@contextmanager
def own_super_offload(settings: SuperOffloadSettings) -> Iterator[None]:
    """While this lasts, an engine that wants DeepSpeed's SuperOffload optimizer gets ours; if it fails to start, nothing of ours stays."""
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
            watchdog_timeout_s=settings.watchdog_timeout_s,
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
                self.core.wait_for_weights(
                    {self._member[parameter.ds_id][0] for parameter in parameters if parameter.ds_id in self._member}
                )
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
        self.core.synchronize()
        index, member = self._member[param.ds_id]
        first, second = self.core.moments(index)
        states = {None: self.core.master(index), "exp_avg": first, "exp_avg_sq": second}
        begin, end = self.core.sub_groups[index].span(member)
        return states[optim_state_key][begin:end], index

    def _get_fp32_grad_state_partition(self, param: Any, release_swap_buffers: bool) -> Any:
        raise OffloadError("SuperOffload keeps no gradients: they are handed to the optimizer while backward runs.")

    def refresh_fp32_params(self) -> None:
        """Masters from the weights, when these were changed by hand: otherwise the next step undoes the change."""
        self.core.synchronize()
        super().refresh_fp32_params()

    def state_dict(self) -> dict[str, Any]:
        raise OffloadError("This optimizer's state is saved by superoffload.save_state.")

    def load_state_dict(self, *arguments: Any, **keywords: Any) -> None:
        raise OffloadError("This optimizer's state is loaded by superoffload.load_state.")

    def destroy(self) -> None:
        self.release()
        super().destroy()

    def release(self) -> None:
        """Ends what is ours: the worker, the memory and what refers to it, the gates."""
        self.core.close()
        self.fp32_partitioned_groups_flat = []
        for parameter, name, original in self._ungated:
            setattr(parameter, name, original)
        self._ungated.clear()
