"""The engine under transformers' ``Trainer``, through the Trainer's own DeepSpeed integration: the
example.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import deepspeed
import pytest
import torch

import superoffload
from tests.support import engine as support
from tests.support.python_path import checkout_path

GROUP = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_SIZE",
        "CROSS_RANK",
        "CROSS_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
)
SCRIPT = """
import json, sys
from pathlib import Path
from examples.hf_trainer import train
from examples.own_loop import join_process_group

join_process_group(0)
folder = Path(sys.argv[1])
losses = {
    "ours": train(folder / "ours", 6, clipping=1e9),
    "theirs": train(folder / "theirs", 6, offload=False, clipping=1e9),
    "clipped": train(folder / "clipped", 6, clipping=1e-3),
    "stopped": train(folder / "stopped", 3, clipping=1e9),
    "resumed": train(folder / "stopped", 6, clipping=1e9, resume=True),
}
print(json.dumps(losses))
"""


@pytest.mark.slow
def test_a_trainer_has_the_losses_of_deepspeeds_own_optimizer_and_resumes(tmp_path: Path) -> None:
    """In a process of its own, since transformers keeps a Trainer's DeepSpeed config for every
    model that is made after it.

    Without clipping, which the two optimizers do in another order of floating-point operations.
    """
    # Not the variables with which other tests of this process joined a group.
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in GROUP and not name.startswith("ACCELERATE_")
    }
    environment = inherited | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": checkout_path()}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = json.loads(done.stdout.splitlines()[-1])
    assert losses["ours"] == pytest.approx(losses["theirs"], rel=2e-3)
    assert losses["ours"] != losses["clipped"], "updates must show in the losses"
    assert losses["resumed"] == losses["ours"]


def test_other_optimizers_and_modes_are_refused_by_name() -> None:
    support.ensure_process_group()
    settings = superoffload.Settings(learning_rate=1e-3)
    parameters = [torch.nn.Parameter(torch.zeros(4))]
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 3}}

    def code(**arguments: object) -> str:
        with (
            superoffload.replacing_optimizers(settings),
            pytest.raises(superoffload.OffloadError) as caught,
        ):
            deepspeed.initialize(model=torch.nn.Linear(2, 2), **arguments)
        return caught.value.code

    assert code(config=config, optimizer=torch.optim.SGD(parameters, lr=0.1)) == "optimizer-class"
    assert code(config=config) == "optimizer-class"
    assert code(config="config.json", optimizer=torch.optim.AdamW(parameters)) == "no-config"
    original = deepspeed.initialize
    resident = superoffload.Settings(learning_rate=1e-3, mode="gpu")
    with (
        pytest.raises(superoffload.OffloadError) as caught,
        superoffload.replacing_optimizers(resident),
    ):
        pass
    assert caught.value.code == "mode"
    assert deepspeed.initialize is original
