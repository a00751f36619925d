"""Plans for several hosts: what is sharded across them, and what the network between them costs."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from so_tui.machine.known import named_machine
from so_tui.machine.types import Machine, Network
from so_tui.plan.notes import AcrossHosts
from so_tui.plan.plan import Plan
from so_tui.plan.planner import make_plan, plan_table, recommend
from so_tui.plan.show import render_table
from tests.support.planning import CATALOG, QUAD, facts_of, only, shown, spec_of

LLAMA_70B = CATALOG.presets["llama-3.3-70b"].spec


def with_network(gbit_per_s: float) -> Machine:
    return replace(QUAD, network=Network(gbit_per_s=gbit_per_s, source="a test"))


def planned(machine: Machine, **changes: str) -> Plan:
    return make_plan(
        spec_of("qwen3-14b", gpus="4", nodes="2", offload__mode="superoffload", **changes), machine
    )


def test_llama_70b_fits_three_quad_nodes_and_not_one() -> None:
    machine = named_machine("gh200-quad-120")
    verdicts = {
        nodes: recommend(replace(LLAMA_70B, nodes=nodes, gpus=4), machine).verdict
        for nodes in (1, 3, 4)
    }
    assert verdicts == {1: "does not fit", 3: "fits", 4: "fits"}


def test_weights_travel_twice_and_gradients_once() -> None:
    plan = planned(QUAD, train__micro_batch="1", train__gradient_accumulation="2")
    fact = only(plan.reasons, AcrossHosts)
    parameters = plan.spec.model.parameter_count
    assert (fact.machines, fact.ranks) == (2, 8)
    assert fact.bytes_per_step == pytest.approx(2 * 3 * 2 * parameters * 7 / 8, rel=1e-3)


def test_slower_network_sets_the_pace() -> None:
    fast, slow = planned(with_network(8000)), planned(with_network(100))
    alone = only(fast.reasons, AcrossHosts)
    held_up = only(slow.reasons, AcrossHosts)
    assert alone.longer_s == 0
    assert held_up.seconds == pytest.approx(held_up.bytes_per_step / (0.9 * 100e9 / 8))
    assert held_up.longer_s is not None
    assert fast.step_s is not None
    assert slow.step_s == pytest.approx(fast.step_s + held_up.longer_s)


def test_only_adapters_of_gpus_that_take_part_carry() -> None:
    four = make_plan(spec_of("llama-3.1-8b", gpus="4", nodes="2"), with_network(100))
    one = make_plan(spec_of("llama-3.1-8b", gpus="1", nodes="8"), with_network(100))
    seconds = [only(plan.reasons, AcrossHosts).seconds for plan in (four, one)]
    assert seconds[1] == pytest.approx(4 * (seconds[0] or 0.0))


def test_an_unknown_network_is_assumed_and_said_to_be() -> None:
    fact = only(planned(QUAD).reasons, AcrossHosts)
    assert (fact.network.gbit_per_s, fact.network.source) == (800, "")
    assert "assumed" in fact.message
    vista = make_plan(spec_of("tiny", gpus="1", nodes="2"), named_machine("gh200-120"))
    assert "NDR" in only(vista.reasons, AcrossHosts).message


def test_one_host_has_no_network_in_its_plan() -> None:
    assert facts_of(make_plan(spec_of("qwen3-14b", gpus="4"), QUAD).reasons, AcrossHosts) == []


def test_the_table_of_several_hosts_says_so() -> None:
    rows = plan_table([CATALOG.presets["llama-3.3-70b"]], named_machine("gh200-quad-120"), nodes=3)
    assert [(row.nodes, sorted(row.cells)) for row in rows] == [(3, [1, 2, 4])]
    assert [plan.gpus for plan in rows[0].cells.values()] == [3, 6, 12]
    text = shown(render_table(rows, named_machine("gh200-quad-120"), 100), 100)
    assert "3 x 4 GPUs" in text
    assert "800 Gb/s" in text
