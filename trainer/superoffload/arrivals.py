"""Which gradients of the step in progress have arrived, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

from superoffload.errors import OffloadError
from superoffload.sub_groups import Gradient, SubGroup

_SHOWN = 5
"""Parameters that an error names."""


class Arrivals:
    """Counts the gradients of one rank's sub-groups since the last step.

    Args:
        sub_groups: All sub-groups of the rank.
        accumulation_steps: Micro-batches per step.
    """

    def __init__(self, sub_groups: Sequence[SubGroup], accumulation_steps: int) -> None:
        self._sub_groups = sub_groups
        self._accumulation_steps = accumulation_steps
        self.micro_batch = 0
        """Counted from 0 within the step."""
        self._members: dict[int, set[int]] = {}
        """By sub-group: its members with a gradient in this micro-batch."""

    @property
    def has_begun(self) -> bool:
        """Whether any gradient has arrived since the last step."""
        return bool(self.micro_batch or self._members)

    def add(self, gradient: Gradient) -> None:
        """Count a gradient.

        Raises:
            OffloadError: If it is there already (``second-gradient``), or the step has all its micro-batches (``too-many-micro-batches``).
        """
        members = self._members.setdefault(gradient.sub_group, set())
        if gradient.member in members:
            name = self._sub_groups[gradient.sub_group].names[gradient.member]
            raise OffloadError(
                f"The gradient of {name} arrived twice in one micro-batch. Call backward once per micro-batch.",
                code="second-gradient",
            )
        if self.micro_batch >= self._accumulation_steps:
            raise OffloadError(
                f"There were more backward passes than the configured {self._accumulation_steps} before a step. "
                "Set train.gradient_accumulation to the number of micro-batches.",
                code="too-many-micro-batches",
            )
        members.add(gradient.member)

    def is_complete(self, index: int) -> bool:
        """Return whether all gradients of a sub-group have arrived in this micro-batch."""
        return len(self._members.get(index, ())) == len(self._sub_groups[index].names)

    def end_micro_batch(self, step: int) -> None:
        """Begin the next micro-batch of step ``step``. Raises OffloadError (``missing-gradient``), with names, if gradients are missing."""
        missing = [
            name
            for index, group in enumerate(self._sub_groups)
            for member, name in enumerate(group.names)
            if member not in self._members.get(index, ())
        ]
        if missing:
            shown = ", ".join(missing[:_SHOWN]) + (
                f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            )
            raise OffloadError(
                f"{len(missing)} trainable parameters got no gradient in step {step}, micro-batch "
                f"{self.micro_batch + 1}: {shown}. Freeze parameters on which the loss does not depend (requires_grad_(False)), "
                "list blocks of experts in model.leaf_modules, and use activation checkpointing with use_reentrant=False.",
                code="missing-gradient",
            )
        self._members.clear()
        self.micro_batch += 1

    def begin_step(self) -> None:
        """Count anew."""
        self.micro_batch = 0
        self._members.clear()
