"""The tested sets of training packages (``so_tui/machine/versions.toml``), each in an environment
of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from so_tui.machine.software import VersionSet
from so_tui.runs import RunDirectory
from so_tui.runs.records import StepRecord
from so_tui.spec import find_preset
from so_tui_trainer.model.config import load_config
from tests.support.launching import of_kind
from tests.support.models import causal_model
from tests.support.python_path import ROOT, checkout_path
from tests.support.set_environments import OLDER, environment

pytestmark = pytest.mark.system

STEPS = 6
PRETRAINED = ("model.weights=pretrained", "model.tokenizer=builtin:tiny")
TESTS = (
    "tests/superoffload/test_superoffload.py",
    "tests/superoffload/test_own_loop.py",
    "tests/superoffload/test_speculation.py",
    "tests/trainer/test_engine_settings.py",
    "tests/trainer/test_matching.py",
    "tests/trainer/test_loading.py",
    "tests/trainer/test_kernels.py",
    "tests/trainer/test_sources.py",
)
"""Engine, building and loading of models, and reading of data: what older packages have
otherwise.
"""


class Installed(NamedTuple):
    python: Path
    packages: VersionSet


def call(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    own = {"PYTHONPATH": checkout_path(), "PATH": f"{python.parent}:{os.environ['PATH']}"}
    return subprocess.run(
        [python, "-m", *arguments],
        cwd=ROOT,
        env=os.environ | own,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module", params=OLDER, ids=lambda each: each.name)
def installed(request: pytest.FixtureRequest) -> Installed:
    """Return an older set in its environment."""
    return Installed(environment(request.param), request.param)


def losses(python: Path, model: Path, runs_dir: Path) -> list[float]:
    """Train a model on the embedded rows, and return the loss of each step."""
    options = ["--plain", "--gpus", "2", "--runs-dir", str(runs_dir)]
    for setting in (f"train.steps={STEPS}", f"model.id={model}", *PRETRAINED):
        options += ["--set", setting]
    trained = call(python, "so_tui", "run", "tiny", *options)
    assert trained.returncode == 0, trained.stdout[-3000:] + trained.stderr[-3000:]
    (run,) = map(RunDirectory, (path.parent for path in runs_dir.glob("*/state.json")))
    return [record.loss for record in of_kind(run, StepRecord)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder: transformers' versions draw random weights in other orders."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = load_config(find_preset("tiny").spec.model)
    causal_model(config, torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def newest_losses(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses with the packages that the tests run with."""
    return losses(Path(sys.executable), model, tmp_path_factory.mktemp("newest"))


def test_doctor_names_the_set(installed: Installed) -> None:
    answer = json.loads(call(installed.python, "so_tui", "doctor", "--json").stdout)
    assert answer["tested_set"] == installed.packages.name


def test_a_model_learns_as_with_the_newest(
    installed: Installed, model: Path, newest_losses: list[float], tmp_path: Path
) -> None:
    found = losses(installed.python, model, tmp_path)
    assert len(newest_losses) == STEPS
    # Versions of torch round bf16 products differently.
    assert found == pytest.approx(newest_losses, rel=2e-3)


def test_the_engine_steps_as_adamw_and_models_are_built(installed: Installed) -> None:
    options = ["-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu and not system"]
    options += ["-n", "2", "--dist", "loadfile"]
    tested = call(installed.python, "pytest", *options, *TESTS)
    assert tested.returncode == 0, tested.stdout[-4000:]
