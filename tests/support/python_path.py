"""Where the processes that tests start look for modules."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python_path(*first: Path | str) -> str:
    """A ``PYTHONPATH`` with these folders before what this process has there: some machines have torch or DeepSpeed nowhere else."""
    return os.pathsep.join([*map(str, first), *filter(None, [os.environ.get("PYTHONPATH")])])


def checkout_path(*more: Path | str) -> str:
    """The same with this checkout first, so that it wins over what is installed."""
    return python_path(ROOT, ROOT / "trainer", *more)
