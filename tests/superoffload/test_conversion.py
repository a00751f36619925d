"""States converted to DeepSpeed's universal format and from its files, which it writes itself."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

import superoffload
from superoffload import OffloadError, Progress, checkpoint
from tests.support import engine as support
from tests.support.problems import coded

BEFORE, AFTER = support.batches(3), support.batches(3, seed=9)
STATES_FILE = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
MODEL_FILE = "zero_pp_rank_0_mp_rank_00_model_states.pt"
Harm = Callable[[Path], object]
LOADS_UNIVERSAL = {"checkpoint": {"load_universal": True}}


def model(seed: int) -> torch.nn.Module:
    """The same model for a seed. The checkpoint is of seed 0; others load it."""
    torch.manual_seed(seed)
    return support.OddModel().bfloat16()


def ours(universal: Path) -> list[float]:
    """Return the losses of our engine in a script of one's own, from a universal checkpoint on."""
    config = support.ds_config
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(support, "ds_config", lambda *given: config(*given) | LOADS_UNIVERSAL)
        with support.offloading(0.7, model(1)) as made:
            made.load_checkpoint(str(universal))
            assert made.global_steps == 3
            return support.train(made, AFTER)


def deepspeeds_own(universal: Path) -> list[float]:
    """Return the losses of ZeRO-3 with DeepSpeed's CPU Adam, from a universal checkpoint on."""
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    begun = model(1)
    config = support.ds_config(support.spec("zerooffload")) | LOADS_UNIVERSAL
    groups = support.parameter_groups(begun)
    optimizer = DeepSpeedCPUAdam(groups, lr=1e-2, betas=(0.9, 0.95), adamw_mode=True)
    made, *_ = deepspeed.initialize(model=begun, optimizer=optimizer, config=config)
    try:
        made.load_checkpoint(str(universal))
        return support.train(made, AFTER)
    finally:
        made.destroy()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "ratio"), [("superoffload", 0.5), ("zerooffload", 1.0), ("gpu", 1.0)]
)
def test_converted_states_train_on_alike(mode: support.Mode, ratio: float, tmp_path: Path) -> None:
    with support.engine(support.spec(mode, ratio), model=model(0)) as made:
        support.train(made, BEFORE)
        superoffload.save_state(made, tmp_path / "ours")
        made.save_checkpoint(str(tmp_path / "theirs"))
        expected = pytest.approx(support.train(made, AFTER), rel=1e-4)
    universal = tmp_path / "universal"
    universal.mkdir()
    superoffload.write_universal(tmp_path / "ours", universal, Progress(3, 6))
    assert deepspeeds_own(universal) == expected
    assert ours(universal) == expected
    for source in ("theirs", "universal"):
        found = superoffload.deepspeed_states(tmp_path / source)
        assert found.progress[:2] == (3, 6)
        superoffload.write_states(found, tmp_path / f"from {source}")
        assert support.by_name(tmp_path / f"from {source}") == support.by_name(tmp_path / "ours")
        with support.offloading(0.7, model(2)) as made:
            superoffload.load_state(made, tmp_path / f"from {source}")
            assert support.train(made, AFTER) == expected


def rank_file(folder: Path, rank: int, flat: torch.Tensor, **state: Any) -> None:
    """One rank's optimizer states of one sub-group, as ZeRO-3 saves them."""
    inner = {"state": {0: state}, "param_groups": []}
    content = {"fp32_flat_groups": [flat], "optimizer_state_dict": inner}
    file = folder / STATES_FILE.replace("rank_0_", f"rank_{rank}_")
    torch.save({"optimizer_state_dict": content}, file)


def described(**shapes: torch.Size) -> dict[str, Any]:
    return {"param_shapes": [shapes], "global_steps": 7, "global_samples": 56}


@pytest.fixture
def two_ranks(tmp_path: Path) -> Path:
    """A checkpoint of two ranks: ``a`` has 5 elements, and so a padded shard, ``b`` has 2."""
    folder = tmp_path / "saved" / "global_step7"
    folder.mkdir(parents=True)
    torch.save(described(a=torch.Size([5]), b=torch.Size([1, 2])), folder / MODEL_FILE)
    for rank, shard in enumerate(([0.0, 1.0, 2.0, 5.0], [3.0, 4.0, -9.0, 6.0])):  # -9 is padding
        flat = torch.tensor(shard)
        rank_file(folder, rank, flat, step=7, exp_avg=flat + 10, exp_avg_sq=flat + 20)
    (tmp_path / "saved" / "latest").write_text("global_step7")
    return tmp_path / "saved"


def test_shards_of_ranks_are_joined_without_padding(two_ranks: Path) -> None:
    found = superoffload.deepspeed_states(two_ranks)
    assert (found.progress[:2], found.adam_step) == ((7, 56), 7)
    assert found.numels == {"a": 5, "b": 2}
    states = {name: [kind.tolist() for kind in kinds] for name, kinds in found.read()}
    assert list(states) == ["a", "b"]
    assert states["a"] == [[0, 1, 2, 3, 4], [10, 11, 12, 13, 14], [20, 21, 22, 23, 24]]
    assert states["b"][0] == [5, 6]


def test_states_without_moments_begin_anew(two_ranks: Path, tmp_path: Path) -> None:
    """DeepSpeed's own SuperOffload has its moments in a process out of reach."""
    rank_file(two_ranks / "global_step7", 1, torch.tensor([3.0, 4.0, 0.0, 6.0]))
    found = superoffload.deepspeed_states(two_ranks)
    assert not found.moments
    ours, universal = tmp_path / "ours", tmp_path / "universal"
    superoffload.write_states(found, ours, lambda name: f"causal.{name}")
    (saved,) = checkpoint.manifests(ours)
    groups = [(group.names, group.moments) for group in saved.sub_groups]
    assert groups == [(("causal.a",), False), (("causal.b",), False)]
    universal.mkdir()
    plain = lambda name: name.removeprefix("causal.")  # noqa: E731
    superoffload.write_universal(ours, universal, Progress(7, 56), plain)
    again = superoffload.deepspeed_states(universal)
    assert (again.adam_step, again.numels, again.moments) == (0, {"a": 5, "b": 2}, True)
    (_, (master_weights, *moments)), _ = again.read()
    assert master_weights.tolist() == [0, 1, 2, 3, 4]
    assert len(moments) == 2
    assert not any(moment.any() for moment in moments)


def linked(folder: Path) -> None:
    shutil.move(folder / MODEL_FILE, folder.parent / "elsewhere")
    (folder / MODEL_FILE).symlink_to(folder.parent / "elsewhere")


def without(name: str) -> Harm:
    return lambda folder: (folder / name).unlink()


def saved_as(content: Any) -> Harm:
    return lambda folder: torch.save(content, folder / MODEL_FILE)


@pytest.mark.parametrize(
    ("harm", "code"),
    [
        (lambda folder: os.truncate(folder / STATES_FILE, 500), "unreadable"),
        (without(STATES_FILE), "unreadable"),
        (linked, "unreadable"),
        (saved_as(described(a=torch.Size([500]))), "unreadable"),
        (lambda folder: (folder / STATES_FILE.replace("00_o", "01_o")).touch(), "tensor-parallel"),
        (without(MODEL_FILE), "not-deepspeeds"),
        (lambda folder: (folder / MODEL_FILE).write_bytes(pickle.dumps({})), "unreadable"),
        (saved_as([1]), "unreadable"),
        (lambda folder: (folder.parent / "latest").write_text("../../elsewhere"), "unreadable"),
    ],
)
def test_a_damaged_or_foreign_checkpoint_is_refused(harm: Harm, code: str, two_ranks: Path) -> None:
    harm(two_ranks / "global_step7")
    with coded(OffloadError, code):
        list(superoffload.deepspeed_states(two_ranks).read())


class Reduced:
    """Is saved as the call of a function, which unpickling makes."""

    def __init__(self, *call: Any) -> None:
        self._call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call[0], self._call[1:]


def test_reading_a_checkpoint_runs_no_code_of_it(two_ranks: Path, tmp_path: Path) -> None:
    hostile = Reduced(os.system, f"touch {tmp_path / 'ran'}")
    torch.save({"param_shapes": hostile}, two_ranks / "global_step7" / MODEL_FILE)
    with coded(OffloadError, "unsafe-pickle"):
        superoffload.deepspeed_states(two_ranks)
    assert not (tmp_path / "ran").exists()


def test_the_stage_that_an_older_python_saved_is_read(two_ranks: Path) -> None:
    """Python 3.11.2 saves the members of enums as attributes."""
    file = two_ranks / "global_step7" / MODEL_FILE
    model = torch.load(file, weights_only=True)
    torch.save({**model, "zero_stage": Reduced(getattr, ZeroStageEnum, "weights")}, file)
    assert superoffload.deepspeed_states(two_ranks).numels


@pytest.mark.parametrize(
    ("kind", "name"),
    [(ZeroStageEnum, "__class__"), (ZeroStageEnum, "mro"), (torch.Tensor, "numpy"), (1, "real")],
)
def test_no_other_attribute_is_read(kind: object, name: str, two_ranks: Path) -> None:
    torch.save(
        {"param_shapes": Reduced(getattr, kind, name)}, two_ranks / "global_step7" / MODEL_FILE
    )
    with coded(OffloadError, "unsafe-pickle"):
        superoffload.deepspeed_states(two_ranks)


def test_a_parameter_cannot_be_written_outside_the_folder(two_ranks: Path, tmp_path: Path) -> None:
    found = superoffload.deepspeed_states(two_ranks)
    superoffload.write_states(found, tmp_path / "ours", lambda name: f"../../{name}")
    (tmp_path / "universal").mkdir()
    with coded(OffloadError, "impossible-name"):
        superoffload.write_universal(tmp_path / "ours", tmp_path / "universal", Progress(7, 56))
    assert not (tmp_path / "a").exists()
