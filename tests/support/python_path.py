"""Module search paths for processes that tests start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import pytest

from so_tui.machine.types import version_numbers

ROOT = Path(__file__).parents[2]
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet", "install")
"""Arguments of Python that install packages."""

not_emulated = pytest.mark.skipif(
    Path(sys.executable).read_bytes()[:2] == b"#!",
    reason="a script starts this Python, in an emulator, which has a root folder of its own",
)


def older_than(package: str, *oldest: int) -> pytest.MarkDecorator:
    """Skip where a package is older, and does not do what a test asks of it."""
    found = version_numbers(version(package))
    return pytest.mark.skipif(found < oldest, reason=f"{package} is too old")


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
