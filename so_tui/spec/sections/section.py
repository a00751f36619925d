"""What every section of a preset has in common."""

from __future__ import annotations

from msgspec import Struct


class Section(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every section: immutable, and unknown keys are errors."""
