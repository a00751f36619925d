"""Warnings of a resume that rounds Adam's moments or begins them anew: the run goes on, though not bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from so_tui.spec import RunSpec
from so_tui.units import thousands
from so_tui_trainer.checkpoint_folder import Manifest
from so_tui_trainer.engine_settings import states_format
from superoffload.resharding import Rounded


class Warned(NamedTuple):
    code: str
    message: str
    suggestion: str


def rounding_warnings(saved: Manifest, now: RunSpec, rounded: Rounded) -> Iterator[Warned]:
    """Yield what to warn of.

    Args:
        saved: The checkpoint's manifest.
        now: The spec of the run that loaded it.
        rounded: What ``checkpoint.load`` returned.
    """
    before, after = states_format(saved.spec), states_format(now)
    if rounded.restarted:
        message = "DeepSpeed's own SuperOffload keeps Adam's moments out of reach: the weights are those of the checkpoint, the moments are zero"
        yield Warned(
            "moments-restarted", message, 'Train with offload.engine = "so-tui", which saves them.'
        )
        return
    if before != after:
        message = f"the checkpoint's moments are {before} and this run's are {after}: what the new format cannot hold is rounded"
        yield Warned(
            "states-format-changed",
            message,
            f'Resume with offload.states = "{before}" to continue bit for bit.',
        )
        return
    if rounded.numel:
        message = f"the moments of {thousands(rounded.numel)} parameters were fp32 on the GPUs and are rounded to {after} in host memory"
        suggestion = f"Resume on {saved.ranks} GPUs with the same offload.ratio and offload.sub_group_size to continue bit for bit."
        yield Warned("moments-rounded", message, suggestion)
    if rounded.blocks:
        message = f"{thousands(rounded.blocks)} blocks of 128 8-bit moments had been cut by other shards and are rounded once more"
        yield Warned(
            "blocks-rounded-again",
            message,
            f"Resume on {saved.ranks} GPUs to continue bit for bit.",
        )
