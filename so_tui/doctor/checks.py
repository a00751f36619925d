"""What a check reads and what it returns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import Struct

from so_tui.folders import Environment
from so_tui.machine.gpus import GpuHealth
from so_tui.machine.system_files import SystemFiles
from so_tui.machine.types import Gpu, Machine

if TYPE_CHECKING:
    from so_tui.plan.plan import Plan

Severity = Literal["blocks", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("blocks", "warning", "note")


class Finding(Struct, frozen=True):
    """One trap on a machine or in the settings of a run."""

    code: str
    """What was found, in kebab-case and independent of the wording: ``no-compiler``."""
    severity: Severity
    """``blocks``: a launch is refused; ``warning``: costs speed, memory or the run; ``note``: good
    to know.
    """
    title: str
    evidence: str
    """What was read, and where."""
    cost: str
    """What happens if nothing is done."""
    remedy: str


Findings = Iterator[Finding]
"""What a check yields."""


class _Wording(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``findings.toml`` says of a finding; ``{name}`` stands for what the check gives."""

    severity: Severity
    lesser: Severity | None = None
    title: str
    cost: str
    remedy: str
    code: str = ""
    """If two wordings share it; otherwise it is the name of the wording."""


@cache
def wordings() -> dict[str, _Wording]:
    """Return the words of all findings by name."""
    return msgspec.toml.decode(
        Path(__file__).with_name("findings.toml").read_bytes(), type=dict[str, _Wording]
    )


def finding(name: str, evidence: str, /, *, lesser: bool = False, **words: object) -> Finding:
    """Return a finding in the words of ``findings.toml``; if ``lesser``, with that severity."""
    wording = wordings()[name]
    return Finding(
        wording.code or name,
        wording.lesser if lesser and wording.lesser else wording.severity,
        wording.title.format(**words),
        evidence,
        wording.cost.format(**words),
        wording.remedy.format(**words),
    )


NO_FILES = SystemFiles(Path("/dev/null"))
"""Those of another host, of which only the Machine is known."""


@dataclass(frozen=True)
class CheckContext:
    """Everything that checks may read."""

    machine: Machine
    plan: Plan | None = None
    """The run that is to start; None checks the machine without a run."""
    files: SystemFiles = NO_FILES
    """System files of this host; ``NO_FILES`` if the machine is a different one."""
    environment: Environment = field(default_factory=dict)
    health: tuple[GpuHealth, ...] = ()
    checkpoints: Path | None = None
    """Folder on this host for checkpoints."""
    now: float = field(default_factory=time.time)
    """Unix seconds."""

    @property
    def is_this_host(self) -> bool:
        return self.files is not NO_FILES

    @property
    def nvidia_gpus(self) -> tuple[Gpu, ...]:
        return tuple(gpu for gpu in self.machine.gpus if gpu.vendor == "nvidia")

    @property
    def exclusive_gpus(self) -> tuple[Gpu, ...]:
        """Those that one process at a time may use."""
        return tuple(
            gpu for gpu in self.nvidia_gpus if (gpu.compute_mode or "").startswith("Exclusive")
        )

    @property
    def host_bytes_needed(self) -> int:
        """Host memory that the run must have, on all nodes together."""
        if self.plan is None:
            return 0
        return sum(self.plan.host_bytes_per_node.values()) - self.plan.host_optional_bytes

    @property
    def several_nodes(self) -> bool:
        """Whether several NUMA nodes have memory."""
        return sum(node.memory_total_bytes > 0 for node in self.machine.numa_nodes) > 1

    @property
    def is_grace(self) -> bool:
        """Whether the CPU is an NVIDIA Grace."""
        return self.machine.architecture == "aarch64" and "Grace" in self.machine.cpu_name

    @property
    def uses_deepspeed_superoffload(self) -> bool:
        return self.plan is not None and self.plan.spec.offload.deepspeed_superoffload

    @property
    def uses_deepspeed_adam(self) -> bool:
        """Whether the run uses DeepSpeed's CPU Adam, which ninja compiles at first use. so-tui's
        own needs only a compiler.
        """
        zerooffload = self.plan is not None and self.plan.mode == "zerooffload"
        return zerooffload or self.uses_deepspeed_superoffload
