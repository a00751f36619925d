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

BUILT_FROM_SOURCE = ("deepspeed",)
"""Packages without wheels on any platform. torch is the user's choice, and no lock names it."""


def locked(name: str) -> list[str]:
    """Return the requirements in a lock file."""
    lines = (ROOT / "locks" / name).read_text().splitlines()
    return [
        line
        for line in lines
        if line and not line.startswith("#") and line.partition("==")[0] not in BUILT_FROM_SOURCE
    ]


NEWEST, MIDDLE, OLDEST = ("light.txt", "newest.txt", "docs.txt"), ("middle.txt",), ("oldest.txt",)


@pytest.mark.parametrize(
    ("version", "locks"),
    [
        ("3.11", NEWEST),
        ("3.12", NEWEST),
        ("3.13", NEWEST),
        ("3.14", NEWEST),
        ("3.13", MIDDLE),
        ("3.11", OLDEST),
    ],
    ids=str,
)
def test_locks_have_aarch64_wheels(version: str, locks: tuple[str, ...], tmp_path: Path) -> None:
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("\n".join(line for lock in locks for line in locked(lock)))
    command = [sys.executable, *PIP, "--dry-run", *wheel_options(version)]
    command += ["--target", str(tmp_path / "target"), "-r", str(requirements)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("locks", [NEWEST, MIDDLE, OLDEST], ids=str)
def test_the_locks_name_exact_versions_and_no_package_twice(locks: tuple[str, ...]) -> None:
    found = [line for lock in locks for line in locked(lock)]
    assert all("==" in line for line in found)
    names = [line.partition("==")[0].lower().replace("_", "-") for line in found]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("each", known_versions().sets, ids=lambda each: each.name)
def test_lock_has_the_versions_of_its_set(
    each: VersionSet,
) -> None:
    names = ["light.txt", "newest.txt"] if each.name == "newest" else [f"{each.name}.txt"]
    lines = (
        line
        for name in names
        for line in (ROOT / "locks" / name).read_text().splitlines()
        if not line.startswith("#")
    )
    versions = {
        name.lower().replace("_", "-"): version
        for name, _, version in (line.partition("==") for line in lines)
    }
    versions["torch"] = each.torch
    assert {package: versions[package] for package in PACKAGES} == each.versions
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for bound in map(
        Requirement, project["dependencies"] + project["optional-dependencies"]["train"]
    ):
        assert Version(versions[bound.name.lower()]) in bound.specifier, bound.name


def test_the_documentation_needs_no_other_version_than_the_rest() -> None:
    versions = dict(
        line.lower().split("==") for lock in ("light.txt", "newest.txt") for line in locked(lock)
    )
    needed = dict(line.lower().split("==") for line in locked("docs.txt"))
    assert "sphinx" in needed
    assert {
        name: version for name, version in needed.items() if versions.get(name, version) != version
    } == {}
