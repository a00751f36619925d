"""Where so-tui keeps what belongs to a user."""

from __future__ import annotations

import os
from pathlib import Path


def state_home() -> Path:
    """so-tui's folder in the XDG state folder."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".local" / "state") / "so-tui"
