"""Module search paths for processes that tests start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet", "install")
"""Arguments of Python that install packages."""


def python_path(*first: Path | str) -> str:
    """Return a ``PYTHONPATH`` with these folders before those that may provide torch."""
    return os.pathsep.join([*map(str, first), *filter(None, [os.environ.get("PYTHONPATH")])])


def checkout_path(*more: Path | str) -> str:
    """Return a ``PYTHONPATH`` with this checkout before installed packages."""
    return python_path(ROOT, ROOT / "trainer", *more)


def printed(
    *arguments: str,
    env: Mapping[str, str] | None = None,
    given: str | None = None,
    timeout_s: float = 400.0,
) -> str:
    """Run Python with these arguments, which must succeed, and return what it prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=env,
        input=given,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
