"""Samples of AMD's GPUs, from files of their kernel driver that any user may read. Linux documents them in ``gpu/amdgpu``.

Which of them there are depends on the GPU; what is missing is unknown. Processes on the GPUs are not named.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from so_tui.machine.system_files import SystemFiles
from so_tui.machine.types import Gpu
from so_tui.runs.sample import GpuSample


class AmdDevice:
    """Samples one GPU."""

    def __init__(self, gpu: Gpu, root: Path = Path("/")) -> None:
        self.index = gpu.index
        self._memory_total_bytes = gpu.memory_total_bytes
        self._files = SystemFiles(root)
        self._folder = f"/sys/bus/pci/devices/{gpu.pci_bus_id}"
        sensors = next(
            (
                name
                for name in self._files.names(f"{self._folder}/hwmon")
                if name.startswith("hwmon")
            ),
            "",
        )
        self._sensors = f"{self._folder}/hwmon/{sensors}"
        limit = self._files.integer(f"{self._sensors}/power1_cap")
        self._power_limit_w = None if limit is None else limit / 1e6

    def sample(self) -> GpuSample:
        """Take a sample."""
        clock_hz, millidegrees = (
            self._sensor("freq1_input"),
            self._sensor("temp1_input", "temp2_input"),
        )
        microwatts = self._sensor("power1_average", "power1_input")
        return GpuSample(
            index=self.index,
            busy_percent=self._files.integer(f"{self._folder}/gpu_busy_percent"),
            memory_used_bytes=self._files.integer(f"{self._folder}/mem_info_vram_used"),
            memory_total_bytes=self._memory_total_bytes,
            power_w=None if microwatts is None else microwatts / 1e6,
            power_limit_w=self._power_limit_w,
            clock_mhz=None if clock_hz is None else clock_hz // 1_000_000,
            temperature_c=None if millidegrees is None else millidegrees // 1000,
        )

    def processes(self) -> Iterator[tuple[int, int | None]]:
        """Yield nothing: the driver has no such list for other users."""
        return iter(())

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def _sensor(self, *names: str) -> int | None:
        """Return the first of these values that the GPU has."""
        return next(
            (
                value
                for name in names
                if (value := self._files.integer(f"{self._sensors}/{name}")) is not None
            ),
            None,
        )
