"""GPUs from a simulated NVML: any call that fails leaves only its own value unknown."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from so_tui.machine import Machine, inspect_machine
from so_tui.machine.show import render

GIB = 1 << 30
ANSWERS: dict[str, Any] = {
    "nvmlDeviceGetCount": 2,
    "nvmlDeviceGetName": "GH200 480GB",
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=96 * GIB, used=GIB),
    "nvmlDeviceGetNumaNodeId": -1,
    "nvmlDeviceGetComputeMode": 3,
    "nvmlDeviceGetC2cModeInfoV1": SimpleNamespace(isC2cEnabled=1),
    "nvmlDeviceGetMigMode": [0, 0],
    "nvmlSystemGetDriverVersion": "580.95.05",
}
BUS_IDS = ("00000000:3A:00.0", "00000000:3B:00.0")
OF_EACH: dict[str, Any] = {
    "nvmlDeviceGetHandleByIndex": lambda index: index,
    "nvmlDeviceGetPciInfo": lambda index: SimpleNamespace(busId=BUS_IDS[index]),
    "nvmlDeviceGetUUID": lambda index: f"GPU-{index}a0b1c2d",
}


class Driver:
    """pynvml with two GPUs; functions named in ``refused`` raise the given error code."""

    def __init__(self, refused: dict[str, int], answers: dict[str, Any]) -> None:
        self.refused, self.answers = refused, ANSWERS | answers

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            return getattr(pynvml, name)
        return lambda *arguments: self.answer(name, *arguments)

    def answer(self, name: str, *arguments: Any) -> Any:
        if name in self.refused:
            raise pynvml.NVMLError(self.refused[name])
        return OF_EACH[name](*arguments) if name in OF_EACH else self.answers.get(name)


def inspect_with(
    monkeypatch: pytest.MonkeyPatch, refused: dict[str, int] | None = None, **answers: Any
) -> Machine:
    monkeypatch.setitem(sys.modules, "pynvml", Driver(refused or {}, answers))
    return inspect_machine()


@pytest.fixture(autouse=True)
def all_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_memory_node_that_the_container_hides_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = inspect_with(monkeypatch, nvmlDeviceGetNumaNodeId=4095)
    assert [gpu.memory_node for gpu in machine.gpus] == [None, None]
    assert render(machine)


def test_everything_that_nvml_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = inspect_with(monkeypatch)
    assert machine.software.nvidia_driver == "580.95.05"
    gpu = machine.gpus[1]
    assert (gpu.index, gpu.name, gpu.pci_bus_id) == (1, "NVIDIA GH200 480GB", "0000:3b:00.0")
    assert (gpu.uuid, gpu.compute_mode) == ("GPU-1a0b1c2d", "Exclusive_Process")
    assert (gpu.memory_total_bytes, gpu.memory_used_bytes) == (96 * GIB, GIB)
    assert (gpu.c2c, gpu.mig, gpu.memory_node) == (True, False, None)
    if len(machine.cpu_nodes) == 1:
        assert gpu.numa_node == machine.cpu_nodes[0].id
        assert gpu.cpus == machine.cpu_nodes[0].cpus


@pytest.mark.parametrize(
    ("function", "field"),
    [
        ("nvmlDeviceGetMemoryInfo", "memory_total_bytes"),
        ("nvmlDeviceGetC2cModeInfoV1", "c2c"),
        ("nvmlDeviceGetMigMode", "mig"),
        ("nvmlDeviceGetNumaNodeId", "memory_node"),
    ],
)
def test_refused_call_is_unknown(
    monkeypatch: pytest.MonkeyPatch, function: str, field: str
) -> None:
    machine = inspect_with(monkeypatch, {function: pynvml.NVML_ERROR_NOT_SUPPORTED})
    assert [getattr(gpu, field) for gpu in machine.gpus] == [None, None]
    assert machine.nvml_errors == ()


@pytest.mark.parametrize(
    ("function", "code", "gpus", "said"),
    [
        ("nvmlDeviceGetComputeMode", pynvml.NVML_ERROR_UNKNOWN, 2, ["NVML nvmlDeviceGetComp"]),
        (
            "nvmlDeviceGetHandleByIndex",
            pynvml.NVML_ERROR_GPU_IS_LOST,
            0,
            ["NVML nvmlDeviceGetHand", "GPU 0 does not respond", "GPU 1 does not respond"],
        ),
        ("nvmlInit", pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, 0, ["NVML does not start: "]),
    ],
)
def test_unexpected_errors_are_noted_once(
    monkeypatch: pytest.MonkeyPatch, function: str, code: int, gpus: int, said: list[str]
) -> None:
    machine = inspect_with(monkeypatch, {function: code})
    assert len(machine.gpus) == gpus
    for error, begin in zip(sorted(machine.nvml_errors), sorted(said), strict=True):
        assert error.startswith(begin)


@pytest.mark.parametrize(
    ("variable", "shown"), [("", []), ("-1", []), ("GPU-1a0b", [1]), ("1,7,0", [1])]
)
def test_visible_devices_keep_indices(
    monkeypatch: pytest.MonkeyPatch, variable: str, shown: list[int]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    machine = inspect_with(monkeypatch)
    assert [gpu.index for gpu in machine.gpus] == shown
    assert sorted([*machine.hidden_gpus, *shown]) == [0, 1]
