"""Two ranks resume from the state of one, and one from that of two. The ranks run this file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import superoffload
from so_tui.model.sharding import StatesFormat
from tests.support import engine as support
from tests.support import rank_processes

MODES: tuple[tuple[support.Mode, float, StatesFormat], ...] = (
    ("superoffload", 0.5, "fp32"),
    ("superoffload", 1.0, "int8-moments"),
    ("superoffload", 1.0, "bf16-moments"),
    ("zerooffload", 0.5, "fp32"),
    ("gpu", 0.0, "fp32"),
)


@pytest.mark.slow
def test_from_one_rank_to_two_and_back_every_bit_is_kept(tmp_path: Path) -> None:
    data = support.batches(6)
    losses = {}
    for mode, ratio, states in MODES:
        with support.engine(support.spec(mode, ratio, clipping=1.0), states=states) as made:
            support.train(made, data[:4])
            superoffload.save_state(made, tmp_path / f"one {mode} {states}")
            losses[mode, states] = support.train(made, data[4:])
    torch.save(losses, tmp_path / "losses")
    rank_processes.finish(rank_processes.start(Path(__file__), [str(tmp_path)], 2))
    for mode, ratio, states in MODES:
        assert support.by_name(tmp_path / f"two {mode} {states}") == support.by_name(
            tmp_path / f"one {mode} {states}"
        )
        with support.engine(support.spec(mode, ratio, clipping=1.0), states=states) as made:
            superoffload.load_state(made, tmp_path / f"two {mode} {states}")
            assert (
                support.states(made, tmp_path / f"back {mode} {states}")
                == (tmp_path / f"one {mode} {states}" / "rank_00000.states").read_bytes()
            )
            assert support.train(made, data[4:]) == losses[mode, states]


def resume(folder: Path) -> None:
    """Resume two ranks with the same data from one rank's state: they train on as it did."""
    superoffload.join_process_group(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    losses = torch.load(folder / "losses")
    for mode, ratio, states in MODES:
        with support.engine(support.spec(mode, ratio, clipping=1.0), states=states) as made:
            superoffload.load_state(made, folder / f"one {mode} {states}")
            superoffload.save_state(made, folder / f"two {mode} {states}")
            found = support.train(made, support.batches(6)[4:])
            torch.testing.assert_close(
                torch.tensor(found), torch.tensor(losses[mode, states]), rtol=1e-2, atol=0
            )


if __name__ == "__main__":
    resume(Path(sys.argv[1]))
    rank_processes.leave()
