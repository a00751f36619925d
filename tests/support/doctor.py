"""Machines and plans for doctor's tests: one without any finding, and ways to change it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from so_tui.doctor import CheckContext, Finding, _run_checks
from so_tui.machine import Machine, Mpam
from so_tui.machine.system_files import SystemFiles
from so_tui.spec import RunSpec, find_preset, with_values
from tests.support.plans import SOFTWARE
from tests.support.sysroots import QUAD_GH200, Host, build_files

GIB = 1 << 30
INSTALLED = replace(
    SOFTWARE,
    python="3.12.3",
    datasets="5.2.0",
    flash_attn_4="4.0.0b36",
    nvidia_driver="580.95.05",
    ninja="1.13.0",
)


@dataclass(frozen=True)
class Needs:
    """The part of a plan that doctor reads; by default a run that needs nothing."""

    mode: str = "superoffload"
    changes: dict[str, str] = field(default_factory=dict)
    """Values to change in the preset ``tiny``."""
    fits: bool = True
    cause_texts: tuple[str, ...] = ()
    remedy_texts: tuple[str, ...] = ()
    host_bytes_per_node: dict[int, int] = field(default_factory=lambda: {0: 0})
    host_optional_bytes: int = 0
    shm_bytes: int = 0
    disk_bytes: int = 0
    disk_peak_bytes: int = 0
    least_disk_bytes: int = 0
    step_s: float | None = None

    @property
    def spec(self) -> RunSpec:
        decided = {"offload.mode": self.mode}
        return with_values(find_preset("tiny").spec, decided | self.changes)


def healthy(host: Host = QUAD_GH200, **changes: Any) -> Machine:
    """Return a live machine without findings, with some attributes changed."""
    usual: dict[str, Any] = {"live": True, "software": INSTALLED}
    usual |= {"shm_total_bytes": 200 * GIB, "shm_free_bytes": 200 * GIB}
    usual["mpam"] = Mpam(state="mounted", evidence="")
    usual["gpus"] = tuple(
        replace(gpu, uuid=f"GPU-{gpu.index}", compute_mode="Default", mig=False)
        for gpu in host.machine().gpus
    )
    return replace(host.machine(), **(usual | changes))


def with_software(machine: Machine, **changes: Any) -> Machine:
    return replace(machine, software=replace(INSTALLED, **changes))


def found(
    machine: Machine,
    files: dict[str, str] | None = None,
    folder: Path | None = None,
    **context: Any,
) -> tuple[Finding, ...]:
    """Return the findings about a machine; with ``folder``, of system files written there."""
    if folder is not None:
        context["files"] = SystemFiles(build_files(files or {}, folder))
    return _run_checks(CheckContext(machine=machine, **context))


def examined(
    folder: Path | None,
    *,
    host: Host = QUAD_GH200,
    gpu: dict[str, Any] | None = None,
    software: dict[str, Any] | None = None,
    machine: dict[str, Any] | None = None,
    files: dict[str, str] | None = None,
    **context: Any,
) -> str:
    """Return severity and code of each finding about a healthy host with these changes."""
    changed = healthy(host, **(machine or {}))
    if gpu:
        first, *others = changed.gpus
        changed = replace(changed, gpus=(replace(first, **gpu), *others))
    if software:
        changed = with_software(changed, **software)
    return brief(found(changed, files, folder, **context))


def brief(findings: tuple[Finding, ...]) -> str:
    """Return severity and code of each finding, which must have all its texts."""
    for finding in findings:
        assert all([finding.title, finding.evidence, finding.cost, finding.remedy]), finding
    return ", ".join(f"{finding.severity} {finding.code}" for finding in findings)


def only(findings: tuple[Finding, ...]) -> Finding:
    """Return the single finding, which must have all its texts."""
    assert len(findings) == 1, brief(findings)
    return findings[0]
