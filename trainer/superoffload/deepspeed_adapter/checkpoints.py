"""DeepSpeed's checkpoints: one rank's states as DeepSpeed's ZeRO-3 optimizer has them, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import (
    FP32_FLAT_GROUPS,
    OPTIMIZER_STATE_DICT,
    PARTITION_COUNT,
    ZERO_STAGE,
)
from deepspeed.runtime.zero.config import ZeroStageEnum

from superoffload.conversion import deepspeed_states
from superoffload.errors import OffloadError
from superoffload.optimizer import SuperOffload


def to_state_dict(
    core: SuperOffload, parameter_groups: Sequence[Mapping[str, Any]], partition_count: Any
) -> dict[str, Any]:
    """Return copies of the states, which ``zero_to_fp32.py`` can read.

    Args:
        core: The rank's optimizer, synchronized.
        parameter_groups: Those of AdamW.
        partition_count: As DeepSpeed's optimizer has it.
    """
    moments = [core.moments(index) for index in range(len(core.sub_groups))]
    state = {
        index: {
            "step": core.steps_taken,
            "exp_avg": first.cpu().clone(),
            "exp_avg_sq": second.cpu().clone(),
        }
        for index, (first, second) in enumerate(moments)
    }
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in parameter_groups
    ]
    return {
        ZERO_STAGE: ZeroStageEnum.weights,
        PARTITION_COUNT: partition_count,
        OPTIMIZER_STATE_DICT: {"state": state, "param_groups": groups},
        FP32_FLAT_GROUPS: [core.master_weights(index).cpu().clone() for index in state],
    }


def load_state_dict(
    core: SuperOffload,
    parameter_groups: Sequence[dict[str, Any]],
    saved: Mapping[str, Any],
    *,
    moments: bool,
) -> None:
    """Load what ``to_state_dict`` returned, of as many ranks and sub-groups.

    Args:
        core: The rank's optimizer, synchronized.
        parameter_groups: Those of AdamW, which get the saved learning rates and the like with the moments.
        saved: This rank's.
        moments: Whether to load the moments and the step, too.

    Raises:
        OffloadError: If the sub-groups differ (``other-sub-groups``).
    """
    flat, optimizer_state = saved[FP32_FLAT_GROUPS], saved[OPTIMIZER_STATE_DICT]
    here = [group.weights.numel() for group in core.sub_groups]
    if [weights.numel() for weights in flat] != here:
        raise OffloadError(
            f"The checkpoint has {len(flat)} sub-groups, of other sizes than the {len(here)} here: its sub_group_size or its number of "
            "ranks was another. superoffload.load_state loads what superoffload.save_state saved with any.",
            code="other-sub-groups",
        )
    for index, weights in enumerate(flat):
        core.master_weights(index).copy_(weights)
        if moments:
            state = optimizer_state["state"][index]
            core.set_moments(index, state["exp_avg"], state["exp_avg_sq"])
    if moments:
        for group, values in zip(parameter_groups, optimizer_state["param_groups"], strict=True):
            group.update(values)
        core.set_steps_taken(
            max((int(state["step"]) for state in optimizer_state["state"].values()), default=0)
        )


def load_universal(
    core: SuperOffload, folder: Path, numels: Mapping[str, int], rank: int, *, moments: bool
) -> None:
    """Load a universal checkpoint, which any ranks and sub-groups may have saved.

    Args:
        core: The rank's optimizer, synchronized.
        folder: The checkpoint.
        numels: Elements of each whole parameter.
        rank: This rank, among those that share the parameters.
        moments: Whether to load the moments and the step, too.

    Raises:
        OffloadError: If it is of another model (``other-parameters``), or cannot be read (codes of ``deepspeed_states``).
    """
    saved = deepspeed_states(folder)
    if dict(saved.numels) != numels:
        names = sorted(
            name
            for name in saved.numels.keys() | numels.keys()
            if saved.numels.get(name) != numels.get(name)
        )
        message = f"{folder} is of another model: {len(names)} parameters differ in name or size, {', '.join(names[:3])} first."
        raise OffloadError(message, code="other-parameters")
    places = {
        name: (index, group.span(member))
        for index, group in enumerate(core.sub_groups)
        for member, name in enumerate(group.names)
    }
    found = (
        [[torch.zeros(group.weights.numel()) for _ in range(2)] for group in core.sub_groups]
        if moments and saved.moments
        else []
    )
    for states in saved.read():
        index, (begin, end) = places[states.name]
        kinds = [core.master_weights(index), *(found[index] if found else ())]
        for target, whole in zip(
            kinds, (states.master_weights, *(states.moments or ())), strict=False
        ):
            shard = whole[rank * (end - begin) : (rank + 1) * (end - begin)]
            target[begin : begin + len(shard)].copy_(shard)
    for index, (first, second) in enumerate(found):
        core.set_moments(index, first, second)
    if found:
        core.set_steps_taken(saved.adam_step)


def publish_weights(optimizer: Any, states: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Cast the master weights to the weights, and update the parameters that every rank holds whole (persistent ones).

    Args:
        optimizer: A ZeRO-3 optimizer.
        states: (weights, master weights) of each of its sub-groups.
    """
    optimizer._partition_all_parameters()
    for index, (weights, master_weights) in enumerate(states):
        weights.copy_(master_weights)
        optimizer._unflatten_partitioned_parameters(index)
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
