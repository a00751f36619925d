"""Two ranks over gloo take over the state of one, and one that of two. The ranks are this file, run as a script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from tests.superoffload.test_ranks import finish, free_port, leave
from tests.support.python_path import checkout_path

MODES: tuple[tuple[Literal["gpu", "superoffload", "zerooffload"], float], ...] = (
    ("superoffload", 0.5),
    ("zerooffload", 0.5),
    ("gpu", 0.0),
)


@pytest.mark.slow
def test_from_one_rank_to_two_and_back_every_bit_is_kept(tmp_path: Path) -> None:
    import torch

    import superoffload
    from tests.support import engine as support

    data = support.batches(6)
    losses = {}
    for mode, ratio in MODES:
        with support.engine(support.spec(mode, ratio, clipping=1.0)) as made:
            support.train(made, data[:4])
            superoffload.save_state(made, tmp_path / f"one {mode}")
            losses[mode] = support.train(made, data[4:])
    torch.save(losses, tmp_path / "losses")
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": checkout_path()}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(tmp_path)],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    finish(ranks)
    for mode, ratio in MODES:
        assert support.by_name(tmp_path / f"two {mode}") == support.by_name(tmp_path / f"one {mode}")
        with support.engine(support.spec(mode, ratio, clipping=1.0)) as made:
            superoffload.load_state(made, tmp_path / f"two {mode}")
            assert support.states(made, tmp_path / f"back {mode}") == (tmp_path / f"one {mode}" / "rank_00000.states").read_bytes()
            assert support.train(made, data[4:]) == losses[mode]


def take_over(folder: Path) -> None:
    """Two ranks that see the same data go on from one rank's state as that rank did."""
    import torch

    import superoffload
    from tests.support import engine as support

    superoffload.join_process_group(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    losses = torch.load(folder / "losses")
    for mode, ratio in MODES:
        with support.engine(support.spec(mode, ratio, clipping=1.0)) as made:
            superoffload.load_state(made, folder / f"one {mode}")
            superoffload.save_state(made, folder / f"two {mode}")
            found = support.train(made, support.batches(6)[4:])
            torch.testing.assert_close(torch.tensor(found), torch.tensor(losses[mode]), rtol=1e-2, atol=0)


if __name__ == "__main__":
    take_over(Path(sys.argv[1]))
    leave()
