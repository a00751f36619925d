"""Folders of a user's state and cache, following the XDG rules."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def state_home() -> Path:
    """Return so-tui's folder in the XDG state folder."""
    return _home("XDG_STATE_HOME", ".local/state", os.environ)


def cache_home() -> Path:
    """Return so-tui's folder in the XDG cache folder. Its content may be deleted at any time."""
    return _home("XDG_CACHE_HOME", ".cache", os.environ)


def kernel_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder of the compiled CPU Adam kernels for a process with this environment."""
    return _home("XDG_CACHE_HOME", ".cache", environment) / "kernels"


def compiled_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder of what torch, Triton and others compile, for a process with this environment."""
    return _home("XDG_CACHE_HOME", ".cache", environment) / "compiled"


def _home(variable: str, default: str, environment: Mapping[str, str]) -> Path:
    """Return a folder from an XDG variable; the XDG rules say to ignore relative paths."""
    base = Path(environment.get(variable, ""))
    return (base if base.is_absolute() else Path(environment.get("HOME") or Path.home()) / default) / "so-tui"
