"""The engine in a loop that is not so-tui's: examples, and DeepSpeed's own checkpoints."""

from __future__ import annotations

import json
import os
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

import superoffload
from examples import own_loop
from so_tui_trainer.engine_settings import engine_settings
from tests.support import engine as support
from tests.support.problems import coded
from tests.support.python_path import checkout_path, printed
from tests.support.reference_adamw import core_of


@pytest.mark.slow
def test_the_example_loop_has_the_losses_of_the_gpu_mode() -> None:
    """Torch's AdamW under ZeRO-3, without clipping, which it does in another order."""
    support.ensure_process_group()
    ours, theirs = (own_loop.train(8, mode=mode, clipping=1e9) for mode in ("superoffload", "gpu"))
    assert ours == pytest.approx(theirs, rel=2e-3)
    assert ours != own_loop.train(8, clipping=1e-3), "updates must show in the losses"


@pytest.mark.parametrize(
    ("speculation_bytes", "parameters"), [(0, "none"), (support.ALL, "none"), (support.ALL, "cpu")]
)
def test_deepspeeds_script_reads_checkpoints(
    speculation_bytes: int, parameters: support.Parameters, tmp_path: Path
) -> None:
    run = {"clipping": 1e6, "speculation_bytes": speculation_bytes, "parameters": parameters}
    with support.offloading(0.5, support.OddModel(), **run) as made:
        support.train(made, support.batches(3))
        made.save_checkpoint(str(tmp_path))
        saved, core = support.states(made), core_of(made)
        weights = {
            name: core.state(index).master_weights[slice(*group.span(member))].clone()
            for index, group in enumerate(core.sub_groups)
            for member, name in enumerate(group.names)
        }
        losses = support.train(made, support.batches(2, seed=1))
        made.load_checkpoint(str(tmp_path))
        assert support.states(made) == saved
        assert core.steps_taken == 3
        for index, group in enumerate(core.sub_groups):
            assert torch.equal(group.weights, core.state(index).master_weights.bfloat16())
        assert support.train(made, support.batches(2, seed=1)) == losses
    read = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    for name, expected in weights.items():
        found = read[name].flatten()
        assert torch.equal(found, expected[: found.numel()]), name


def test_a_checkpoint_of_other_sub_groups_is_refused(tmp_path: Path) -> None:
    with support.offloading() as made:
        made.save_checkpoint(str(tmp_path))
    with support.offloading(sub_group_size=5000) as made:
        before = support.states(made)
        with coded(superoffload.OffloadError, "other-sub-groups"):
            made.load_checkpoint(str(tmp_path))
        assert support.states(made) == before


@pytest.mark.parametrize(("ratio", "empty"), [(0.0, False), (1.0, True), (1.0, False)])
def test_an_untrained_group_lends_its_options_to_no_other(ratio: float, empty: bool) -> None:
    """DeepSpeed before 0.19.1 (tests/system) counts only the groups that have some; later ones note
    places.
    """
    run = support.spec("superoffload", ratio)
    settings = engine_settings(run, support.binding())
    found: list[bytes] = []
    for preceded in (False, True):
        torch.manual_seed(0)
        model = support.Model().to(support.DEVICE, torch.bfloat16)
        frozen, trained = (group["params"] for group in support.parameter_groups(model))
        for parameter in frozen:
            parameter.requires_grad_(False)
        before = {"params": [] if empty else frozen, "weight_decay": 0.5, "lr": 0.3}
        groups = [*[before] * preceded, {"params": trained, "weight_decay": 0.0}]
        given = {"optimizer": torch.optim.AdamW(groups, lr=1e-2), "config": support.ds_config(run)}
        with superoffload.replacing_optimizers(settings):
            made, *_ = deepspeed.initialize(model=model, **given)
        try:
            support.train(made, support.batches(2))
            found.append(support.states(made))
        finally:
            superoffload.close(made)
    assert found[0] == found[1]


GROUP = {f"{kind}_{what}" for kind in ("LOCAL", "CROSS") for what in ("RANK", "SIZE")}
GROUP |= {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
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
def test_a_hf_trainer_has_the_losses_of_deepspeed(tmp_path: Path) -> None:
    """In a process of its own, as a Trainer's DeepSpeed config stays; clipping differs."""
    # Not the variables with which other tests of this process joined a group.
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in GROUP and not name.startswith("ACCELERATE_")
    }
    environment = inherited | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": checkout_path()}
    done = printed("-c", SCRIPT, str(tmp_path), env=environment)
    losses = json.loads(done.splitlines()[-1])
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
    with coded(superoffload.OffloadError, "mode"), superoffload.replacing_optimizers(resident):
        pass
    assert deepspeed.initialize is original
