"""Whether Slurm is here."""

from __future__ import annotations

import shutil


def has_slurm() -> bool:
    """Return whether jobs can be submitted from here."""
    return shutil.which("sbatch") is not None
