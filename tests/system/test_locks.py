"""The locked packages on the target machine: Grace is aarch64."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.aarch64.environment import wheel_options
from tests.support.python_path import ROOT

pytestmark = pytest.mark.system

BUILT_FROM_SOURCE = ("deepspeed",)
"""Packages without wheels on any platform. torch is the user's choice, and no lock names it."""


def locked(name: str) -> list[str]:
    """Return the requirements in a lock file."""
    lines = (ROOT / "locks" / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#") and line.partition("==")[0] not in BUILT_FROM_SOURCE]


NEWEST, OLDEST = ("light.txt", "train.txt", "docs.txt"), ("oldest.txt",)


@pytest.mark.parametrize(
    ("version", "locks"), [("3.11", NEWEST), ("3.12", NEWEST), ("3.13", NEWEST), ("3.14", NEWEST), ("3.11", OLDEST)], ids=str
)
def test_every_locked_package_has_a_wheel_for_aarch64(version: str, locks: tuple[str, ...], tmp_path: Path) -> None:
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("\n".join(line for lock in locks for line in locked(lock)))
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--dry-run"]
    options = [*wheel_options(version), "--target", str(tmp_path / "target"), "-r", str(requirements)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("locks", [NEWEST, OLDEST], ids=str)
def test_the_locks_name_exact_versions_and_no_package_twice(locks: tuple[str, ...]) -> None:
    found = [line for lock in locks for line in locked(lock)]
    assert all("==" in line for line in found)
    names = [line.partition("==")[0].lower().replace("_", "-") for line in found]
    assert sorted(names) == sorted(set(names))


def test_the_oldest_lock_has_the_lower_bounds_of_the_training_packages() -> None:
    """Those may need newer versions of other packages than so-tui does; no package may be newer than so-tui allows."""
    lines = (ROOT / "locks" / "oldest.txt").read_text().splitlines()
    versions = {name: Version(version) for name, _, version in (line.partition("==") for line in lines if not line.startswith("#"))}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for bound in map(Requirement, project["dependencies"] + project["optional-dependencies"]["train"]):
        if bound.name != "torch":
            assert versions[bound.name] in bound.specifier, bound.name
        if bound.name in ("deepspeed", "transformers", "datasets"):
            (lowest,) = [each.version for each in bound.specifier if each.operator == ">="]
            assert versions[bound.name] == Version(lowest)


def test_the_documentation_needs_no_other_version_than_the_rest() -> None:
    versions = dict(line.lower().split("==") for lock in ("light.txt", "train.txt") for line in locked(lock))
    needed = dict(line.lower().split("==") for line in locked("docs.txt"))
    assert "sphinx" in needed
    assert {name: version for name, version in needed.items() if versions.get(name, version) != version} == {}
