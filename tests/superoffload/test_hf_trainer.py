"""The engine under transformers' ``Trainer``, through the Trainer's own DeepSpeed integration: the example."""

from __future__ import annotations

from pathlib import Path

import deepspeed
import pytest
import torch

import superoffload
from examples import hf_trainer
from tests.support import engine as support


@pytest.fixture(autouse=True)
def _process_group() -> None:
    support.ensure_process_group()


@pytest.mark.slow
def test_a_trainer_has_the_losses_of_deepspeeds_own_optimizer(tmp_path: Path) -> None:
    """Without clipping, which the two do in another order of floating-point operations."""
    ours = hf_trainer.train(tmp_path / "ours", 6, clipping=1e9)
    theirs = hf_trainer.train(tmp_path / "theirs", 6, offload=False, clipping=1e9)
    assert ours == pytest.approx(theirs, rel=2e-3)
    assert ours != hf_trainer.train(tmp_path / "clipped", 6, clipping=1e-3), "updates must show in the losses"


@pytest.mark.slow
def test_a_trainer_resumes_from_its_checkpoint_with_the_same_losses(tmp_path: Path) -> None:
    whole = hf_trainer.train(tmp_path / "whole", 6)
    hf_trainer.train(tmp_path / "stopped", 3)
    assert hf_trainer.train(tmp_path / "stopped", 6, resume=True) == whole


def test_other_optimizers_and_modes_are_refused_by_name() -> None:
    settings = superoffload.Settings(learning_rate=1e-3)
    parameters = [torch.nn.Parameter(torch.zeros(4))]
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 3}}

    def code(**arguments: object) -> str:
        with superoffload.replacing_optimizers(settings), pytest.raises(superoffload.OffloadError) as caught:
            deepspeed.initialize(model=torch.nn.Linear(2, 2), **arguments)
        return caught.value.code

    assert code(config=config, optimizer=torch.optim.SGD(parameters, lr=0.1)) == "optimizer-class"
    assert code(config=config) == "optimizer-class"
    assert code(config="config.json", optimizer=torch.optim.AdamW(parameters)) == "no-config"
    original = deepspeed.initialize
    with (
        pytest.raises(superoffload.OffloadError) as caught,
        superoffload.replacing_optimizers(superoffload.Settings(learning_rate=1e-3, mode="gpu")),
    ):
        pass
    assert caught.value.code == "mode"
    assert deepspeed.initialize is original
