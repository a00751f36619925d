"""Workflows and commit hooks run what everybody can run here: ``make`` targets, which ``.ci/run``
runs too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.python_path import ROOT

pytestmark = pytest.mark.repository

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()
APT = "sudo apt-get update && sudo apt-get install --yes --no-install-recommends "
MAKE = re.compile(
    r"(?:sudo --preserve-env env PATH=\"\$PATH\" )?make (?P<target>[a-z0-9-]+)(?: "
    r"[A-Z_]+=(?:\"[^\"$]*\"|[^\s\"$]+))*"
)


def prerequisites(target: str) -> set[str]:
    """Return what the Makefile makes before a target, variables expanded."""
    variables = dict(re.findall(r"^([A-Z_]+) := (.*)$", MAKEFILE, re.MULTILINE))
    rule = re.search(rf"^{re.escape(target)}:(.*)$", MAKEFILE, re.MULTILINE)
    return (
        set(re.sub(r"\$\((\w+)\)", lambda name: variables.get(name[1], ""), rule[1]).split())
        if rule
        else set()
    )


def checked_before_landing() -> set[str]:
    """Return the targets that ``.ci/run`` makes, and those that are part of them."""
    (made,) = re.findall(
        r"^make ((?:[a-z0-9-]+ ?)+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE
    )
    targets = set(made.split())
    return targets.union(*map(prerequisites, targets))


def steps(workflow: Path) -> Iterator[dict[str, Any]]:
    """Yield the steps of all jobs."""
    for job in yaml.safe_load(workflow.read_text())["jobs"].values():
        yield from job["steps"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_install_debian_packages_and_make_what_ci_run_makes(workflow: Path) -> None:
    commands = [step["run"].strip() for step in steps(workflow) if "run" in step]
    made = [MAKE.fullmatch(command) for command in commands if not command.startswith(APT)]
    assert made
    assert all(made), commands
    targets = {call["target"] for call in made if call}
    assert targets - checked_before_landing() == set()


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_name_actions_by_commit_and_keep_no_credentials(workflow: Path) -> None:
    used = [step for step in steps(workflow) if "uses" in step]
    assert all(re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", step["uses"]) for step in used)
    assert all(
        step["with"]["persist-credentials"] is False
        for step in used
        if step["uses"].startswith("actions/checkout")
    )


def test_every_check_is_a_hook_with_the_same_command() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repository in config["repos"] for hook in repository["hooks"]]
    assert {
        hook["entry"].removeprefix("make --no-print-directory ") for hook in hooks
    } == prerequisites("check")
