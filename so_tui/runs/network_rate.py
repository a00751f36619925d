"""How fast the ranks of several nodes exchanged weights and gradients before they trained: ``network.json``, which rank 0 writes."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from so_tui.runs.directory import RunDirectory
from so_tui.runs.files import write_run_file
from so_tui.structs import prepare
from so_tui.trust.decoding import decode_json
from so_tui.trust.ownership import read_own


class NetworkRate(Struct, frozen=True, kw_only=True):
    """Content of ``network.json``."""

    v: int = 1
    nodes: int
    bytes_per_s: Annotated[float, Meta(gt=0, le=1e15)]
    """What entered each node, and left it, during all-gathers and reduce-scatters of all ranks."""
    measured: float
    """In seconds since the epoch."""


prepare(NetworkRate)


def write_network_rate(run: RunDirectory, attempt: int, nodes: int, bytes_per_s: float) -> None:
    """Record a measured rate. Raises OSError."""
    rate = NetworkRate(nodes=nodes, bytes_per_s=bytes_per_s, measured=time.time())
    write_run_file(run, run.network_path(attempt), msgspec.json.encode(rate))


def read_network_rate(run: RunDirectory, attempt: int) -> NetworkRate | None:
    """Return what an attempt measured; None if it measured nothing, or the file is damaged or not this user's own."""
    try:
        return decode_json(read_own(run.network_path(attempt)), NetworkRate)
    except (OSError, msgspec.DecodeError):
        return None
