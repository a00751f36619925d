"""Parameter groups as scripts give them: what of them is trained, and which of their options our AdamW has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import torch

from superoffload.errors import OffloadError

ParameterGroups = Iterable[dict[str, Any]] | Iterable[torch.nn.Parameter]
"""As torch's optimizers take them: groups ``{"params": [...], "weight_decay": ...}``, or parameters. Frozen ones are ignored."""


def trainable(parameter_groups: ParameterGroups, model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return the groups without frozen parameters, and without groups of nothing else.

    Raises:
        OffloadError: If nothing is left (``nothing-trainable``), or a parameter is none of the model's (``other-parameters``).
    """
    given: list[Any] = list(parameter_groups)
    given = (
        [{"params": given}]
        if given and all(isinstance(each, torch.Tensor) for each in given)
        else given
    )
    groups = [
        {**group, "params": [parameter for parameter in group["params"] if parameter.requires_grad]}
        for group in given
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise OffloadError("The model has no trainable parameter.", code="nothing-trainable")
    here = {id(parameter) for parameter in model.parameters()}
    foreign = [
        parameter for group in groups for parameter in group["params"] if id(parameter) not in here
    ]
    if foreign:
        raise OffloadError(
            f"parameter_groups has parameters that are none of the model's: {len(foreign)}, the first of shape "
            f"{tuple(foreign[0].shape)}. Make the groups from model.parameters(), after the last change of the model.",
            code="other-parameters",
        )
    return groups


def check_options(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise OffloadError (``optimizer-option``) for what torch's AdamW can do and the Adam worker cannot."""
    for index, name in product(range(len(groups)), ("amsgrad", "maximize")):
        if groups[index].get(name):
            message = f"Parameter group {index} has {name} = True, which our AdamW does not do. Leave it out."
            raise OffloadError(message, code="optimizer-option")
