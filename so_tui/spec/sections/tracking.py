"""``[tracking]``: where metrics are also reported to."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from so_tui.spec.sections.section import Section


class TrackingSpec(Section, frozen=True):
    tensorboard: Annotated[
        bool,
        Meta(
            description="Also write TensorBoard event files to `tensorboard/` in the run directory."
        ),
    ] = False
    wandb: Annotated[
        bool,
        Meta(
            description="Also report to Weights & Biases; account and server come from `wandb login` or `WANDB_*` variables."
        ),
    ] = False
    project: Annotated[str, Meta(min_length=1, description="Project on Weights & Biases.")] = (
        "so-tui"
    )
