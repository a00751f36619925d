"""What a kind of fault is: when it comes, what it does, and what must be said of the run
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal

from benchmarks.faults.scene import How, Moment, Scene

Begin = Literal["detached", "plain", "screen", "stopped"]
"""How the run begins. ``stopped`` is a copy of a run that was stopped with three checkpoints; it
trains again when it is resumed.
"""
Told = tuple[str, str]
"""A final state and its code."""

FINISHED: Told = ("finished", "finished")
STOPPED: Told = ("stopped", "stopped")
UNOBSERVED: Told = ("lost", "unobserved")


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    name: str
    group: str
    what: str
    """In a few words, for the table."""
    inject: Callable[[Scene, Random], None]
    told: frozenset[Told]
    """What may be said of the run once the fault is over: each is right, depending on the
    moment.
    """
    begin: Begin = "detached"
    moments: tuple[Moment, ...] = ("training",)
    refusals: frozenset[str] = frozenset()
    """Codes of which the first resume must give one: it refuses to continue, or the attempt fails
    with it. Empty: it works.
    """
    remedy: Callable[[Scene], None] | None = None
    """What a user does then, before resuming again."""
    starts_over: bool = False
    """The second resume is told to train from step 0 again."""
    loses_records: bool = False
    """Records of steps are gone, so not every step can be compared."""
    loses_checkpoint: bool = False
    """The newest checkpoint is damaged, so an older one is used."""
    needs_shim: bool = False
    starter_exit: frozenset[int] | None = None
    """Exit codes of the command that started the run and follows it; None where it does not
    matter.
    """

    @property
    def how(self) -> How:
        """How the run is started."""
        return "detached" if self.begin == "stopped" else self.begin


def told(*pairs: Told) -> frozenset[Told]:
    """Return the states and codes that are right."""
    return frozenset(pairs)


def failed(*codes: str) -> frozenset[Told]:
    """Return failures with these codes."""
    return frozenset(("failed", code) for code in codes)
