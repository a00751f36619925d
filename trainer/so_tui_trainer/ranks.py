"""The ranks of a run, and collectives over a CPU process group that involve no GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
import torch.distributed as dist

Value = TypeVar("Value")
RENDEZVOUS = "SO_TUI_RENDEZVOUS"
"""Environment variable in which the supervisor says where the ranks meet."""


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

    @property
    def device_name(self) -> str:
        """The name of the GPU; empty without one."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self.group)

    def all_gather(self, value: Value, kind: Any) -> list[Value]:
        """Return every rank's value, in rank order.

        Values are exchanged as MessagePack and checked on arrival, never pickled: a pickle could
        run code of whoever joined the group.

        Args:
            value: This rank's value.
            kind: Its type, as msgspec takes it (``str``, a structure, ``Path | None``).
        """
        content = bytearray(msgspec.msgpack.encode(value, enc_hook=str))
        mine = torch.frombuffer(content, dtype=torch.uint8)
        sizes = [int(row[0]) for row in self.all_gather_row([float(len(mine))])]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(mine)] = mine
        rows = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(rows, padded, group=self.group)
        return [
            msgspec.msgpack.decode(row[:size].numpy().tobytes(), type=kind, dec_hook=_path)
            for row, size in zip(rows, sizes, strict=True)
        ]

    def broadcast(self, value: Value | None, kind: Any) -> Value:
        """Return rank 0's value; the values of other ranks are ignored. Arguments as for
        ``all_gather``.
        """
        values: list[Any] = self.all_gather(value if self.first else None, kind | None)
        result: Value = values[0]
        return result

    def all_gather_row(self, row: list[float]) -> list[list[float]]:
        """Return every rank's row of numbers, in rank order. Rows must have the same length.
        Cheaper than ``all_gather``.
        """
        mine = torch.tensor(row, dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine, group=self.group)
        return [values.tolist() for values in rows]


def join(use_gpu: bool) -> Ranks:
    """Join the process group of the run, at the rendezvous that the supervisor made for its
    ranks.
    """
    from superoffload import join_process_group  # imports DeepSpeed

    local_rank = int(os.environ["LOCAL_RANK"])
    if use_gpu:
        torch.cuda.set_device(local_rank)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    join_process_group(
        init_method=os.environ[RENDEZVOUS], rank=rank, world_size=size, auto_mpi_discovery=False
    )
    device = torch.device("cuda", local_rank) if use_gpu else torch.device("cpu")
    group = dist.new_group(backend="gloo")
    return Ranks(dist.get_rank(), dist.get_world_size(), device, group)


def _path(kind: type, value: Any) -> Any:
    """Return a path from its text, because MessagePack has no such type."""
    if kind is not Path:
        raise NotImplementedError(f"values of the type {kind} are not exchanged")
    return Path(value)
