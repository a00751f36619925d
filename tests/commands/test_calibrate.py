"""Measuring a machine, for real on this one's cores; the GPU's part runs the same code on small
sizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from so_tui.cli import main
from so_tui.launch.helper import stream_tool
from so_tui.launch.helper_jobs import _request_of
from so_tui.machine import inspect_machine
from so_tui.spec import SoTuiError
from so_tui_trainer.model.attention import Kernels
from so_tui_trainer.tools import calibrate
from so_tui_trainer.tools.calibrate import _rank_counts
from so_tui_trainer.tools.gpu_rates import _attention_rates
from tests.support.attention import plain_backward, plain_forward
from tests.support.machines import x86
from tests.support.schemas import valid


@pytest.mark.slow
def test_this_machine_is_measured_and_remembered(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--json"]) == 0
    answer = valid("calibrate", capsys.readouterr().out)
    rates = answer["calibration"]["rates"]
    assert Path(answer["path"]).is_file()
    cores = [point[0] for point in rates["adam"]]
    assert (cores, rates["seconds"] < 60) == (sorted(cores), True)
    assert all(1e8 < rate < 1e13 for _, rate in rates["adam"])
    assert rates["node_bytes_per_s"]


def test_bandwidth_is_the_best_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host whose cores others use too all of them may move less than half of them, which no
    test can bring about.
    """

    def adam(cpus: list[int], _scale: float) -> dict[str, float]:
        return {"step_bytes_per_s": 150e9 - 1e9 * len(cpus), "accumulate_bytes_per_s": 1e9}

    monkeypatch.setattr(calibrate, "_adam", adam)
    nodes = [{"id": node, "cpus": list(range(64 * node, 64 * node + 64))} for node in (0, 1)]
    *_, last = calibrate._work({"nodes": nodes, "gpus": []})
    assert last["rates"]["node_bytes_per_s"] == [(0, 149e9), (1, 118e9)]


def pretended(*rank_cpus: list[int]) -> dict[str, Any]:
    """Return a small measurement with GPUs whose ranks run on these cores."""
    gpus = [{"index": index, "cpus": [], "rank_cpus": cpus} for index, cpus in enumerate(rank_cpus)]
    nodes = _request_of(inspect_machine())["nodes"][:1]
    return {"nodes": nodes, "gpus": [], "scale": 0.01, "pretend_gpus": gpus}


@pytest.mark.slow
def test_the_gpus_part_measures_every_rate_and_the_links_between() -> None:
    request = pretended([], [])
    *_, last = stream_tool("calibrate", request)
    rates = last["rates"]
    names = "matrix_flops,hbm_bytes_per_s,down_bytes_per_s,up_bytes_per_s,peer_bytes_per_s"
    assert all(rates[name] > 1e6 for name in names.split(","))
    assert len(rates["both_ways_bytes_per_s"]) == 2
    assert 1e-6 < rates["small_layer_s"] < 1
    ((ranks, together_s),) = rates["small_layer_together"]
    assert (ranks, 1e-6 < together_s < 1) == (2, True)
    if len(request["nodes"][0]["cpus"]) > 1:  # two ranks share the node
        ((ranks, each),) = rates["adam_together"]
        assert (ranks, 1e8 < each < 1e13) == (2, True)


@pytest.mark.slow
def test_a_rank_that_fails_is_not_waited_for_by_the_others() -> None:
    """One of two ranks is to run on a core that does not exist; the other would wait for it until a
    minute was over.
    """
    started = time.monotonic()
    with pytest.raises(SoTuiError, match="a measurement failed: OSError"):
        list(stream_tool("calibrate", pretended([], [99_999])))
    assert time.monotonic() - started < 58


def test_ranks_of_the_first_node_are_measured_at_once() -> None:
    nodes = [{"id": 0, "cpus": list(range(16))}, {"id": 1, "cpus": list(range(16, 32))}]
    gpus = [{"index": index, "cpus": nodes[index // 3]["cpus"]} for index in range(6)]
    assert _rank_counts(nodes, gpus) == (2, 3)
    assert _rank_counts(nodes, gpus[3:]) == ()
    assert _rank_counts([{"id": 0, "cpus": [0]}], gpus[:2]) == ()
    assert _rank_counts([], gpus) == ()


def test_ranks_are_measured_on_their_cores() -> None:
    """Two GPUs at eight cores whose second threads have numbers of their own: no two ranks share a
    physical core, and the first cores that Adam is measured on have both threads.
    """
    siblings = tuple((core, core + 8) for core in range(8))
    machine = replace(x86("NVIDIA H200", gpu_count=2, cores=16), smt_siblings=siblings)
    request = _request_of(machine)
    assert request["nodes"][0]["cpus"] == [thread for core in siblings for thread in core]
    first, second = (set(gpu["rank_cpus"]) for gpu in request["gpus"])
    assert (first, second) == ({0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15})
    nowhere = replace(machine, allowed_cpus=())
    assert [gpu["rank_cpus"] for gpu in _request_of(nowhere)["gpus"]] == [[], []]


def test_attention_is_measured_within_documents() -> None:
    """The kernels are plain ones, since those of the backends need a GPU."""
    calls = []

    def seconds(run: Callable[[], object]) -> float:
        run()
        calls.append(run)
        return 0.5

    ((_, found),) = _attention_rates(
        {"torch-flash": Kernels(plain_forward, plain_backward)}, torch.device("cpu"), seconds, 0.001
    )
    assert len(calls) == 2 * len(found)
    longest, forward, backward = found[-1]
    assert (longest, forward) == (65, 4.0 * 32 * 128 * 65 * 65 / 2 / 0.5)
    assert backward == 2.5 * forward


@pytest.mark.slow
def test_adam_is_measured_with_its_states_on_every_other_node() -> None:
    """A second node is pretended, whose memory is the first one's; a third one has none."""
    (node, *_) = _request_of(inspect_machine())["nodes"]
    others = [{"id": node["id"], "cpus": node["cpus"]}, {"id": 1000, "cpus": node["cpus"]}]
    *told, last = stream_tool("calibrate", {"nodes": [node, *others], "gpus": [], "scale": 0.01})
    ((memory, rate),) = last["rates"]["adam_remote"]
    assert memory == node["id"]
    assert 1e8 < rate < 1e13
    assert any("on node 1000: cannot set" in answer["message"] for answer in told)
