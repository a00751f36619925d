"""The container files are current, copy what the installation needs, and are what their tools
read.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from containers.make import files
from tests.support.python_path import ROOT

pytestmark = pytest.mark.repository

FILES = dict(files())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_container_file_is_current(path: Path) -> None:
    assert path.read_text() == FILES[path], "run: python containers/make.py"


def test_no_container_file_is_left_of_an_image_that_is_gone() -> None:
    kept = {"make.py", "images.toml", *(path.name for path in FILES)}
    assert {path.name for path in (ROOT / "containers").iterdir() if path.is_file()} == kept


def test_everything_that_is_copied_exists() -> None:
    common = tomllib.loads((ROOT / "containers" / "images.toml").read_text())
    assert all((ROOT / name).is_file() for name in common["files"])
    assert all((ROOT / name).is_dir() for name in common["folders"])


@pytest.mark.parametrize("name", ["ngc", "cuda"])
def test_the_makefile_uses_the_torch_of_an_image_that_has_one(name: str) -> None:
    (command,) = re.findall(
        r"\bmake -C \S+ (.*install)$",
        (ROOT / "containers" / f"{name}.Containerfile").read_text(),
        re.MULTILINE,
    )
    dry = ["make", "--dry-run", "--always-make", "VENV=environment", *command.split()]
    shown = subprocess.run(dry, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert (
        "--system-site-packages" in shown,
        re.search(r"install +torch==", shown) is not None,
    ) == (name == "ngc", name != "ngc")
    assert "locks/newest.txt" in shown
    assert "build_ops" not in shown  # compiled for the CPU of the machine that makes the image


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.suffix == ".toml"], ids=lambda path: path.name
)
def test_an_environment_of_cscs_names_an_image_and_texts_only(path: Path) -> None:
    environment = tomllib.loads(path.read_text())
    assert environment["image"].endswith(".sqsh")
    assert all(isinstance(value, str) for value in environment["env"].values())
    assert all(
        source == target
        for source, _, target in (mount.partition(":") for mount in environment["mounts"])
    )
