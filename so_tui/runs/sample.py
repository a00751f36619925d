"""Records of a host, which its supervisor appends as lines of JSON. As with ``records``, readers accept unknown fields."""

from __future__ import annotations

from msgspec import Struct

from so_tui.runs.placement import RankPlacement
from so_tui.runs.records import SCHEMA


class NodeSample(Struct, frozen=True, kw_only=True):
    """Load of one NUMA node."""

    id: int
    cores: tuple[int, ...]
    """Load of each CPU of the node in percent, in ascending order of CPUs."""
    memory_used_bytes: int
    memory_total_bytes: int
    file_cache_bytes: int


class GpuSample(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Load of one GPU; None, and absent from files, where the driver does not report a value."""

    index: int
    busy_percent: int | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None
    clock_mhz: int | None = None
    temperature_c: int | None = None
    c2c_to_gpu_bytes_per_s: float | None = None
    c2c_to_host_bytes_per_s: float | None = None
    pcie_to_gpu_bytes_per_s: float | None = None
    pcie_to_host_bytes_per_s: float | None = None
    clock_max_mhz: int | None = None
    power_limit_w: float | None = None
    """What the driver enforces."""
    module_power_w: float | None = None
    """Of the whole superchip: on Grace Hopper, CPU and GPU share one limit."""
    module_power_limit_w: float | None = None
    throttling: tuple[str, ...] = ()
    """Why its clock is held below what it could be: ``power``, ``heat``, ``power-brake``, ``hardware``; newer versions may have more."""


class ForeignProcess(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A process that computes on the host and does not belong to the run."""

    pid: int
    name: str
    """As the kernel has it, at most 15 bytes. Its owner chose it."""
    cores: float
    """CPU seconds per second."""
    cpu: int | None = None
    """The CPU that it ran on last."""
    own: bool = False
    """Whether it belongs to the user of the run."""


class Sample(Struct, frozen=True, kw_only=True):
    """One measurement of a host, about once a second."""

    v: int = SCHEMA
    attempt: int
    time: float
    interval_s: float
    nodes: tuple[NodeSample, ...]
    gpus: tuple[GpuSample, ...] = ()
    run_cpu_s: float = 0.0
    """CPU seconds that the processes of the run used in the interval."""
    run_memory_bytes: int | None = None
    """PSS of the processes of the run. It is measured less often and repeated in between."""
    run_memory_peak_bytes: int | None = None
    """Peak memory of the run's processes so far, from the kernel's high-water marks, which include peaks of any length."""
    supervisor_cpu_s: float = 0.0
    foreign: tuple[ForeignProcess, ...] = ()
    """The busiest other processes, looked for less often than each second and only while others compute; the busiest first."""
    placement: tuple[RankPlacement, ...] = ()
    """In one sample of several, as it is measured less often."""


class Rollup(Struct, frozen=True, kw_only=True):
    """Mean and maximum of several consecutive samples; ``mean.time`` is the end of the interval."""

    v: int = SCHEMA
    samples: int
    """Number of samples."""
    mean: Sample
    peak: Sample
