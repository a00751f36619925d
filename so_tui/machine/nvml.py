"""Query NVML, where any call may be unsupported: coherent GPUs, MIG, containers and old drivers each refuse some."""

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
    """Whether NVML started. Its list is then complete, even if empty (a job without GPUs)."""
    gpus: tuple[NvmlGpu, ...] = ()
    driver: str | None = None
    errors: tuple[str, ...] = ()
    """Errors of calls that should have succeeded, each a sentence."""


class GpuHealth(Struct, frozen=True, kw_only=True):
    """State of a GPU that changes over time; None where the driver does not report it."""

    bus_id: str
    pids: tuple[int, ...] = ()
    """Processes that compute on the GPU, as far as they are visible in this container."""
    uncorrected_ecc_errors: int | None = None
    """Since the driver was loaded."""
    row_remap_pending: bool | None = None
    row_remap_failed: bool | None = None
    persistence: bool | None = None
    compute_capability: tuple[int, int] | None = None


class Asker:
    """Calls NVML functions. An error returns None; an unexpected one is also recorded in ``errors``."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self.errors: list[str] = []
        self._expected = {
            nvml.NVML_ERROR_NOT_SUPPORTED,
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            nvml.NVML_ERROR_INVALID_ARGUMENT,
        }

    def ask(self, function: str, *arguments: Any, read: Callable[[Any], T]) -> T | None:
        """Call a function and return ``read`` of its result; None if it fails or this nvidia-ml-py does not have it."""
        call = getattr(self.nvml, function, None)
        if call is None:
            return None
        try:
            return read(call(*arguments))
        except self.nvml.NVMLError as error:
            if error.value not in self._expected:
                self.errors.append(f"NVML {function}: {error}.")
            return None


def query_nvml() -> NvmlAnswer:
    """Return every GPU that the driver shows to this process; empty and without errors if there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        absent = {pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED}
        return NvmlAnswer(
            errors=() if error.value in absent else (f"NVML does not start: {error}.",)
        )
    try:
        asker = Asker(pynvml)
        count = asker.ask("nvmlDeviceGetCount", read=int) or 0
        gpus = tuple(gpu for index in range(count) if (gpu := _query_gpu(asker, index)) is not None)
        driver = asker.ask("nvmlSystemGetDriverVersion", read=_text)
        return NvmlAnswer(
            answered=True, gpus=gpus, driver=driver, errors=tuple(dict.fromkeys(asker.errors))
        )
    finally:
        pynvml.nvmlShutdown()


def query_health() -> tuple[GpuHealth, ...]:
    """Return the state of every GPU that the driver shows; empty if there is no driver."""
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
    bus_id = (
        None
        if handle is None
        else asker.ask("nvmlDeviceGetPciInfo", handle, read=lambda info: _text(info.busId))
    )
    if bus_id is None:
        return None
    remapped = asker.ask(
        "nvmlDeviceGetRemappedRows", handle, read=lambda rows: (bool(rows[2]), bool(rows[3]))
    )
    errors = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    return GpuHealth(
        bus_id=bus_id,
        pids=asker.ask(
            "nvmlDeviceGetComputeRunningProcesses",
            handle,
            read=lambda found: tuple(one.pid for one in found),
        )
        or (),
        uncorrected_ecc_errors=asker.ask("nvmlDeviceGetTotalEccErrors", handle, *errors, read=int),
        row_remap_pending=remapped[0] if remapped else None,
        row_remap_failed=remapped[1] if remapped else None,
        persistence=asker.ask("nvmlDeviceGetPersistenceMode", handle, read=bool),
        compute_capability=asker.ask(
            "nvmlDeviceGetCudaComputeCapability",
            handle,
            read=lambda found: (int(found[0]), int(found[1])),
        ),
    )


def _query_gpu(asker: Asker, index: int) -> NvmlGpu | None:
    handle = asker.ask("nvmlDeviceGetHandleByIndex", index, read=lambda handle: handle)
    bus_id = (
        None
        if handle is None
        else asker.ask("nvmlDeviceGetPciInfo", handle, read=lambda info: _text(info.busId))
    )
    if bus_id is None:
        asker.errors.append(f"GPU {index} does not respond and is left out.")
        return None
    memory = asker.ask(
        "nvmlDeviceGetMemoryInfo", handle, read=lambda info: (int(info.total), int(info.used))
    )
    return NvmlGpu(
        index=index,
        name=asker.ask("nvmlDeviceGetName", handle, read=_text) or "NVIDIA GPU",
        bus_id=bus_id,
        uuid=asker.ask("nvmlDeviceGetUUID", handle, read=_text),
        memory_node=asker.ask("nvmlDeviceGetNumaNodeId", handle, read=_node),
        memory_total_bytes=memory[0] if memory else None,
        memory_used_bytes=memory[1] if memory else None,
        compute_mode=asker.ask("nvmlDeviceGetComputeMode", handle, read=_COMPUTE_MODES.get),
        c2c=asker.ask(
            "nvmlDeviceGetC2cModeInfoV1", handle, read=lambda info: bool(info.isC2cEnabled)
        ),
        mig=asker.ask("nvmlDeviceGetMigMode", handle, read=lambda modes: bool(modes[0])),
    )


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _node(value: int) -> int | None:
    """Return a node id; None for the -1 that some drivers return instead of "not supported"."""
    return value if value >= 0 else None
