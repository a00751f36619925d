"""How the lines of a chart are told apart: by colour, and by a letter where a colour would be used again or is not shown. Pure."""

from __future__ import annotations

import string
from typing import NamedTuple

RUN_ROLES = tuple(f"run-{number}" for number in range(1, 9))
"""Colours of runs that are laid over another, and of GPUs, nodes and hosts beside each other."""
SIGNS = string.ascii_lowercase + string.digits[1:]


class Look(NamedTuple):
    """How one of several lines is drawn."""

    role: str
    sign: str
    """The letter that stands on the line and beside its name; empty where the colour alone tells."""


def look_of(index: int, *, coloured: bool) -> Look:
    """Return the look of one of several lines: on a screen without colours, each has a sign."""
    alone = len(RUN_ROLES) if coloured else 0
    return Look(
        RUN_ROLES[index % len(RUN_ROLES)],
        SIGNS[(index - alone) % len(SIGNS)] if index >= alone else "",
    )
