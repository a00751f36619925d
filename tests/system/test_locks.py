"""The locked packages on the target machine: Grace is aarch64."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.python_path import ROOT

pytestmark = pytest.mark.system

PLATFORMS = ("manylinux2014", "manylinux_2_17", "manylinux_2_26", "manylinux_2_28", "manylinux_2_34")
BUILT_FROM_SOURCE = ("deepspeed",)
"""Packages without wheels on any platform. torch is the user's choice, and no lock names it."""


def locked(name: str) -> list[str]:
    """Return the requirements in a lock file."""
    lines = (ROOT / "locks" / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#") and line.partition("==")[0] not in BUILT_FROM_SOURCE]


@pytest.mark.parametrize("version", ["3.11"])
@pytest.mark.parametrize("lock", ["light.txt", "train.txt"])
def test_every_locked_package_has_a_wheel_for_aarch64(lock: str, version: str, tmp_path: Path) -> None:
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("\n".join(locked(lock)))
    platforms = [argument for platform in PLATFORMS for argument in ("--platform", f"{platform}_aarch64")]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--dry-run", "--no-deps"]
    options = [
        "--only-binary=:all:",
        "--python-version",
        version,
        *platforms,
        "--target",
        str(tmp_path / "target"),
        "-r",
        str(requirements),
    ]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_locks_name_exact_versions_and_no_package_twice() -> None:
    found = [line for lock in ("light.txt", "train.txt") for line in locked(lock)]
    assert all("==" in line for line in found)
    names = [line.partition("==")[0].lower().replace("_", "-") for line in found]
    assert sorted(names) == sorted(set(names))
