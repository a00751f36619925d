"""How fast ranks exchange large tensors, which plans of several nodes use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from so_tui.runs import create_run, new_attempt
from so_tui.runs.samples import read_network_rate
from so_tui_trainer import metrics
from so_tui_trainer.ranks import Ranks
from tests.support.launching import tiny

_RANK = """
import sys
import torch, torch.distributed as dist
from so_tui.runs import RunDirectory
from so_tui_trainer.metrics import record_network_rate
from so_tui_trainer.ranks import Ranks
dist.init_process_group("gloo", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2)
record_network_rate(Ranks(dist.get_rank(), 2, torch.device("cpu"), dist.group.WORLD), RunDirectory(sys.argv[3]), 1, 2)
dist.destroy_process_group()
"""  # noqa: E501


@pytest.mark.parametrize(
    ("latency_s", "bytes_per_s", "whole_bytes"),
    [(0.0, 1e9, 1 << 26), (0.0, 1e7, 1 << 20), (0.0, 1e12, 1 << 28), (1e-3, 1e10, 1 << 28)],
)
def test_the_rate_is_that_of_a_tensor_that_takes_long_enough(
    latency_s: float,
    bytes_per_s: float,
    whole_bytes: int,
    single_rank: Ranks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def both_s(_ranks: Ranks, size: int) -> float:
        asked.append(size)
        return latency_s + 2 * size * 11 / 12 / bytes_per_s

    monkeypatch.setattr(metrics, "_both_s", both_s)
    assert metrics._measure_network_rate(single_rank._replace(size=12)) == pytest.approx(
        bytes_per_s, rel=0.05
    )
    assert asked[-1] == whole_bytes


@pytest.mark.slow
def test_two_ranks_measure_and_the_first_one_records_it(tmp_path: Path) -> None:
    run = create_run(tiny(nodes="2", gpus="1"), tmp_path)
    attempt = new_attempt(run)
    meeting = f"file://{tmp_path / 'meeting'}"
    python = [sys.executable, "-W", "error::FutureWarning"]  # of older names of torch's functions
    ranks = [
        subprocess.Popen([*python, "-c", _RANK, meeting, str(rank), str(run.path)])
        for rank in range(2)
    ]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    rate = read_network_rate(run, attempt)
    assert rate is not None
    assert rate.nodes == 2
    assert 1e6 < rate.bytes_per_s < 1e12
