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
    first = ["node 0", "GPU 0", "node 2", "GPU 1", "node 10"]
    assert order == [*first, "node 1", "GPU 2", "node 18", "GPU 3", "node 26"]
    assert any("28 empty nodes" in line for line in lines)


def test_a_gpu_of_no_cpu_node_is_shown_and_marked() -> None:
    machine = GB200.machine()
    first, *others = machine.gpus
    first = msgspec.structs.replace(first, numa_node=first.memory_node)
    lines = shown(render(msgspec.structs.replace(machine, gpus=(first, *others))))
    words = " ".join(lines.replace("│", "").split())
    assert words.count("NVIDIA GB200") == len(machine.gpus)
    assert words.count("NUMA node unknown") == 1


def test_facts_of_a_machine() -> None:
    text = shown(render(QUAD_GH200.machine()))
    for fact in ("NVIDIA Grace", "288 cores", "72 cores 72-143", "476 GiB of host memory"):
        assert fact in text
    for fact in ("NVIDIA GH200", "0039:01:00.0", "95.0 GiB"):
        assert fact in text
    less = msgspec.structs.replace(EIGHT_H100.machine(), allowed_cpus=tuple(range(8)))
    text = shown(render(less))
    assert "may use 0-7" in text
    assert "may use none" in text
    here = inspect_machine()
    assert here.hostname in shown(render(here))


def test_findings() -> None:
    texts = {"evidence": "torch 2.13+cpu", "cost": "No GPU.", "remedy": "`pip install torch`"}
    title = "Torch is built for the CPU only"
    finding = Finding(code="torch-cpu-only", severity="blocks", title=title, **texts)
    text = shown(render_findings([finding], None))
    assert f"✗ blocks a launch  {title}" in text
    assert all(part in text for part in texts.values())
    assert "✓" in shown(render_findings([], None))
