"""Layouts of parameter lists that no model has."""

from __future__ import annotations

from collections.abc import Sequence

from so_tui.model.profile import DeviceRule, Parameter, StateLayout, _assign_devices, _cut


def layout_of(
    parameters: Sequence[Parameter],
    ranks: int,
    sub_group_size: int,
    ratio: float,
    rule: DeviceRule = "so-tui",
) -> StateLayout:
    """Return the layout of a parameter list in the optimizer's order."""
    return _assign_devices(_cut(parameters, ranks, sub_group_size), ranks, ratio, rule)


def on_gpu(layout: StateLayout) -> int:
    """Return how many sub-groups stay on the GPU."""
    return len(layout.sub_groups) - len(layout.cpu_groups)
