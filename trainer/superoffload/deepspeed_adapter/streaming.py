"""Shards in host memory: how they get there, and how ZeRO-3 all-gathers them from there.

DeepSpeed copies a shard to the GPU where it gathers it, and lets the host wait for each copy where there are several ranks. We queue the
copies of all parameters that are gathered together before DeepSpeed looks at them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from deepspeed import comm
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from superoffload.host_weights import HostWeights


def without_pinning(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with which shards are allocated in ordinary host memory.

    They are so only until the optimizer is made, which puts them where they are pinned. Pinned piece by piece they would be rounded up, and
    their memory retained.
    """
    config = deepcopy(dict(ds_config))
    if offload := config.get("zero_optimization", {}).get("offload_param"):
        offload["pin_memory"] = False
    return config


def place(
    groups: Sequence[Sequence[Any]], numels: Sequence[int], on_gpu: int, device: torch.device
) -> tuple[list[torch.Tensor], HostWeights | None]:
    """Move the shards of each sub-group into one tensor: the first sub-groups' to the GPU, the others' to host memory.

    Every sub-group's former memory is freed before the next one is moved.

    Args:
        groups: The parameters of each sub-group.
        numels: Elements of each sub-group's shards.
        on_gpu: How many of them have their states on the GPU.
        device: The GPU.

    Returns:
        The weights of each sub-group, and the ``HostWeights`` of the others; None where there are no others.
    """
    dtype = groups[0][0].ds_tensor.dtype
    host = (
        HostWeights(numels[on_gpu:], dtype, pinned=device.type == "cuda")
        if on_gpu < len(numels)
        else None
    )
    found = []
    for index, (group, numel) in enumerate(zip(groups, numels, strict=True)):
        weights = (
            torch.empty(numel, dtype=dtype, device=device)
            if host is None or index < on_gpu
            else host.weights(index - on_gpu)
        )
        begin = 0
        for parameter in group:
            target = weights.narrow(0, begin, parameter.partition_numel())
            target.copy_(parameter.ds_tensor)
            parameter.ds_tensor.data = target
            begin += target.numel()
        found.append(weights)
    return found, host


def gather(
    all_gather: Callable[..., Any], parameters: Sequence[Any], *arguments: Any, **keywords: Any
) -> Any:
    """All-gather parameters, with their shards copied to the GPU on the current stream. The host does not wait for the copies.

    One rank gathers nothing: there DeepSpeed's own copies are the weights.
    """
    with _shards_on_gpu(parameters) as copies:
        handle = all_gather(parameters, *arguments, **keywords)
        if copies is not None and hasattr(handle, "wait"):
            handle.shards = (
                copies  # which the collective may still read, until the handle has been waited for
            )
        return handle


@contextmanager
def _shards_on_gpu(parameters: Sequence[Any]) -> Iterator[torch.Tensor | None]:
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
    copies = torch.empty(
        sum(shard.numel() for shard in shards), dtype=shards[0].dtype, device=on_host[0].device
    )
    begin = 0
    for parameter, shard in zip(on_host, shards, strict=True):
        copy = copies.narrow(0, begin, shard.numel())
        copy.copy_(shard, non_blocking=True)
        begin += shard.numel()
        copy.__dict__.update(shard.__dict__)  # DeepSpeed keeps what it knows of a shard there
        parameter.ds_tensor = copy
    try:
        yield copies
    finally:
        for parameter, shard in zip(on_host, shards, strict=True):
            parameter.ds_tensor = shard
