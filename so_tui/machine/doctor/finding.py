"""What a check sees and what it says."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from msgspec import Struct

from so_tui.machine.nvml import GpuHealth
from so_tui.machine.tree import Tree
from so_tui.machine.types import Gpu, Machine
from so_tui.spec.types import RunSpec

Severity = Literal["blocks", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("blocks", "warning", "note")

GIB = 1 << 30


class Finding(Struct, frozen=True, kw_only=True):
    severity: Severity
    """``blocks``: a launch is refused; ``warning``: it costs speed, memory or a run; ``note``: good to know."""
    title: str
    evidence: str
    """What was read, and where."""
    cost: str
    remedy: str


class Needs(Protocol):
    """The part of a plan that the checks read."""

    @property
    def spec(self) -> RunSpec: ...
    @property
    def mode(self) -> str: ...
    @property
    def fits(self) -> bool: ...
    @property
    def reason_texts(self) -> tuple[str, ...]: ...
    @property
    def remedy_texts(self) -> tuple[str, ...]: ...
    @property
    def host_bytes_per_node(self) -> Mapping[int, int]: ...
    @property
    def shm_bytes(self) -> int: ...
    @property
    def disk_bytes(self) -> int: ...
    @property
    def disk_peak_bytes(self) -> int: ...
    @property
    def step_s(self) -> float | None: ...


@dataclass(frozen=True)
class Look:
    """One look at a machine. ``tree`` is None where the machine is not this host: then only the Machine itself is judged."""

    machine: Machine
    plan: Needs | None = None
    tree: Tree | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    health: tuple[GpuHealth, ...] = ()
    checkpoints: Path | None = None
    """The folder that checkpoints go to, on this host."""
    now: float = field(default_factory=time.time)
    """Seconds since the epoch."""

    @property
    def nvidia(self) -> tuple[Gpu, ...]:
        return tuple(gpu for gpu in self.machine.gpus if gpu.vendor == "nvidia")

    @property
    def grace(self) -> bool:
        return self.machine.architecture == "aarch64" and "Grace" in self.machine.cpu_name

    @property
    def deepspeeds_adam(self) -> bool:
        """Whether the plan steps with DeepSpeed's CPU Adam, which is compiled with ninja at first use; ours needs a compiler alone."""
        return self.plan is not None and (
            self.plan.mode == "zerooffload" or (self.plan.mode == "superoffload" and self.plan.spec.offload.engine == "deepspeed")
        )

    def text(self, name: str) -> str:
        """A live file's text; empty where it is absent or the machine is elsewhere."""
        return (self.tree.text(name) if self.tree else None) or ""


def gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB"


def indices(gpus: tuple[Gpu, ...]) -> str:
    return ", ".join(str(gpu.index) for gpu in gpus)
