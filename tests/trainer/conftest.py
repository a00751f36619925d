"""Fixtures of the trainer's tests."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from so_tui.runs import RunDirectory, create_run
from so_tui_trainer.ranks import Ranks
from tests.support.launching import log, start, tiny
from tests.support.python_path import python_path
from tests.support.shared_run import PROMPTS, SUPEROFFLOAD, TWELVE_STEPS

BROKEN_WANDB = """
Settings = dict


def init(**options):
    raise ConnectionError('no route to host')
"""


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Draw the same numbers in each test, whichever tests its process has run before."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run that workers share and only read: two ranks, twelve steps, trackers, an export."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "finished"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        finished = folder / "finished"
        if not finished.exists():
            finished.write_text(str(_train(folder).path))
    return RunDirectory(Path(finished.read_text()))


def _train(folder: Path) -> RunDirectory:
    package = folder / "packages" / "wandb"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(BROKEN_WANDB)
    tracking = {"tracking__wandb": "true", "tracking__tensorboard": "true"}
    saving = {
        "checkpoint__every_steps": "5",
        "checkpoint__background": "false",
        "checkpoint__export": "true",
    }
    spec = tiny(**TWELVE_STEPS, **SUPEROFFLOAD, **PROMPTS, **tracking, **saving)
    run = create_run(spec, folder / "runs")
    assert start(run, spec, {"PYTHONPATH": python_path(package.parent)}).wait(timeout=400) == 0, (
        log(run)
    )
    return run


@pytest.fixture(scope="module")
def single_rank() -> Iterator[Ranks]:
    """A process group of one rank, in this process."""
    dist.init_process_group(
        "gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1
    )
    assert dist.group.WORLD is not None
    yield Ranks(0, 1, torch.device("cpu"), dist.group.WORLD)
    dist.destroy_process_group()
