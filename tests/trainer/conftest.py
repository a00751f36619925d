"""Fixtures of the trainer's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from so_tui_trainer.ranks import Ranks


@pytest.fixture(scope="module")
def single_rank() -> Iterator[Ranks]:
    """A process group of one rank, in this process."""
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield Ranks(0, 1, torch.device("cpu"), dist.group.WORLD)
    dist.destroy_process_group()
