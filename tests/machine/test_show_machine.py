"""What people read: everything that hangs together stands together, within 80 columns."""

from __future__ import annotations

import msgspec
from rich.console import Console, RenderableType

from so_tui.machine import inspect_machine
from so_tui.machine.doctor import Finding
from so_tui.machine.show import render, render_findings
from tests.support.sysroots import EIGHT_H100, GB200, QUAD_GH200


def shown(renderable: RenderableType) -> str:
    console = Console(width=80, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    text = capture.get()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    return text


def test_gpus_are_below_their_node_with_their_own_memory() -> None:
    lines = [line.strip("│├└─ ") for line in shown(render(GB200.machine())).splitlines()]
    order = [line.split("  ")[0] for line in lines if line.startswith(("node", "GPU"))]
    assert order == [
        "node 0",
        "GPU 0",
        "node 2",
        "GPU 1",
        "node 10",
        "node 1",
        "GPU 2",
        "node 18",
        "GPU 3",
        "node 26",
    ]
    assert any("28 empty nodes" in line for line in lines)


def test_a_gpu_of_no_cpu_node_is_shown_and_marked() -> None:
    machine = GB200.machine()
    memory_node = machine.gpus[0].memory_node
    first = msgspec.structs.replace(machine.gpus[0], numa_node=memory_node)
    lines = shown(render(msgspec.structs.replace(machine, gpus=(first, *machine.gpus[1:]))))
    words = " ".join(lines.replace("│", "").split())
    assert words.count("NVIDIA GB200") == len(machine.gpus)
    assert words.count("NUMA node unknown") == 1


def test_facts_of_a_machine() -> None:
    text = shown(render(QUAD_GH200.machine()))
    for fact in (
        "NVIDIA Grace",
        "288 cores",
        "72 cores 72-143",
        "476 GiB of host memory",
        "NVIDIA GH200",
        "0039:01:00.0",
        "95.0 GiB",
    ):
        assert fact in text


def test_forbidden_cores_are_shown() -> None:
    machine = msgspec.structs.replace(EIGHT_H100.machine(), allowed_cpus=tuple(range(8)))
    text = shown(render(machine))
    assert "may use 0-7" in text
    assert "may use none" in text


def test_this_machine() -> None:
    machine = inspect_machine()
    text = shown(render(machine))
    assert machine.hostname in text
    assert "torch" in text


def test_findings() -> None:
    finding = Finding(
        code="torch-cpu-only",
        severity="blocks",
        title="Torch is built for the CPU only",
        evidence="torch 2.13+cpu",
        cost="No GPU.",
        remedy="`pip install torch`",
    )
    text = shown(render_findings([finding], None))
    assert "✗ blocks a launch  Torch is built for the CPU only" in text
    for part in ("torch 2.13+cpu", "No GPU.", "`pip install torch`"):
        assert part in text
    assert "✓" in shown(render_findings([], None))
