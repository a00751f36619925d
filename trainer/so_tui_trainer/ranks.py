"""The ranks of a run and the CPU group they talk over: what they say never touches the GPU, and never waits for it."""

from __future__ import annotations

import os
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

Value = TypeVar("Value")


class Ranks(NamedTuple):
    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup
    """gloo, whatever the accelerator's group is."""

    @property
    def first(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        dist.barrier(group=self.group)

    def gather(self, value: Value) -> list[Value]:
        """Everyone's value, in rank order, on every rank."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def from_first(self, value: Value | None) -> Value:
        """Rank 0's value on every rank; what the others pass does not matter."""
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        result: Value = box[0]
        return result

    def table(self, row: list[float]) -> list[list[float]]:
        """Everyone's row of numbers, in rank order, on every rank; rows are equally long. Cheaper than ``gather``."""
        mine = torch.tensor(row, dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine, group=self.group)
        return [values.tolist() for values in rows]


def join(use_gpu: bool) -> Ranks:
    """Join the process group that DeepSpeed's launcher prepared in the environment."""
    from superoffload import join_process_group  # imports DeepSpeed

    local_rank = int(os.environ["LOCAL_RANK"])
    if use_gpu:
        torch.cuda.set_device(local_rank)
    join_process_group()
    device = torch.device("cuda", local_rank) if use_gpu else torch.device("cpu")
    group = dist.new_group(backend="gloo")
    return Ranks(dist.get_rank(), dist.get_world_size(), device, group)
