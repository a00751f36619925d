"""Errors of the offload engine. Messages are for users: what happened, why, and what to do."""

from __future__ import annotations

from collections.abc import Sequence


class OffloadError(Exception):
    """Raised when the run cannot go on.

    Attributes:
        code: What went wrong, in kebab case, for callers and tests.
    """

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class NonFiniteGradientError(OffloadError):
    """Raised for a gradient that is NaN or infinite.

    Attributes:
        step: Optimizer step in which the gradient was found, counted from 1.
        sub_group: Index of the first sub-group whose gradient is not finite.
        parameter: Its first parameter, of those whose ``names`` are given.
        poisoned: Whether weights or moments in memory were already updated with it.
    """

    def __init__(self, names: Sequence[str], *, step: int, sub_group: int, poisoned: bool) -> None:
        state = (
            "Weights and moments in memory were updated with it and will not be saved; resume from "
            "the last checkpoint"
            if poisoned
            else "No weights were updated with it; the last checkpoint is valid"
        )
        super().__init__(
            f"Step {step}: the gradient of sub-group {sub_group} ({names[0]} ... {names[-1]}) is "
            f"not finite. {state}. Usual causes: a learning rate that is too high, or a row of "
            "data that overflows the loss.",
            code="non-finite-gradient",
        )
        self.step, self.sub_group, self.parameter = step, sub_group, names[0]
        self.poisoned = poisoned


class WorkerLostError(OffloadError):
    """Raised when the Adam worker died (``worker-ended``) or stopped making progress
    (``worker-stuck``).
    """


class StateMismatchError(OffloadError):
    """Raised when a saved state belongs to another model, or lacks what this engine needs.

    Attributes:
        mismatches: Every reason why it cannot be loaded, in words.
    """

    def __init__(self, folder: object, mismatches: tuple[str, ...]) -> None:
        reasons = "\n  ".join(mismatches)
        super().__init__(
            f"The optimizer state in {folder} does not fit this run:\n  {reasons}",
            code="state-mismatch",
        )
        self.mismatches = mismatches
