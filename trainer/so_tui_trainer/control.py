"""What users asked for, and what rank 0's clock says, while the run loads and trains: all ranks learn of it for the same step."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from so_tui.runs import RunDirectory, control
from so_tui_trainer.ranks import Ranks

_STOP, _CHECKPOINT = 1, 2


class StoppedEarlyError(Exception):
    """A stop was asked for before this attempt trained anything: there is nothing to save."""


class Control:
    """Rank 0 announces after each step what it found in ``control/``; the ranks act on it after the next one.

    The announcement travels while that step computes, so no rank ever waits for another here.
    """

    def __init__(self, run: RunDirectory, ranks: Ranks, *, every_s: float = 0.0) -> None:
        """``every_s``: seconds between checkpoints by rank 0's clock; 0: none."""
        self._run, self._ranks = run, ranks
        self._every_s, self._saved_at = every_s, time.monotonic()
        self._word = torch.zeros(1, dtype=torch.int64)
        self._sent: dist.Work | None = None
        if ranks.first:  # requests of an earlier attempt were meant for it
            control.clear(run, "checkpoint")

    def stop_early(self) -> None:
        """To be called by all ranks, between parts of the loading. Raises StoppedEarlyError, on all alike, when a stop is asked for."""
        if self._ranks.broadcast("stop" in control.pending(self._run)):
            raise StoppedEarlyError

    def poll(self) -> frozenset[control.Action]:
        """What was announced after the step before; announces what is asked now. Every rank must call it after every step."""
        if self._sent is not None:
            self._sent.wait()
        heard = int(self._word)
        self._word = torch.zeros(1, dtype=torch.int64)
        if self._ranks.first:
            asked = control.pending(self._run)
            self._word[0] = _STOP * ("stop" in asked) | _CHECKPOINT * ("checkpoint" in asked)
            if self._every_s and time.monotonic() >= self._saved_at + self._every_s:
                self._word[0] |= _CHECKPOINT
                self.saved()
            if "checkpoint" in asked:  # announced once is enough; a stop stays until the run ends
                control.clear(self._run, "checkpoint")
        self._sent = dist.broadcast(self._word, src=0, group=self._ranks.group, async_op=True)
        actions: dict[control.Action, int] = {"stop": _STOP, "checkpoint": _CHECKPOINT}
        return frozenset(action for action, bit in actions.items() if heard & bit)

    def saved(self) -> None:
        """A checkpoint was saved, whatever for: the next one by the clock is due a whole interval from now."""
        self._saved_at = time.monotonic()

    def close(self) -> None:
        """Collect the last announcement, so that nothing is under way when the group is torn down."""
        if self._sent is not None:
            self._sent.wait()
