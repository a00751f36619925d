"""Module search paths for processes that tests start."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet", "install")
"""Arguments of Python that install packages."""


def python_path(*first: Path | str) -> str:
    """Return a ``PYTHONPATH`` with these folders before the current ones, which on some machines
    provide torch or DeepSpeed.
    """
    return os.pathsep.join([*map(str, first), *filter(None, [os.environ.get("PYTHONPATH")])])


def checkout_path(*more: Path | str) -> str:
    """Return a ``PYTHONPATH`` with this checkout first, so that it takes precedence over installed
    packages.
    """
    return python_path(ROOT, ROOT / "trainer", *more)
