"""Measuring a machine, for real on this one's cores; the GPU's part runs the same code on small
sizes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import Popen

import pytest
import torch
from msgspec.structs import replace

from so_tui.cli import main
from so_tui.launch.helper_jobs import _request_of
from so_tui.machine import inspect_machine
from so_tui.spec import SoTuiError
from so_tui.trust.decoding import Tree
from so_tui_trainer.model.attention import Kernels
from so_tui_trainer.tools import calibrate, copies
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

    def adam(cpus: list[int]) -> dict[str, float]:
        return {"step_bytes_per_s": 150e9 - 1e9 * len(cpus), "accumulate_bytes_per_s": 1e9}

    monkeypatch.setattr(calibrate, "_adam", adam)
    nodes = [{"id": node, "cpus": list(range(64 * node, 64 * node + 64))} for node in (0, 1)]
    *_, last = calibrate._work({"nodes": nodes, "gpus": []})
    assert last["rates"]["node_bytes_per_s"] == [(0, 149e9), (1, 118e9)]


SMALL = """
import json, sys
from so_tui_trainer.tools import gpu_rates
gpu_rates.TOKENS, gpu_rates.SHAPES, gpu_rates.PACKS = 64, ((32, 64),), {16: 2}
gpu_rates.COPY_BYTES = gpu_rates.ALL_GATHER_BYTES = 2**20
gpu_rates.ROUNDS = 8
gpu_rates.main(json.loads(sys.argv[1]), "cpu")
"""


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Tree:
    """Let small measurements on the CPU stand for those of GPUs. Return a request without GPUs."""

    start = calibrate._start

    def small(argv: Sequence[str], environment: dict[str, str], *inherited: int) -> Popen[str]:
        if "gpu_rates.py" in str(argv[2]):
            assert Path(argv[2]).is_file()
            argv = [sys.executable, "-c", SMALL, argv[3]]
        return start(argv, environment, *inherited)

    monkeypatch.setattr(calibrate, "_start", small)
    monkeypatch.setattr(calibrate, "_ADAM_PARAMETERS", 640_000)
    for tool in (calibrate, copies):
        monkeypatch.setattr(tool, "_SECONDS", 0.004)
    return {"nodes": _request_of(inspect_machine())["nodes"][:1]}


def with_ranks(*rank_cpus: list[int]) -> list[Tree]:
    return [{"index": index, "cpus": [], "rank_cpus": cpus} for index, cpus in enumerate(rank_cpus)]


@pytest.mark.slow
def test_the_gpus_part_measures_every_rate_and_the_links_between(pretended: Tree) -> None:
    *_, last = calibrate._work(pretended | {"gpus": with_ranks([], [])})
    rates = last["rates"]
    names = "matrix_flops,hbm_bytes_per_s,down_bytes_per_s,up_bytes_per_s,peer_bytes_per_s"
    assert all(rates[name] > 1e6 for name in names.split(","))
    assert 1e-6 < rates["small_layer_s"] < 1
    ((ranks, together_s),) = rates["small_layer_together"]
    assert (ranks, 1e-6 < together_s < 1) == (2, True)
    if len(pretended["nodes"][0]["cpus"]) > 1:  # two ranks share the node
        ((ranks, each),) = rates["adam_together"]
        assert (ranks, 1e8 < each < 1e13) == (2, True)


@pytest.mark.slow
def test_a_rank_that_fails_is_not_waited_for_by_the_others(pretended: Tree) -> None:
    """One of two ranks is to run on a core that does not exist; the other would wait for it until a
    minute was over.
    """
    started = time.monotonic()
    with pytest.raises(SoTuiError, match="a measurement failed: OSError"):
        list(calibrate._work(pretended | {"gpus": with_ranks([], [99_999])}))
    assert time.monotonic() - started < 58


@pytest.mark.slow
def test_copies_are_measured_between_every_gpu_and_node(pretended: Tree) -> None:
    node = pretended["nodes"][0]["id"]
    gpus = [{"index": 0, "node": node}, {"index": 1, "node": None}]
    *told, last = copies._work(pretended | {"gpus": gpus})
    found = [(one["gpu"], one["all_at_once"]) for one in last["copies"]]
    assert found == [(0, False), (1, False), (0, True), (1, True)]
    rates = [rate for one in last["copies"] for name, rate in one.items() if "2" in name]
    assert len(rates) == 16
    assert min(rates) > 1e6
    assert len(told) == 3


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


def test_attention_is_measured_within_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are plain ones, since those of the backends need a GPU."""
    calls = []

    def seconds(run: Callable[[], object]) -> float:
        run()
        calls.append(run)
        return 0.5

    monkeypatch.setattr("so_tui_trainer.tools.gpu_rates.PACKS", {16: 4, 65: 1})
    ((_, found),) = _attention_rates(
        {"torch-flash": Kernels(plain_forward, plain_backward)}, torch.device("cpu"), seconds
    )
    assert len(calls) == 2 * len(found)
    longest, forward, backward = found[-1]
    assert (longest, forward) == (65, 4.0 * 32 * 128 * 65 * 65 / 2 / 0.5)
    assert backward == 2.5 * forward
