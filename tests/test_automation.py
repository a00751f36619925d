"""Workflows, commit hooks and container files run and hold what everybody can run here."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from containers.make import files
from tests.support.python_path import ROOT

pytestmark = pytest.mark.repository

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CONTAINERS = ROOT / "containers"
MAKEFILE = (ROOT / "Makefile").read_text()
APT = "sudo apt-get update && sudo apt-get install --yes --no-install-recommends "
MAKE = re.compile(
    r"(?:sudo --preserve-env env PATH=\"\$PATH\" )?make (?P<target>[a-z0-9-]+)"
    r"(?: [A-Z_]+=(?:\"[^\"$]*\"|[^\s\"$]+))*"
)


def prerequisites(target: str) -> set[str]:
    """Return what the Makefile makes before a target, variables expanded."""
    variables = dict(re.findall(r"^([A-Z_]+) := (.*)$", MAKEFILE, re.MULTILINE))
    rule = re.search(rf"^{re.escape(target)}:(.*)$", MAKEFILE, re.MULTILINE)
    words = rule[1] if rule else ""
    return {*re.sub(r"\$\((\w+)\)", lambda name: variables.get(name[1], ""), words).split()}


def checked_before_landing() -> set[str]:
    """Return the targets that ``.ci/run`` makes, and those that are part of them."""
    script = (ROOT / ".ci" / "run").read_text()
    (made,) = re.findall(r"^make ((?:[a-z0-9-]+ ?)+)$", script, re.MULTILINE)
    targets = set(made.split())
    return targets.union(*map(prerequisites, targets))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_make_what_ci_makes_without_credentials(workflow: Path) -> None:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    steps = [step for job in jobs for step in job["steps"]]
    commands = [step["run"].strip() for step in steps if "run" in step]
    made = [MAKE.fullmatch(command) for command in commands if not command.startswith(APT)]
    assert made
    assert all(made), commands
    assert {call["target"] for call in made if call} - checked_before_landing() == set()
    used = [step for step in steps if "uses" in step]
    assert all(re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", step["uses"]) for step in used)
    checkouts = [step for step in used if step["uses"].startswith("actions/checkout")]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_make_test_system_runs_every_file_with_system_tests() -> None:
    (listed,) = re.findall(r"^SYSTEM_TESTS \?= ((?:.*\\\n)*.*)$", MAKEFILE, re.MULTILINE)
    run = [ROOT / word for word in listed.replace("\\", " ").split()]
    marked = [
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if path != Path(__file__) and "pytest.mark.system\n" in path.read_text()
    ]
    assert marked
    assert [path for path in marked if not any(path.is_relative_to(each) for each in run)] == []


def test_every_check_is_a_hook_with_the_same_command() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repository in config["repos"] for hook in repository["hooks"]]
    entries = {hook["entry"].removeprefix("make --no-print-directory ") for hook in hooks}
    assert entries == prerequisites("check")


FILES = dict(files())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_container_file_is_current(path: Path) -> None:
    assert path.read_text() == FILES[path], "run: python containers/make.py"


def test_containers_are_of_files_and_images_that_exist() -> None:
    kept = {"make.py", "images.toml", *(path.name for path in FILES)}
    assert {path.name for path in CONTAINERS.iterdir() if path.is_file()} == kept
    common = tomllib.loads((CONTAINERS / "images.toml").read_text())
    assert all((ROOT / name).is_file() for name in common["files"])
    assert all((ROOT / name).is_dir() for name in common["folders"])


@pytest.mark.parametrize("name", ["ngc", "cuda"])
def test_the_makefile_uses_the_torch_of_an_image_that_has_one(name: str) -> None:
    content = (CONTAINERS / f"{name}.Containerfile").read_text()
    (command,) = re.findall(r"\bmake -C \S+ (.*install)$", content, re.MULTILINE)
    dry = ["make", "--dry-run", "--always-make", "VENV=environment", *command.split()]
    shown = subprocess.run(dry, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert ("--system-site-packages" in shown) == (name == "ngc")
    assert bool(re.search(r"install +torch==", shown)) == (name != "ngc")
    assert "locks/newest.txt" in shown
    assert "build_ops" not in shown  # compiled for the CPU of the machine that makes the image
