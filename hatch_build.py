"""Records in wheel and sdist which commit they were built from; ``so-tui --version`` shows it."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

TARGET = "so_tui/commit"


class CommitHook(BuildHookInterface[Any]):
    """Adds ``so_tui/commit`` where the sources are a git checkout. An sdist already has it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the file, and have it included."""
        if version == "editable" or (Path(self.root) / TARGET).exists():
            return
        command = [
            "git",
            "-C",
            self.root,
            "describe",
            "--always",
            "--exclude=*",
            "--abbrev=12",
            "--dirty",
        ]
        try:
            commit = subprocess.run(
                command, capture_output=True, text=True, check=True
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError):  # no git, or no checkout
            return
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name) / "commit"
        path.write_text(f"{commit}\n")
        build_data["force_include"][str(path)] = TARGET

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the file, which is in the artifact now."""
        if folder := getattr(self, "_folder", None):
            folder.cleanup()
