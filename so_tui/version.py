"""Which so-tui this is."""

from __future__ import annotations

import subprocess
from pathlib import Path

from so_tui import __version__

_PACKAGE = Path(__file__).parent


def version_text() -> str:
    """Return name and version, and the commit where it is known: ``so-tui 0.1.0 (98b0ed9c1a2b)``;
    ``-dirty`` marks changed files.
    """
    commit = _built_from() or _checked_out()
    return f"so-tui {__version__}" + (f" ({commit})" if commit else "")


def _built_from() -> str:
    """Return the commit that the wheel was built from (``hatch_build.py``)."""
    try:
        return (_PACKAGE / "commit").read_text().strip()
    except OSError:
        return ""


def _checked_out() -> str:
    """Return the commit of the checkout that this runs from."""
    root = _PACKAGE.parent
    if not (root / ".git").exists():
        return ""
    command = [
        "git",
        "-C",
        str(root),
        "describe",
        "--always",
        "--exclude=*",
        "--abbrev=12",
        "--dirty",
    ]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
    except (
        OSError,
        subprocess.SubprocessError,
    ):  # no git, or another user's checkout, which git does not trust
        return ""
