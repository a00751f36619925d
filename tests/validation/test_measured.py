"""The planner is held to every report of ``so-tui validate`` in ``benchmarks/results``: planned
again, with the rates measured there.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from so_tui.launch.probe import Measured, _predicted_for, probe_spec
from so_tui.machine.types import Gpu, Machine, NumaNode
from so_tui.plan.measured import store
from so_tui.plan.planner import make_plan
from so_tui.trust.decoding import read_json
from so_tui.validation.report import MachineFound, RatesFound, Report, trained
from so_tui.validation.validate import _parts_of, _shape_for, _shape_name, _spec_of
from tests.support.machines import x86

RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("validate-*.json"))
STEP, GPU_MEMORY, HOST_MEMORY = 0.15, 0.1, 0.15
"""Relative errors that a plan may have."""
KNOWN = {
    ("validate-h100-x2-second", "ours-2", "step_s"): 0.35,
    ("validate-h200", "published", "step_s"): 0.26,
    ("validate-h200", "published-unclipped", "step_s"): 0.29,
}
"""Figures that plans are known to miss by more, and by how much. With a micro-batch of 2 x 4096 on
two GPUs, 0.82 s were planned and 1.18 s measured: backward took 0.84 s where two workers' Adam and
its copies should have left it at 0.48 s.

DeepSpeed's SuperOffload took 2 s longer after backward, with and without clipping, than on the host
from which its plan was made: 7.13 and 4.7 s a step there, 8.22 and 6.63 s here.
"""


def machine_of(found: MachineFound) -> Machine:
    """Return the machine of a report, as far as plans need it: its threads as cores, numbered by
    node.
    """
    nodes: list[NumaNode] = []
    for node in found.nodes:
        first = sum(len(other.cpus) for other in nodes)
        cpus = tuple(range(first, first + node.cores))
        nodes.append(
            NumaNode(id=node.id, kind="cpu", cpus=cpus, memory_total_bytes=node.memory_bytes)
        )
    near = {node.id: node.cpus for node in nodes}
    gpus = [
        Gpu(
            index=gpu.index,
            name=gpu.name,
            pci_bus_id=f"0000:{gpu.index:02x}:00.0",
            numa_node=gpu.numa_node,
            cpus=near.get(-1 if gpu.numa_node is None else gpu.numa_node, ()),
            memory_total_bytes=gpu.memory_total_bytes,
            c2c=gpu.c2c,
        )
        for gpu in found.gpus
    ]
    every = tuple(cpu for node in nodes for cpu in node.cpus)
    return replace(
        x86(),
        hostname="reported",
        cpu_name=found.cpu,
        architecture=found.architecture,
        page_size_bytes=found.page_size_bytes,
        online_cpus=every,
        allowed_cpus=every,
        host_memory_bytes=sum(node.memory_bytes for node in found.nodes),
        shm_total_bytes=None,
        software=found.software,
        numa_nodes=tuple(nodes),
        gpus=tuple(gpus),
    )


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_what_was_measured_is_planned(path: Path) -> None:
    report = read_json(path, Report)
    results = [outcome.result for outcome in report.outcomes]
    (described,) = (result for result in results if isinstance(result, MachineFound))
    (rates,) = (result for result in results if isinstance(result, RatesFound))
    machine = machine_of(described)
    store(machine, rates=rates.rates)
    shape = _shape_for(machine)
    assert _shape_name(shape) == report.shape
    parts = {part.key: part for part in _parts_of(machine, report.gpus)}
    wrong = []
    for outcome, found in trained(report.outcomes):
        # Plans are for bound ranks. A model so small that its speed says nothing is not predicted
        # by it.
        if found.placed != "bound" or found.losses_only or found.workload is None:
            continue
        spec = probe_spec(_spec_of(shape, parts[outcome.key]), "random")
        plan = make_plan(spec, machine, workload=found.workload, probed=False)
        measured = Measured(
            figures=found.measured,
            workload=found.workload,
            steps=found.steps,
            held_back_steps=found.held_back_steps or 0,
        )
        planned = _predicted_for(measured, plan, machine)
        figures = {"step_s": STEP, "gpu_reserved_bytes": GPU_MEMORY, "host_bytes": HOST_MEMORY}
        ours = found.settings.get("offload.engine") == "so-tui"
        if ours and found.clipping and found.held_back_steps is None:
            # An older report: how many of its steps waited for the norm is not known.
            del figures["step_s"]
        for figure, usual in figures.items():
            expected, actual = getattr(planned, figure), getattr(found.measured, figure)
            most = KNOWN.get((path.stem, outcome.key, figure), usual)
            if expected and actual and abs(expected / actual - 1) > most:
                wrong.append((outcome.key, figure, expected, actual))
    assert not wrong
