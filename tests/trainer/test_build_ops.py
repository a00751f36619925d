"""Kernels that torch compiles are loaded after a compilation that was killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.cpp_extension import _get_build_directory

from tests.support.python_path import checkout_path

pytestmark = pytest.mark.slow


def test_what_a_killed_compilation_leaves_holds_nobody_up() -> None:
    left = Path(_get_build_directory("cpu_adam", False)) / "lock"
    left.touch()
    build = [sys.executable, "-m", "so_tui_trainer.tools.build_ops"]
    done = subprocess.run(
        build,
        input="{}",
        env=os.environ | {"PYTHONPATH": checkout_path()},
        capture_output=True,
        text=True,
        timeout=180,  # far more than compiling takes
        check=True,
    )
    assert json.loads(done.stdout)["deepspeed"] == ""
    assert not left.exists()
