"""What an interpreter is built for, and what it lacks to train; tested sets of packages and their
bounds, which agree with each other, with pyproject.toml, and with what is found installed.
"""

from __future__ import annotations

import platform
import sys
import tomllib
from pathlib import Path

import pytest
from msgspec.structs import replace
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from so_tui.machine import interpreter
from so_tui.machine.interpreter import _faults, architecture_of
from so_tui.machine.software import PACKAGES, Bound, known_versions
from so_tui.machine.types import Software
from tests.support.python_path import ROOT, not_emulated

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
        (lowest,) = (each.version for each in needed[package] if each.operator == ">=")
        assert Version(lowest) == Version(bound.oldest), package
        *series, last = Version(bound.newest).release
        assert Version(bound.newest) in needed[package], package
        if package != "python":  # installers should not refuse a Python for being new
            assert Version(".".join(map(str, [*series, last + 1]))) not in needed[package], package


def test_the_sets_reach_both_bounds_of_every_package() -> None:
    for package in PACKAGES:
        oldest, middle, newest = (
            Version(getattr(SETS[name], package)) for name in ("oldest", "middle", "newest")
        )
        assert Version(BOUNDS[package].oldest) == oldest < middle < newest
        later = (each for each in known_versions().later if each.package == package)
        reached = max([newest, *(Version(each.version) for each in later if each.tested)])
        bound = Version(BOUNDS[package].newest).release
        assert reached.release[: len(bound)] == bound


def test_a_later_version_is_allowed_if_it_was_tested() -> None:
    for each in known_versions().later:
        assert Version(each.version) > Version(getattr(SETS["newest"], each.package))
        assert BOUNDS[each.package].admits(each.version) == bool(each.tested), each.package


def test_a_set_is_recognised_whatever_torch_was_built_for() -> None:
    set_of = known_versions().set_of
    for name, each in SETS.items():
        assert set_of(installed(name)) == each
    oldest = installed("oldest")
    assert set_of(replace(oldest, torch=f"{oldest.torch}+cu124")) == SETS["oldest"]
    assert set_of(replace(oldest, torch=SETS["newest"].torch)) is None
    assert set_of(Software(python="3.12.3")) is None


def test_a_bound_admits_each_patch_of_the_newest_it_names() -> None:
    bound = Bound(package="torch", oldest="2.0", newest="2.13", older="")
    assert all(map(bound.admits, ("2.0", "2.13.0+cpu", "2.13.7")))
    assert not any(map(bound.admits, ("1.9.9", "2.14.0", "3.0")))


def test_only_what_is_installed_can_be_outside() -> None:
    assert known_versions().exceeded_by(Software()) == ()
    old = replace(installed("middle"), python="3.10.1", datasets=None, transformers="4.56.1")
    exceeded = [bound.package for bound in known_versions().exceeded_by(old)]
    assert exceeded == ["python", "transformers"]


AARCH64 = b"\x7fELF\2\1\1" + bytes(9) + b"\3\0\xb7\0"


@not_emulated
def test_this_interpreter_is_built_for_this_machine() -> None:
    assert architecture_of(sys.executable) == platform.machine()


@pytest.mark.parametrize(
    ("content", "architecture"),
    [
        (AARCH64 + bytes(40), "aarch64"),
        (AARCH64[:-2] + b"\x3e\0", "x86_64"),
        (AARCH64[:5] + b"\2" + AARCH64[6:], ""),  # the other byte order
        (AARCH64[:-1], ""),
        (b"#!/bin/sh\nexec /opt/python\n", ""),
    ],
)
def test_header_says_the_architecture(content: bytes, architecture: str, tmp_path: Path) -> None:
    (tmp_path / "python").write_bytes(content)
    assert architecture_of(str(tmp_path / "python")) == architecture


@pytest.mark.parametrize("name", ["python3", "", "/no/such/python", "/dev/zero", "/"])
def test_of_what_is_no_file_nothing_is_known(name: str) -> None:
    assert architecture_of(name) == ""


@pytest.mark.parametrize(
    ("versions", "build", "gpus", "said"),
    [
        ({"torch": "2.11.0", "deepspeed": "0.19.8"}, {"cuda": "13.0"}, 4, []),
        ({"torch": "2.10.0+cpu", "deepspeed": "0.19.8"}, {}, 4, ["for the CPU only"]),
        ({"torch": "2.11.0", "deepspeed": "0.17.0"}, {"cuda": "13.0"}, 1, ["0.17.0"]),
        ({}, {}, 0, ["torch, deepspeed"]),
    ],
)
def test_what_an_interpreter_lacks_is_named(
    versions: dict[str, str],
    build: dict[str, str],
    gpus: int,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interpreter, "package_version", versions.get)
    monkeypatch.setattr(interpreter, "torch_build", lambda: build)
    for word, fault in zip(said, _faults(gpus), strict=True):
        assert word in fault
