"""Environments of the older sets of training packages, made once, in the user's cache.

``python -m tests.support.set_environments``
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from so_tui.machine.software import VersionSet, known_versions
from tests.support.python_path import PIP, ROOT

*OLDER, _ = known_versions().sets


def environment(packages: VersionSet) -> Path:
    """Return the Python of a set's environment, made unless it exists; without so-tui."""
    locks = [ROOT / "locks" / name for name in ("light.txt", f"{packages.name}.txt")]
    key = hashlib.sha256(
        b"".join(
            [sys.version.encode(), packages.torch.encode(), *(lock.read_bytes() for lock in locks)]
        )
    )
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "so-tui" / "version-sets" / f"{packages.name}-{key.hexdigest()[:12]}"
    python, complete = folder / "bin" / "python", folder / "complete"
    if not complete.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip: list[str | Path] = [python, *PIP]
        index = ["--index-url", os.environ["TORCH_INDEX"]] if os.environ.get("TORCH_INDEX") else []
        subprocess.run([*pip, "-r", locks[0]], check=True)
        subprocess.run([*pip, *index, f"torch=={packages.torch}"], check=True)
        subprocess.run([*pip, "--use-pep517", "-r", locks[1]], check=True)
        complete.touch()
    return python


if __name__ == "__main__":
    for each in OLDER:
        print(f"tests with the set {each.name} of training packages: {environment(each)}")
