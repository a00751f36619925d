"""``[checkpoint]``: when states are saved, and where."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from so_tui.spec.sections.section import Section


class CheckpointSpec(Section, frozen=True):
    every_steps: Annotated[
        int,
        Meta(
            ge=0,
            description="Steps between checkpoints; 0 disables saving by steps.",
            extra={"unit": "optimizer steps"},
        ),
    ] = 0
    every_minutes: Annotated[
        float,
        Meta(
            ge=0,
            description="Time between checkpoints, by the clock of rank 0; 0 disables saving by time.",
            extra={"unit": "minutes"},
        ),
    ] = 0.0
    background: Annotated[
        bool,
        Meta(
            description="Train on while a checkpoint is written, as far as host memory has room for a copy of the states."
        ),
    ] = True
    copies_gib: Annotated[
        float,
        Meta(
            ge=0,
            le=1e6,
            description="Most host memory per rank for the copies of `background`; 0 sets no limit.",
            extra={"unit": "GiB"},
        ),
    ] = 0.0
    at_end: Annotated[
        bool, Meta(description="Save a checkpoint when the run finishes or is stopped.")
    ] = True
    keep: Annotated[int, Meta(ge=1, description="Number of newest checkpoints to keep.")] = 2
    folder: Annotated[
        str,
        Meta(description="Folder for checkpoints; if empty, `checkpoints/` in the run directory."),
    ] = ""
    export: Annotated[bool, Meta(description="Also export a Hugging Face folder at the end.")] = (
        False
    )

    @property
    def repeats(self) -> bool:
        """Whether checkpoints are saved before the end."""
        return bool(self.every_steps or self.every_minutes)

    @property
    def saves(self) -> bool:
        """Whether any checkpoint is saved without a request; an export needs one at the end."""
        return self.repeats or self.at_end or self.export

    @property
    def most_at_once(self) -> int:
        """Largest number of checkpoints on disk at the same time: a new one is written before the oldest is deleted."""
        return self.keep + 1 if self.repeats else int(self.saves)
