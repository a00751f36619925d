"""Requests of users, and checkpoints by rank 0's clock: all ranks act on them after the same step."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from so_tui.runs import RunDirectory, control, read_state
from so_tui.spec import InputError
from so_tui_trainer.failures import SUPERSEDED, TrainingError
from so_tui_trainer.ranks import Ranks

_STOP, _CHECKPOINT = 1, 2
_NEWER_CHECK_S = 10.0


class StoppedEarlyError(Exception):
    """A stop was requested before this attempt trained anything: there is nothing to save."""


def refuse_if_superseded(run: RunDirectory, attempt: int) -> None:
    """Refuse to go on once the run's state names a newer attempt: this one counted as lost and must write nothing more.

    Raises:
        TrainingError: There is one (``superseded``).
    """
    try:
        newest = read_state(run).attempt
    except (
        InputError
    ):  # its file system is away for a moment, or the run was deleted, which the supervisor notices
        return
    if newest > attempt:
        raise TrainingError(
            SUPERSEDED,
            f"attempt {newest} of the run has been started, because this one counted as lost",
        )


class Control:
    """Rank 0 broadcasts after each step what it finds in ``control/``; the ranks act on it after the next step.

    The broadcast runs while that step computes, so no rank waits for another here.
    """

    def __init__(
        self, run: RunDirectory, ranks: Ranks, *, attempt: int = 0, every_s: float = 0.0
    ) -> None:
        """Watch a run's control folder.

        Args:
            run: The run.
            ranks: The process group.
            attempt: This attempt; 0 if none can supersede it.
            every_s: Seconds between checkpoints by rank 0's clock; 0 for none.
        """
        self._run, self._ranks, self._attempt = run, ranks, attempt
        self._newer_checked_at = time.monotonic()
        self._every_s, self._saved_at = every_s, time.monotonic()
        self._flags = torch.zeros(1, dtype=torch.int64)
        self._broadcast: dist.Work | None = None
        self._told = False
        """The log says that a request waits."""
        if ranks.first:  # Requests of an earlier attempt were meant for it.
            control.clear(run, "checkpoint")

    def stop_early(self) -> None:
        """Check for a stop request between parts of the loading. All ranks must call it.

        Raises:
            StoppedEarlyError: A stop is requested; raised on all ranks.
        """
        if self._ranks.broadcast("stop" in control.pending(self._run), bool):
            raise StoppedEarlyError

    def poll(self) -> frozenset[control.Action]:
        """Return what was broadcast after the step before, and broadcast what is requested now. All ranks must call it after every step."""
        if self._broadcast is not None:
            self._broadcast.wait()
        received = int(self._flags)
        self._flags = torch.zeros(1, dtype=torch.int64)
        if self._ranks.first:
            self._refuse_if_superseded()
            requested = control.pending(self._run)
            # A request for a checkpoint is broadcast once; one to stop stays until the run ends.
            self._flags[0] = _STOP * ("stop" in requested) | _CHECKPOINT * (
                "checkpoint" in requested and self._cleared()
            )
            if self._every_s and time.monotonic() >= self._saved_at + self._every_s:
                self._flags[0] |= _CHECKPOINT
                self.saved()
        self._broadcast = dist.broadcast(self._flags, src=0, group=self._ranks.group, async_op=True)
        actions: dict[control.Action, int] = {"stop": _STOP, "checkpoint": _CHECKPOINT}
        return frozenset(action for action, bit in actions.items() if received & bit)

    def _cleared(self) -> bool:
        """Remove the request for a checkpoint. While its folder cannot be written it has to wait: it would be carried out at every step."""
        try:
            control.clear(self._run, "checkpoint")
        except OSError as error:
            if not self._told:
                print(
                    f"the request for a checkpoint waits, because it cannot be removed: {error}",
                    flush=True,
                )
            self._told = True
            return False
        self._told = False
        return True

    def _refuse_if_superseded(self) -> None:
        if self._attempt and time.monotonic() >= self._newer_checked_at + _NEWER_CHECK_S:
            self._newer_checked_at = time.monotonic()
            refuse_if_superseded(self._run, self._attempt)

    def saved(self) -> None:
        """Restart the interval of checkpoints by the clock, after any checkpoint."""
        self._saved_at = time.monotonic()

    def close(self) -> None:
        """Wait for the last broadcast, so that the process group can be destroyed."""
        if self._broadcast is not None:
            self._broadcast.wait()
