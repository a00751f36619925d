"""The attacks by id, and the verdict that each returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from benchmarks.attacks.stage import Command, Stage

Outcome = Literal["HELD", "SUCCEEDED", "SKIPPED", "BROKEN"]
"""BROKEN: the program itself failed, so that nothing is known."""


class Verdict(NamedTuple):
    """What came of one try."""

    outcome: Outcome
    evidence: str


@dataclass(frozen=True)
class Attack:
    """An attack."""

    id: str
    """The number of the finding, and a letter."""
    title: str
    play: Callable[[Stage], Verdict]
    race: bool
    """Whether its success depends on a moment, so that it is tried repeatedly."""


ATTACKS: list[Attack] = []
"""All of them."""


def attack(
    number: str, title: str, *, race: bool = False
) -> Callable[[Callable[[Stage], Verdict]], Callable[[Stage], Verdict]]:
    """Register a function as an attack."""

    def registered(play: Callable[[Stage], Verdict]) -> Callable[[Stage], Verdict]:
        ATTACKS.append(Attack(number, title, play, race))
        return play

    return registered


def judged(succeeded: object, evidence: object, otherwise: str = "") -> Verdict:
    """Return SUCCEEDED with its evidence if that is true, else HELD with what was seen instead."""
    told = str(evidence)
    return Verdict("SUCCEEDED", told) if succeeded else Verdict("HELD", otherwise or told)


def ran(stage: Stage, victim: Command, label: str, seen: str = "") -> Verdict:
    """Tell whether the owner ran code with a label."""
    return judged(stage.ran(label), stage.ran(label), f"{seen}; {victim.text}")
