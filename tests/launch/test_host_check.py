"""A host that differs from the machine that was planned for is refused."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from msgspec.structs import replace

from so_tui.launch.launch import prepare
from so_tui.launch.supervisor.host_check import (
    HostDiffersError,
    refuse_different_host,
    software_differences,
)
from so_tui.machine import Machine, inspect_machine
from so_tui.runs import read_state
from so_tui.runs.records import OutcomeCode
from so_tui.spec import find_preset
from tests.support.plans import quad_gh200
from tests.support.supervising import prepared_run, supervise_to_end

QUAD = quad_gh200()
LAUNCH = prepare(replace(find_preset("tiny").spec, gpus=2), QUAD)


def codes_on(host: Machine) -> set[str]:
    with pytest.raises(HostDiffersError) as caught:
        refuse_different_host(LAUNCH, host)
    return set(caught.value.codes)


def test_the_planned_host_is_accepted() -> None:
    refuse_different_host(LAUNCH, QUAD)
    refuse_different_host(LAUNCH, replace(QUAD, gpus=QUAD.gpus[:2]))


@pytest.mark.parametrize(
    ("host", "code"),
    [
        (replace(QUAD, gpus=QUAD.gpus[:1]), "gpu-missing"),
        (replace(QUAD, gpus=(QUAD.gpus[0], replace(QUAD.gpus[1], uuid="GPU-f"))), "gpu-differs"),
        (replace(QUAD, numa_nodes=QUAD.numa_nodes[:1]), "numa-node-missing"),
        (replace(QUAD, allowed_cpus=tuple(range(100))), "cores-not-allowed"),
    ],
)
def test_other_gpus_nodes_and_cores_are_refused(host: Machine, code: str) -> None:
    assert codes_on(host) == {code}


def test_gpus_are_compared_by_bus_address_if_nvml_failed_once() -> None:
    without = tuple(replace(gpu, uuid=None) for gpu in QUAD.gpus)
    refuse_different_host(LAUNCH, replace(QUAD, gpus=without))
    refuse_different_host(replace(LAUNCH, machine=replace(QUAD, gpus=without)), QUAD)
    moved = replace(without[1], pci_bus_id="ffff:01:00.0")
    assert codes_on(replace(QUAD, gpus=(without[0], moved))) == {"gpu-differs"}


def test_a_numa_node_with_other_cores_or_less_memory() -> None:
    first, *others = QUAD.numa_nodes

    def with_node(**changes: object) -> Machine:
        return replace(QUAD, numa_nodes=(replace(first, **changes), *others))

    assert codes_on(with_node(cpus=first.cpus[1:])) == {"numa-node-differs"}
    assert codes_on(with_node(memory_total_bytes=first.memory_total_bytes // 2)) == {
        "numa-node-differs"
    }
    refuse_different_host(
        LAUNCH, with_node(memory_total_bytes=int(0.95 * first.memory_total_bytes))
    )
    refuse_different_host(LAUNCH, replace(with_node(memory_total_bytes=1), memory_grows=True))
    unused = replace(others[-1], memory_total_bytes=1)
    refuse_different_host(LAUNCH, replace(QUAD, numa_nodes=(first, *others[:-1], unused)))


def test_other_software_is_named_and_not_refused() -> None:
    host = replace(QUAD, software=replace(QUAD.software, torch="1.0"))
    refuse_different_host(LAUNCH, host)
    assert [difference.code for difference in software_differences(QUAD, host)] == [
        "software-differs"
    ]
    assert software_differences(QUAD, QUAD) == ()


def test_missing_numa_nodes_are_named_one_by_one() -> None:
    with pytest.raises(HostDiffersError, match="NUMA nodes 0 and 1, which") as caught:
        refuse_different_host(LAUNCH, replace(QUAD, numa_nodes=()))
    assert caught.value.codes == ("numa-node-missing",)


@pytest.mark.slow
def test_the_supervisor_starts_nothing_on_another_host(tmp_path: Path) -> None:
    here = replace(inspect_machine(), gpus=())
    cores = (max(here.online_cpus) + 1,)
    launch = prepare(replace(find_preset("tiny").spec, gpus=1), here, force=True)
    elsewhere = replace(launch.plan.binding[0], cpus=cores, main_cpus=cores, adam_cpus=cores)
    launch = replace(launch, plan=replace(launch.plan, binding=(elsewhere,)))
    run = prepared_run(launch, tmp_path)
    assert launch.machine.hostname == socket.gethostname()
    code = supervise_to_end(run)
    state = read_state(run)
    assert (code, state.state, state.code) == (1, "failed", OutcomeCode.HOST_DIFFERS)
    assert not run.command_path(1).exists()
