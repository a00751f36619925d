"""Speculation: whether to step sub-groups before the gradient norm is known, as if it were within the limit.

A step that was taken too early is discarded and redone. Until the norm is known the Adam worker would have had nothing else to do, so a
discarded step costs little: the sub-group that the worker is busy with, copies, and memory bandwidth beside backward. A run whose norm
exceeds the limit in every step has nothing to gain and must not pay even that.
"""

from __future__ import annotations

from collections import deque

REMEMBERED = 4
"""Steps whose norms decide about the next one."""


class Speculation:
    """Decides for one rank and counts. All ranks see the same norms and so decide alike.

    Attributes:
        kept: Steps so far in which sub-groups were stepped early and the norm was within the limit.
        redone: Those in which it was not, so that these sub-groups were stepped again from the old states.
    """

    def __init__(self) -> None:
        self.kept = self.redone = 0
        self._within: deque[bool] = deque(maxlen=REMEMBERED)

    @property
    def is_worthwhile(self) -> bool:
        """Whether to speculate in the next step: unless all of the last steps' norms exceeded the limit."""
        return len(self._within) < REMEMBERED or any(self._within)

    def record(self, *, within: bool, speculated: bool) -> None:
        """Record a step whose norm was within the limit, or exceeded it; ``speculated``: whether sub-groups had been stepped early."""
        self._within.append(within)
        if speculated:
            self.kept += within
            self.redone += not within
