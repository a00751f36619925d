"""Search for the smallest offload ratio that leaves enough GPU memory free. Pure."""

from __future__ import annotations

from bisect import bisect_left

from so_tui.model.layout import WEIGHT_BYTES
from so_tui.model.profile import ModelProfile
from so_tui.spec.sections.offload import OffloadSpec

RATIOS = tuple(step / 20 for step in range(21))
"""Offload ratios that are tried, ascending."""
STATE_BYTES = 16
"""Bytes per parameter whose optimizer states stay on the GPU."""


def smallest_ratio(profile: ModelProfile, ranks: int, offload: OffloadSpec, room: int) -> float:
    """Return the smallest offload ratio whose states on the GPU fit into ``room``, or 1.0 where none does.

    Args:
        profile: Model to train.
        ranks: Number of ranks that share the states.
        offload: Offload settings; their own ratio is ignored.
        room: Bytes of each GPU that remain when all states are offloaded.
    """

    # Weights whose states stay on the GPU are there, too.
    each = STATE_BYTES + (
        WEIGHT_BYTES if offload.parameters == "cpu" and offload.engine == "so-tui" else 0
    )

    def fits(ratio: float) -> bool:
        # The ratio changes nothing on the GPU but the states that stay there.
        return each * profile.gpu_numel(ranks, offload, ratio) <= room

    return RATIOS[min(bisect_left(RATIOS, True, key=fits), len(RATIOS) - 1)]
