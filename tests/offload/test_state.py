"""Saving and loading of optimizer states, in every mode."""

from __future__ import annotations

from pathlib import Path

import pytest

from so_tui_trainer import offload
from tests.offload import support

MODES = [("gpu", 0.0), ("zerooffload", 1.0), ("zerooffload", 0.5), ("superoffload", 1.0), ("superoffload", 0.5), ("superoffload", 0.0)]


@pytest.mark.parametrize(("mode", "ratio"), MODES)
def test_a_resumed_run_goes_on_bit_by_bit(mode: str, ratio: float, tmp_path: Path) -> None:
    run = support.spec(mode, ratio, clipping=1.0)
    data = support.batches(10)
    with support.engine(run) as whole:
        losses = support.train(whole, data)
        expected = support.states(whole, tmp_path / "whole")
    with support.engine(run) as first:
        support.train(first, data[:5])
        offload.save_state(first, tmp_path / "middle")
    with support.engine(run) as second:
        support.train(second, support.batches(2, seed=9))  # what it did before must leave no trace
        offload.load_state(second, tmp_path / "middle")
        assert support.train(second, data[5:]) == losses[5:]
        assert support.states(second, tmp_path / "end") == expected


def test_a_state_of_another_run_is_refused_with_what_differs(tmp_path: Path) -> None:
    with support.engine(support.spec("zerooffload", 1.0)) as saved:
        support.train(saved, support.batches(1))
        offload.save_state(saved, tmp_path)
    with (
        support.engine(support.spec("zerooffload", 0.5, sub_group_size=4000)) as other,
        pytest.raises(offload.StateMismatchError, match=r"ratio: saved with 1\.0, this run has 0\.5") as caught,
    ):
        offload.load_state(other, tmp_path)
    assert "sub-groups: saved" in str(caught.value)


def test_a_torn_or_missing_state_is_refused(tmp_path: Path) -> None:
    run = support.spec("zerooffload", 1.0)
    with support.engine(run) as made:
        with pytest.raises(offload.OffloadError, match=r"rank_00000\.json is missing"):
            offload.load_state(made, tmp_path)
        offload.save_state(made, tmp_path)
        file = tmp_path / "rank_00000.states"
        file.write_bytes(file.read_bytes()[:-4])
        with pytest.raises(offload.OffloadError, match="torn"):
            offload.load_state(made, tmp_path)


def test_another_deepspeed_version_is_refused() -> None:
    from so_tui_trainer.offload.deepspeed_0_19_8 import check_version

    check_version("0.19.8")
    with pytest.raises(offload.OffloadError, match=r"DeepSpeed 0\.19\.9 is installed.*pip install deepspeed==0\.19\.8"):
        check_version("0.19.9")
