"""Two ranks over gloo resume from the state of one rank, and one rank from that of two. The ranks run this file as a script."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import superoffload
from tests.support import engine as support
from tests.support import rank_processes

MODES: tuple[tuple[support.Mode, float], ...] = (
    ("superoffload", 0.5),
    ("zerooffload", 0.5),
    ("gpu", 0.0),
)


@pytest.mark.slow
def test_from_one_rank_to_two_and_back_every_bit_is_kept(tmp_path: Path) -> None:
    data = support.batches(6)
    losses = {}
    for mode, ratio in MODES:
        with support.engine(support.spec(mode, ratio, clipping=1.0)) as made:
            support.train(made, data[:4])
            superoffload.save_state(made, tmp_path / f"one {mode}")
            losses[mode] = support.train(made, data[4:])
    torch.save(losses, tmp_path / "losses")
    rank_processes.finish(rank_processes.start(Path(__file__), [str(tmp_path)], 2))
    for mode, ratio in MODES:
        assert support.by_name(tmp_path / f"two {mode}") == support.by_name(tmp_path / f"one {mode}")
        with support.engine(support.spec(mode, ratio, clipping=1.0)) as made:
            superoffload.load_state(made, tmp_path / f"two {mode}")
            assert support.states(made, tmp_path / f"back {mode}") == (tmp_path / f"one {mode}" / "rank_00000.states").read_bytes()
            assert support.train(made, data[4:]) == losses[mode]


def resume(folder: Path) -> None:
    """Resume two ranks, which see the same data, from one rank's state: they train on as that rank did."""
    superoffload.join_process_group(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    losses = torch.load(folder / "losses")
    for mode, ratio in MODES:
        with support.engine(support.spec(mode, ratio, clipping=1.0)) as made:
            superoffload.load_state(made, folder / f"one {mode}")
            superoffload.save_state(made, folder / f"two {mode}")
            found = support.train(made, support.batches(6)[4:])
            torch.testing.assert_close(torch.tensor(found), torch.tensor(losses[mode]), rtol=1e-2, atol=0)


if __name__ == "__main__":
    resume(Path(sys.argv[1]))
    rank_processes.leave()
