"""Attention within packed documents: one interface (``varlen``), one registry of kernels (``backends``), one choice (``choice``)."""

from so_tui_trainer.model.attention.backends import kernels_of
from so_tui_trainer.model.attention.choice import (
    arguments,
    choose,
    decide,
    has_sinks,
    needs_of,
    needs_rows,
    present,
    takes_boundaries,
)
from so_tui_trainer.model.attention.exchange import SequenceGroup, sequence_group
from so_tui_trainer.model.attention.varlen import NAME, Documents, Kernels, attend, register

__all__ = [
    "NAME",
    "Documents",
    "Kernels",
    "SequenceGroup",
    "arguments",
    "attend",
    "choose",
    "decide",
    "has_sinks",
    "kernels_of",
    "needs_of",
    "needs_rows",
    "present",
    "register",
    "sequence_group",
    "takes_boundaries",
]
