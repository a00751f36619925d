"""Plans for several hosts: what is sharded across them, and what the network between them costs."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from so_tui.machine.known import named_machine
from so_tui.machine.types import Machine, Network
from so_tui.plan.notes import AcrossHosts
from so_tui.plan.plan import Plan
from so_tui.plan.planner import plan_table
from so_tui.plan.show import render_table
from tests.support import planning
from tests.support.planning import CATALOG, QUAD, facts_of, only, recommended, shown


def with_network(gbit_per_s: float) -> Machine:
    return replace(QUAD, network=Network(gbit_per_s=gbit_per_s, source="a test"))


def planned(machine: Machine, **changes: str) -> Plan:
    given = {"gpus": "4", "nodes": "2", "offload__mode": "superoffload"}
    return planning.planned("qwen3-14b", machine, **given | changes)


def test_llama_70b_fits_three_quad_nodes_and_not_one() -> None:
    machine = named_machine("gh200-quad-120")
    verdicts = [
        recommended("llama-3.3-70b", machine, nodes=nodes, gpus="4").verdict
        for nodes in ("1", "3", "4")
    ]
    assert verdicts == ["does not fit", "fits", "fits"]


def test_weights_travel_twice_and_gradients_once() -> None:
    plan = planned(QUAD, train__micro_batch="1", train__gradient_accumulation="2")
    fact, parameters = only(plan.reasons, AcrossHosts), plan.spec.model.parameter_count
    assert (fact.machines, fact.ranks) == (2, 8)
    assert fact.bytes_per_step == pytest.approx(2 * 3 * 2 * parameters * 7 / 8, rel=1e-3)
    assert not facts_of(planned(QUAD, nodes="1").reasons, AcrossHosts)


def test_slower_network_sets_the_pace() -> None:
    fast, slow = planned(with_network(8000)), planned(with_network(100))
    alone, held_up = (only(plan.reasons, AcrossHosts) for plan in (fast, slow))
    assert alone.longer_s == 0
    assert held_up.seconds == pytest.approx(held_up.bytes_per_step / (0.9 * 100e9 / 8))
    assert slow.step_s == pytest.approx((fast.step_s or 0) + (held_up.longer_s or 0))


def test_only_adapters_of_gpus_that_take_part_carry() -> None:
    four, one = (
        planning.planned("llama-3.1-8b", with_network(100), gpus=gpus, nodes=nodes)
        for gpus, nodes in (("4", "2"), ("1", "8"))
    )
    seconds = [only(plan.reasons, AcrossHosts).seconds or 0.0 for plan in (four, one)]
    assert seconds[1] == pytest.approx(4 * seconds[0])


def test_an_unknown_network_is_assumed_and_said_to_be() -> None:
    fact = only(planned(QUAD).reasons, AcrossHosts)
    assert (fact.network.gbit_per_s, fact.network.source) == (800, "")
    assert "assumed" in fact.message
    vista = planning.planned("tiny", named_machine("gh200-120"), gpus="1", nodes="2")
    assert "NDR" in only(vista.reasons, AcrossHosts).message


def test_the_table_of_several_hosts_says_so() -> None:
    machine = named_machine("gh200-quad-120")
    rows = plan_table([CATALOG.presets["llama-3.3-70b"]], machine, nodes=3)
    found = [(row.nodes, [(count, plan.gpus) for count, plan in row.cells.items()]) for row in rows]
    assert found == [(3, [(1, 3), (2, 6), (4, 12)])]
    text = shown(render_table(rows, machine, 100), 100)
    assert "3 x 4 GPUs" in text
    assert "800 Gb/s" in text
