"""What memory a plan needs, and where it runs short."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from so_tui.plan.facts.coded import CodedFact

MemoryPool = Literal["gpu", "node", "limit", "shm", "unknown"]
"""Memory that may run short: of each GPU, of CPU nodes, within the session's limit, /dev/shm. ``unknown`` in older files."""


class Shortage(CodedFact, frozen=True):
    """A memory pool in which the margin is not left free; ``fatal`` when the pool is too small."""

    needs: int
    """Bytes, as ``has``."""
    has: int
    fatal: bool
    pool: MemoryPool = "unknown"
    nodes: tuple[int, ...] = ()
    """CPU nodes that are equally short."""


class NodeNeed(Struct, frozen=True):
    """CPU nodes with the same figures; the fullest of them gives the bytes."""

    nodes: tuple[int, ...]
    needs: int
    has: int


class MemoryNeeded(CodedFact, frozen=True):
    """Memory of a plan that may run."""

    gpu_bytes: int
    gpu_capacity_bytes: int | None
    hosts: tuple[NodeNeed, ...]


Need = Shortage | MemoryNeeded
