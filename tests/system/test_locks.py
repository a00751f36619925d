"""The locked packages on the target machine: Grace is aarch64."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from so_tui.machine.software import PACKAGES, VersionSet, known_versions
from tests.support.python_path import PIP, ROOT
from tools.aarch64.environment import wheel_options

pytestmark = pytest.mark.system

NEWEST, MIDDLE, OLDEST = ("light.txt", "newest.txt", "docs.txt"), ("middle.txt",), ("oldest.txt",)


def locked(*names: str) -> list[tuple[str, str]]:
    """Return the packages of lock files with their exact versions."""
    texts = [(ROOT / "locks" / name).read_text() for name in names]
    lines = (line for text in texts for line in text.splitlines() if line and line[0] != "#")
    pairs = [line.lower().replace("_", "-").split("==") for line in lines]
    return [(name, version) for name, version in pairs]


@pytest.mark.parametrize(
    ("version", "locks"),
    [*((f"3.{minor}", NEWEST) for minor in range(11, 15)), ("3.13", MIDDLE), ("3.11", OLDEST)],
    ids=str,
)
def test_locks_have_aarch64_wheels(version: str, locks: tuple[str, ...], tmp_path: Path) -> None:
    requirements = tmp_path / "requirements.txt"
    # DeepSpeed has no wheels on any platform. torch is the user's choice, and no lock names it.
    packages = [f"{name}=={exact}" for name, exact in locked(*locks) if name != "deepspeed"]
    requirements.write_text("\n".join(packages))
    command = [sys.executable, *PIP, "--dry-run", *wheel_options(version)]
    command += ["--target", str(tmp_path / "target"), "-r", str(requirements)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("each", known_versions().sets, ids=lambda each: each.name)
def test_lock_has_the_versions_of_its_set(each: VersionSet) -> None:
    names = NEWEST[:2] if each.name == "newest" else [f"{each.name}.txt"]
    versions = {**dict(locked(*names)), "torch": each.torch}
    assert {package: versions[package] for package in PACKAGES} == each.versions
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["train"]
    for bound in map(Requirement, wanted):
        assert Version(versions[bound.name.lower()]) in bound.specifier, bound.name
