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


class Driver:
    """pynvml with two GPUs; functions named in ``refused`` raise the given error code."""

    def __init__(self, refused: dict[str, int], memory_node: int) -> None:
        self.refused, self.memory_node = refused, memory_node

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            return getattr(pynvml, name)
        if name in self.refused:
            code = self.refused[name]

            def refuse(*_: Any) -> Any:
                raise pynvml.NVMLError(code)

            return refuse
        answers: dict[str, Any] = {
            "nvmlDeviceGetCount": 2,
            "nvmlDeviceGetName": "GH200 480GB",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=96 * GIB, used=GIB),
            "nvmlDeviceGetNumaNodeId": self.memory_node,
            "nvmlDeviceGetComputeMode": 3,
            "nvmlDeviceGetC2cModeInfoV1": SimpleNamespace(isC2cEnabled=1),
            "nvmlDeviceGetMigMode": [0, 0],
            "nvmlSystemGetDriverVersion": "580.95.05",
        }
        by_index = {
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetPciInfo": lambda index: SimpleNamespace(
                busId=f"00000000:{0x3A + index:02X}:00.0".encode()
            ),
            "nvmlDeviceGetUUID": lambda index: f"GPU-{index}a0b1c2d",
        }
        return by_index.get(name, lambda *_: answers.get(name))


def inspect_with(
    monkeypatch: pytest.MonkeyPatch, refused: dict[str, int] | None = None, memory_node: int = -1
) -> Machine:
    monkeypatch.setitem(sys.modules, "pynvml", Driver(refused or {}, memory_node))
    return inspect_machine()


def test_a_memory_node_that_the_container_hides_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = inspect_with(monkeypatch, memory_node=4095)
    assert [gpu.memory_node for gpu in machine.gpus] == [None, None]
    assert render(machine)


@pytest.fixture(autouse=True)
def all_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


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
        ("nvmlDeviceGetComputeMode", "compute_mode"),
        ("nvmlDeviceGetC2cModeInfoV1", "c2c"),
        ("nvmlDeviceGetMigMode", "mig"),
        ("nvmlDeviceGetUUID", "uuid"),
        ("nvmlDeviceGetNumaNodeId", "memory_node"),
    ],
)
def test_refused_call_is_unknown(
    monkeypatch: pytest.MonkeyPatch, function: str, field: str
) -> None:
    machine = inspect_with(monkeypatch, {function: pynvml.NVML_ERROR_NOT_SUPPORTED})
    assert len(machine.gpus) == 2
    assert getattr(machine.gpus[0], field) is None
    assert machine.nvml_errors == ()


def test_an_unexpected_error_is_noted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = inspect_with(monkeypatch, {"nvmlDeviceGetComputeMode": pynvml.NVML_ERROR_UNKNOWN})
    assert len(machine.gpus) == 2
    assert ["nvmlDeviceGetComputeMode" in error for error in machine.nvml_errors] == [True]


def test_gpu_off_the_bus_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = inspect_with(
        monkeypatch, {"nvmlDeviceGetHandleByIndex": pynvml.NVML_ERROR_GPU_IS_LOST}
    )
    assert machine.gpus == ()
    assert ["GPU 1" in error for error in machine.nvml_errors if error.startswith("GPU")] == [
        False,
        True,
    ]


def test_a_driver_that_does_not_match_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = inspect_with(monkeypatch, {"nvmlInit": pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH})
    assert machine.gpus == ()
    assert [error.startswith("NVML does not start") for error in machine.nvml_errors] == [True]


@pytest.mark.parametrize(
    ("variable", "shown"),
    [
        ("0,1", [0, 1]),
        ("1", [1]),
        ("", []),
        ("-1", []),
        ("GPU-1a0b", [1]),
        ("1,7,0", [1]),
        ("NoDevFiles", []),
    ],
)
def test_visible_devices_keep_indices(
    monkeypatch: pytest.MonkeyPatch, variable: str, shown: list[int]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    machine = inspect_with(monkeypatch)
    assert [gpu.index for gpu in machine.gpus] == shown
    assert sorted([*machine.hidden_gpus, *shown]) == [0, 1]
