"""Where so-tui keeps what belongs to a user."""

from __future__ import annotations

import os
from pathlib import Path


def state_home() -> Path:
    """so-tui's folder in the XDG state folder."""
    return _home("XDG_STATE_HOME", ".local/state")


def cache_home() -> Path:
    """so-tui's folder in the XDG cache folder: what is there may be deleted at any time."""
    return _home("XDG_CACHE_HOME", ".cache")


def _home(variable: str, usual: str) -> Path:
    """Of a relative path the XDG rules want nothing known."""
    base = Path(os.environ.get(variable, ""))
    return (base if base.is_absolute() else Path.home() / usual) / "so-tui"
