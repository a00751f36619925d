"""Samples of the GPUs: NVIDIA's by NVML, AMD's from sysfs.

Any figure may be missing, because drivers, containers and some GPUs do not support it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from so_tui.launch.amd_sampler import AmdDevice
from so_tui.launch.host_processes import GpuUse
from so_tui.machine.types import Gpu
from so_tui.runs.sample import GpuSample

T = TypeVar("T")
_MIB = 2**20
_THROTTLING = {"power": 0x4, "heat": 0x20 | 0x40, "power-brake": 0x80}
"""``nvmlClocksEventReason``: the software's power cap; heat, seen by software or hardware; the power supply's brake."""
_HARDWARE = 0x8
"""A slowdown by hardware, which comes with its cause where the driver knows it."""


class GpuSampler:
    """Samples the given GPUs; none without a driver. Not thread-safe."""

    def __init__(self, gpus: tuple[Gpu, ...], root: Path = Path("/")) -> None:
        self._nvml: Any = None
        self._devices: list[_Device | AmdDevice] = [
            AmdDevice(gpu, root) for gpu in gpus if gpu.vendor == "amd"
        ]
        if len(self._devices) == len(gpus):
            return
        import pynvml

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return
        self._nvml = pynvml
        for gpu in (gpu for gpu in gpus if gpu.vendor == "nvidia"):
            handle = _asked(pynvml, pynvml.nvmlDeviceGetHandleByPciBusId, gpu.pci_bus_id.encode())
            if handle is not None:
                self._devices.append(_Device(pynvml, gpu, handle))

    def sample(self) -> tuple[GpuSample, ...]:
        """Take a sample of each GPU."""
        return tuple(device.sample() for device in self._devices)

    def processes(self) -> dict[int, GpuUse]:
        """Return what each process that computes on the GPUs uses of them, by pid."""
        found: dict[int, dict[int, int | None]] = {}
        for device in self._devices:
            for pid, size in device.processes():
                found.setdefault(pid, {})[device.index] = size
        return {pid: GpuUse(sizes) for pid, sizes in found.items()}

    def close(self) -> None:
        """Release the counters and NVML."""
        for device in self._devices:
            device.close()
        self._devices = []
        if self._nvml is not None:
            _asked(self._nvml, self._nvml.nvmlShutdown)  # it may fail once a GPU is lost
            self._nvml = None


class _Device:
    def __init__(self, nvml: Any, gpu: Gpu, handle: Any) -> None:
        self._nvml = nvml
        self.index = gpu.index
        self._handle = handle
        self._traffic = _Traffic(nvml, handle, c2c=gpu.c2c is not False)
        self._clock_max_mhz = _asked(
            nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM
        )

    def sample(self) -> GpuSample:
        nvml, handle = self._nvml, self._handle
        memory = _asked(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
        module_w, module_limit_w = self._module_power_w()
        reasons = _asked(nvml, nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        return GpuSample(
            index=self.index,
            busy_percent=_asked(nvml, lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            memory_used_bytes=memory.used if memory else None,
            memory_total_bytes=memory.total if memory else None,
            power_w=_watts(_asked(nvml, nvml.nvmlDeviceGetPowerUsage, handle)),
            power_limit_w=_watts(_asked(nvml, nvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
            module_power_w=module_w,
            module_power_limit_w=module_limit_w,
            clock_mhz=_asked(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            clock_max_mhz=self._clock_max_mhz,
            temperature_c=_asked(
                nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU
            ),
            throttling=throttling(reasons or 0),
            **self._traffic.rates(),
        )

    def processes(self) -> Iterator[tuple[int, int | None]]:
        """Yield pid and memory in bytes of each process that computes."""
        for process in (
            _asked(self._nvml, self._nvml.nvmlDeviceGetComputeRunningProcesses, self._handle) or ()
        ):
            yield process.pid, process.usedGpuMemory

    def close(self) -> None:
        self._traffic.close()

    def _module_power_w(self) -> tuple[float | None, float | None]:
        """Return power and limit of the superchip; None where a GPU has a module of its own, and the driver therefore no such figures."""
        nvml, scope = self._nvml, self._nvml.NVML_POWER_SCOPE_MODULE
        wanted = [
            (nvml.NVML_FI_DEV_POWER_INSTANT, scope),
            (nvml.NVML_FI_DEV_POWER_CURRENT_LIMIT, scope),
        ]
        values = _asked(nvml, nvml.nvmlDeviceGetFieldValues, self._handle, wanted) or ()
        power, limit = (
            *(
                _watts(value.value.uiVal or None) if value.nvmlReturn == 0 else None
                for value in values
            ),
            None,
            None,
        )[:2]
        return power, limit


def throttling(reasons: int) -> tuple[str, ...]:
    """Return why a clock is held down, from NVML's event reasons, without those that the user or idleness asked for."""
    found = tuple(name for name, bits in _THROTTLING.items() if reasons & bits)
    return found or (("hardware",) if reasons & _HARDWARE else ())


class _Traffic:
    """Bytes over NVLink-C2C and PCIe by GPM: the difference of two readings, which the driver converts to MiB/s."""

    def __init__(self, nvml: Any, handle: Any, *, c2c: bool) -> None:
        self._nvml = nvml
        self._handle = handle
        self._metrics = {
            "pcie_to_gpu_bytes_per_s": nvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC,
            "pcie_to_host_bytes_per_s": nvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC,
        }
        if c2c:  # a GPU on PCIe would report zeros, which look like an idle link
            self._metrics |= {
                "c2c_to_gpu_bytes_per_s": nvml.NVML_GPM_METRIC_C2C_DATA_RX_PER_SEC,
                "c2c_to_host_bytes_per_s": nvml.NVML_GPM_METRIC_C2C_DATA_TX_PER_SEC,
            }
        self._readings: list[Any] = []
        support = _asked(nvml, nvml.nvmlGpmQueryDeviceSupport, handle)
        if support is not None and support.isSupportedDevice:
            readings = [_asked(nvml, nvml.nvmlGpmSampleAlloc) for _ in range(2)]
            self._readings = readings if all(reading is not None for reading in readings) else []
        self._started = False

    def rates(self) -> dict[str, float]:
        """Return bytes per second since the previous call, by fields of a sample; those that are not measured are absent."""
        if not self._readings:
            return {}
        self._readings.reverse()
        newer = self._readings[1]
        if _asked(self._nvml, self._nvml.nvmlGpmSampleGet, self._handle, newer) is None:
            return {}
        first, self._started = not self._started, True
        return {} if first else self._between(*self._readings)

    def close(self) -> None:
        for reading in self._readings:
            _asked(self._nvml, self._nvml.nvmlGpmSampleFree, reading)
        self._readings = []

    def _between(self, older: Any, newer: Any) -> dict[str, float]:
        query = self._nvml.c_nvmlGpmMetricsGet_t()
        query.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        query.sample1, query.sample2 = older, newer
        query.numMetrics = len(self._metrics)
        for metric, number in zip(query.metrics, self._metrics.values(), strict=False):
            metric.metricId = number
        if _asked(self._nvml, self._nvml.nvmlGpmMetricsGet, query) is None:
            return {}
        named = zip(self._metrics, query.metrics, strict=False)
        return {
            name: round(metric.value * _MIB) for name, metric in named if metric.nvmlReturn == 0
        }


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _asked(nvml: Any, function: Callable[..., T], *arguments: Any) -> T | None:
    """Return the result of an NVML call; None if the driver, the GPU or nvidia-ml-py does not support or allow it."""
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None
