"""Where so-tui keeps what belongs to a user."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def state_home() -> Path:
    """so-tui's folder in the XDG state folder."""
    return _home("XDG_STATE_HOME", ".local/state", os.environ)


def cache_home() -> Path:
    """so-tui's folder in the XDG cache folder: what is there may be deleted at any time."""
    return _home("XDG_CACHE_HOME", ".cache", os.environ)


def kernel_folder(environment: Mapping[str, str]) -> Path:
    """Where the compiled CPU Adam of a process with this environment is kept."""
    return _home("XDG_CACHE_HOME", ".cache", environment) / "kernels"


def _home(variable: str, usual: str, environment: Mapping[str, str]) -> Path:
    """Of a relative path the XDG rules want nothing known."""
    base = Path(environment.get(variable, ""))
    return (base if base.is_absolute() else Path(environment.get("HOME") or Path.home()) / usual) / "so-tui"
