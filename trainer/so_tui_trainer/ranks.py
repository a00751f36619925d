"""The ranks of a run, and collectives over a CPU process group that involve no GPU."""

from __future__ import annotations

import os
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

Value = TypeVar("Value")


class Ranks(NamedTuple):
    """This rank and its process group."""

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup
    """A gloo group, whatever the accelerator's backend is."""

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self.group)

    def all_gather(self, value: Value) -> list[Value]:
        """Return every rank's value, in rank order. The values are pickled."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def broadcast(self, value: Value | None) -> Value:
        """Return rank 0's value; the values of other ranks are ignored."""
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        result: Value = box[0]
        return result

    def all_gather_row(self, row: list[float]) -> list[list[float]]:
        """Return every rank's row of numbers, in rank order. Rows must have the same length. Cheaper than ``all_gather``."""
        mine = torch.tensor(row, dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine, group=self.group)
        return [values.tolist() for values in rows]


def join(use_gpu: bool) -> Ranks:
    """Join the process group of the ranks that DeepSpeed's launcher started, through the file that the environment names."""
    from superoffload import join_process_group  # imports DeepSpeed

    local_rank = int(os.environ["LOCAL_RANK"])
    if use_gpu:
        torch.cuda.set_device(local_rank)
    join_process_group(
        init_method=f"file://{os.environ['SO_TUI_RENDEZVOUS']}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    device = torch.device("cuda", local_rank) if use_gpu else torch.device("cpu")
    group = dist.new_group(backend="gloo")
    return Ranks(dist.get_rank(), dist.get_world_size(), device, group)
