"""The engine with other DeepSpeed versions than the installed one: the oldest supported, and the newest that differs from today's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.python_path import python_path

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
TESTS = ("tests/superoffload/test_superoffload.py", "tests/superoffload/test_own_loop.py", "tests/superoffload/test_speculation.py")


@pytest.mark.parametrize("version", ["0.18.9", "0.19.3"])
def test_the_engine_trains_as_with_the_installed_version(version: str, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", str(tmp_path)]
    done = subprocess.run(
        [*install, f"deepspeed=={version}"], env=os.environ | {"DS_BUILD_OPS": "0"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    environment = os.environ | {"PYTHONPATH": python_path(tmp_path, ROOT, ROOT / "trainer")}
    found = subprocess.run(
        [sys.executable, "-c", "import deepspeed; print(deepspeed.__version__)"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split()[-1] == version
    arguments = ["-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu and not system", *TESTS]
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert tested.returncode == 0, tested.stdout[-4000:]
