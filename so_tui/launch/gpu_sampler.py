"""Samples of the GPUs by NVML. Any figure may be missing, because drivers, containers and some GPUs do not support it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from so_tui.machine.types import Gpu
from so_tui.runs.records import GpuSample

T = TypeVar("T")
_MIB = 2**20


class GpuSampler:
    """Samples the given GPUs; none without a driver. Not thread-safe."""

    def __init__(self, gpus: tuple[Gpu, ...]) -> None:
        self._nvml: Any = None
        self._devices: list[_Device] = []
        if not gpus:
            return
        import pynvml

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return
        self._nvml = pynvml
        for gpu in gpus:
            handle = _asked(pynvml, pynvml.nvmlDeviceGetHandleByPciBusId, gpu.pci_bus_id.encode())
            if handle is not None:
                self._devices.append(_Device(pynvml, gpu, handle))

    def sample(self) -> tuple[GpuSample, ...]:
        """Take a sample of each GPU."""
        return tuple(device.sample() for device in self._devices)

    def close(self) -> None:
        """Release the counters and NVML."""
        for device in self._devices:
            device.close()
        self._devices = []
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml = None


class _Device:
    def __init__(self, nvml: Any, gpu: Gpu, handle: Any) -> None:
        self._nvml = nvml
        self._index = gpu.index
        self._handle = handle
        # A GPU on PCIe would report zeros, which look like an idle link.
        self._link = _LinkCounter(nvml, handle) if gpu.c2c is not False else None

    def sample(self) -> GpuSample:
        nvml, handle = self._nvml, self._handle
        memory = _asked(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
        power_mw = _asked(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
        to_gpu, to_host = self._link.rates() if self._link else (None, None)
        return GpuSample(
            index=self._index,
            busy_percent=_asked(nvml, lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            memory_used_bytes=memory.used if memory else None,
            memory_total_bytes=memory.total if memory else None,
            power_w=power_mw / 1000 if power_mw is not None else None,
            clock_mhz=_asked(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            temperature_c=_asked(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            c2c_to_gpu_bytes_per_s=to_gpu,
            c2c_to_host_bytes_per_s=to_host,
        )

    def close(self) -> None:
        if self._link:
            self._link.close()


class _LinkCounter:
    """NVLink-C2C traffic by GPM: the difference of two readings, which the driver converts to MiB/s."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._readings: list[Any] = []
        support = _asked(nvml, nvml.nvmlGpmQueryDeviceSupport, handle)
        if support is not None and support.isSupportedDevice:
            readings = [_asked(nvml, nvml.nvmlGpmSampleAlloc) for _ in range(2)]
            self._readings = readings if all(reading is not None for reading in readings) else []
        self._started = False

    def rates(self) -> tuple[float | None, float | None]:
        """Return bytes per second (to the GPU, to the host) since the previous call; None if not measured."""
        if not self._readings:
            return None, None
        self._readings.reverse()
        newer = self._readings[1]
        if _asked(self._nvml, self._nvml.nvmlGpmSampleGet, self._handle, newer) is None:
            return None, None
        first, self._started = not self._started, True
        return (None, None) if first else self._between(*self._readings)

    def close(self) -> None:
        for reading in self._readings:
            _asked(self._nvml, self._nvml.nvmlGpmSampleFree, reading)
        self._readings = []

    def _between(self, older: Any, newer: Any) -> tuple[float | None, float | None]:
        query = self._nvml.c_nvmlGpmMetricsGet_t()
        query.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        query.sample1, query.sample2 = older, newer
        query.numMetrics = 2
        query.metrics[0].metricId = self._nvml.NVML_GPM_METRIC_C2C_DATA_RX_PER_SEC
        query.metrics[1].metricId = self._nvml.NVML_GPM_METRIC_C2C_DATA_TX_PER_SEC
        if _asked(self._nvml, self._nvml.nvmlGpmMetricsGet, query) is None:
            return None, None
        received, sent = (metric.value * _MIB if metric.nvmlReturn == 0 else None for metric in query.metrics[:2])
        return received, sent


def _asked(nvml: Any, function: Callable[..., T], *arguments: Any) -> T | None:
    """Return the result of an NVML call; None if the driver, the GPU or nvidia-ml-py does not support or allow it."""
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None
