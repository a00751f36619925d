"""Tested sets of training packages and their bounds: they agree with each other, with
pyproject.toml, and with what is found installed.
"""

from __future__ import annotations

import tomllib

import pytest
from msgspec.structs import replace
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from so_tui.machine.software import (
    PACKAGES,
    Bound,
    known_versions,
)
from so_tui.machine.types import Software
from tests.support.python_path import ROOT

SETS = {each.name: each for each in known_versions().sets}
BOUNDS = {bound.package: bound for bound in known_versions().bounds}


def installed(name: str) -> Software:
    return replace(Software(python="3.12.3"), **SETS[name].versions)


def test_pyproject_has_the_bounds_and_refuses_the_next_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {
        requirement.name: requirement.specifier
        for requirement in map(Requirement, project["optional-dependencies"]["train"])
    }
    needed["python"] = SpecifierSet(project["requires-python"])
    for package, bound in BOUNDS.items():
        lowest = [each.version for each in needed[package] if each.operator == ">="]
        assert list(map(Version, lowest)) == [Version(bound.oldest)], package
        *series, last = Version(bound.newest).release
        assert Version(f"{bound.newest}") in needed[package], package
        if package != "python":  # installers should not refuse a Python for being new
            assert Version(".".join(map(str, [*series, last + 1]))) not in needed[package], package


def test_the_sets_reach_both_bounds_of_every_package() -> None:
    for package in PACKAGES:
        versions = {name: getattr(each, package) for name, each in SETS.items()}
        assert Version(versions["oldest"]) == Version(BOUNDS[package].oldest)
        newest = BOUNDS[package].newest.split(".")
        tested = [
            each.version
            for each in known_versions().later
            if each.package == package and each.tested
        ]
        assert max([versions["newest"], *tested], key=Version).split(".")[: len(newest)] == newest
        assert (
            Version(versions["oldest"]) < Version(versions["middle"]) < Version(versions["newest"])
        )


def test_a_later_version_is_allowed_if_it_was_tested() -> None:
    for each in known_versions().later:
        assert Version(each.version) > Version(getattr(SETS["newest"], each.package))
        assert BOUNDS[each.package].admits(each.version) == bool(each.tested), each.package


def test_a_set_is_recognised_whatever_torch_was_built_for() -> None:
    for name, each in SETS.items():
        assert known_versions().set_of(installed(name)) == each
    assert (
        known_versions().set_of(replace(installed("oldest"), torch=f"{SETS['oldest'].torch}+cu124"))
        == SETS["oldest"]
    )
    assert known_versions().set_of(replace(installed("oldest"), torch=SETS["newest"].torch)) is None
    assert known_versions().set_of(Software(python="3.12.3")) is None


@pytest.mark.parametrize(
    ("version", "admitted"),
    [
        ("1.9.9", False),
        ("2.0", True),
        ("2.13.0+cpu", True),
        ("2.13.7", True),
        ("2.14.0", False),
        ("3.0", False),
    ],
)
def test_a_bound_admits_each_patch_of_the_newest_it_names(version: str, admitted: bool) -> None:
    assert Bound(package="torch", oldest="2.0", newest="2.13", older="").admits(version) == admitted


def test_only_what_is_installed_can_be_outside() -> None:
    assert known_versions().exceeded_by(Software()) == ()
    old = replace(installed("middle"), python="3.10.1", datasets=None, transformers="4.56.1")
    assert [bound.package for bound in known_versions().exceeded_by(old)] == [
        "python",
        "transformers",
    ]
