"""Asking NVML, where every call may be unsupported: coherent parts, MIG, containers and old drivers each refuse some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from msgspec import Struct

T = TypeVar("T")

_COMPUTE_MODES = {0: "Default", 1: "Exclusive_Thread", 2: "Prohibited", 3: "Exclusive_Process"}


class NvmlGpu(Struct, frozen=True, kw_only=True):
    index: int
    name: str
    bus_id: str
    uuid: str | None
    memory_node: int | None
    memory_total_bytes: int | None
    memory_used_bytes: int | None
    compute_mode: str | None
    c2c: bool | None
    mig: bool | None


class NvmlAnswer(Struct, frozen=True, kw_only=True):
    answered: bool = False
    """Whether NVML started: then its list is the truth, also an empty one (a job that was given no GPU)."""
    gpus: tuple[NvmlGpu, ...] = ()
    driver: str | None = None
    notes: tuple[str, ...] = ()


class GpuHealth(Struct, frozen=True, kw_only=True):
    """What changes from minute to minute; None where the driver does not say."""

    bus_id: str
    pids: tuple[int, ...] = ()
    """Processes that compute on it, as far as this container sees them."""
    uncorrected_ecc_errors: int | None = None
    """Since the driver was loaded."""
    row_remap_pending: bool | None = None
    row_remap_failed: bool | None = None
    persistence: bool | None = None
    compute_capability: tuple[int, int] | None = None


class Asker:
    """Calls NVML functions; an error reads as None, and an unexpected one leaves a note."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self.notes: list[str] = []
        self._expected = {nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND, nvml.NVML_ERROR_INVALID_ARGUMENT}

    def ask(self, function: str, *arguments: Any, read: Callable[[Any], T]) -> T | None:
        """``read`` of what the function returns. A function that this nvidia-ml-py does not have counts as not supported."""
        call = getattr(self.nvml, function, None)
        if call is None:
            return None
        try:
            return read(call(*arguments))
        except self.nvml.NVMLError as error:
            if error.value not in self._expected:
                self.notes.append(f"NVML {function}: {error}.")
            return None


def query_nvml() -> NvmlAnswer:
    """Every GPU the driver shows to this process. Empty without a note where there is no driver at all."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        absent = {pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED}
        return NvmlAnswer(notes=() if error.value in absent else (f"NVML does not start: {error}.",))
    try:
        asker = Asker(pynvml)
        count = asker.ask("nvmlDeviceGetCount", read=int) or 0
        gpus = tuple(gpu for index in range(count) if (gpu := _query_gpu(asker, index)) is not None)
        driver = asker.ask("nvmlSystemGetDriverVersion", read=_text)
        return NvmlAnswer(answered=True, gpus=gpus, driver=driver, notes=tuple(dict.fromkeys(asker.notes)))
    finally:
        pynvml.nvmlShutdown()


def query_health() -> tuple[GpuHealth, ...]:
    """The state of every GPU the driver shows; empty where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        asker = Asker(pynvml)
        count = asker.ask("nvmlDeviceGetCount", read=int) or 0
        found = (_health(asker, pynvml, index) for index in range(count))
        return tuple(health for health in found if health is not None)
    finally:
        pynvml.nvmlShutdown()


def _health(asker: Asker, nvml: Any, index: int) -> GpuHealth | None:
    handle = asker.ask("nvmlDeviceGetHandleByIndex", index, read=lambda handle: handle)
    bus_id = None if handle is None else asker.ask("nvmlDeviceGetPciInfo", handle, read=lambda info: _text(info.busId))
    if bus_id is None:
        return None
    remapped = asker.ask("nvmlDeviceGetRemappedRows", handle, read=lambda rows: (bool(rows[2]), bool(rows[3])))
    errors = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    return GpuHealth(
        bus_id=bus_id,
        pids=asker.ask("nvmlDeviceGetComputeRunningProcesses", handle, read=lambda found: tuple(one.pid for one in found)) or (),
        uncorrected_ecc_errors=asker.ask("nvmlDeviceGetTotalEccErrors", handle, *errors, read=int),
        row_remap_pending=remapped[0] if remapped else None,
        row_remap_failed=remapped[1] if remapped else None,
        persistence=asker.ask("nvmlDeviceGetPersistenceMode", handle, read=bool),
        compute_capability=asker.ask("nvmlDeviceGetCudaComputeCapability", handle, read=lambda found: (int(found[0]), int(found[1]))),
    )


def _query_gpu(asker: Asker, index: int) -> NvmlGpu | None:
    handle = asker.ask("nvmlDeviceGetHandleByIndex", index, read=lambda handle: handle)
    bus_id = None if handle is None else asker.ask("nvmlDeviceGetPciInfo", handle, read=lambda info: _text(info.busId))
    if bus_id is None:
        asker.notes.append(f"GPU {index} does not answer and is left out.")
        return None
    memory = asker.ask("nvmlDeviceGetMemoryInfo", handle, read=lambda info: (int(info.total), int(info.used)))
    return NvmlGpu(
        index=index,
        name=asker.ask("nvmlDeviceGetName", handle, read=_text) or "NVIDIA GPU",
        bus_id=bus_id,
        uuid=asker.ask("nvmlDeviceGetUUID", handle, read=_text),
        memory_node=asker.ask("nvmlDeviceGetNumaNodeId", handle, read=_node),
        memory_total_bytes=memory[0] if memory else None,
        memory_used_bytes=memory[1] if memory else None,
        compute_mode=asker.ask("nvmlDeviceGetComputeMode", handle, read=_COMPUTE_MODES.get),
        c2c=asker.ask("nvmlDeviceGetC2cModeInfoV1", handle, read=lambda info: bool(info.isC2cEnabled)),
        mig=asker.ask("nvmlDeviceGetMigMode", handle, read=lambda modes: bool(modes[0])),
    )


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _node(value: int) -> int | None:
    """Some drivers answer -1 instead of "not supported"."""
    return value if value >= 0 else None
