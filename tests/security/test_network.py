"""Nobody can join the ranks of a run, or reach any of its processes, over a network."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest

from so_tui.launch.launch import prepare
from so_tui.launch.lifecycle import start as start_run
from so_tui.launch.supervisor.host import _rendezvous_path, make_rendezvous
from so_tui.launch.supervisor.host_check import lock_folder
from so_tui.machine import inspect_machine
from so_tui.runs import RunDirectory, alive, read_state
from so_tui.runs.records import FINAL_STATES, RunState
from so_tui.trust.files import Distrust, NotOwnError
from tests.support.launching import tiny
from tests.support.python_path import python_path
from tests.support.shared_run import SUPEROFFLOAD

NO_PICKLES = """
import os, sys

def refuse(*_arguments, **_keywords):
    raise RuntimeError("a pickled object was exchanged")

if "RANK" in os.environ and "so_tui_trainer" in sys.orig_argv:
    from torch.distributed import distributed_c10d
    for function in ("_object_to_tensor", "_tensor_to_object"):
        getattr(distributed_c10d, function)
        setattr(distributed_c10d, function, refuse)
    print("pickled objects are refused here", flush=True)
"""
"""Replaces the functions through which all of torch's object collectives go."""


@dataclass(frozen=True)
class Watched:
    """What was seen of a run under its supervisor: two ranks with Adam workers."""

    last: RunState
    addresses: dict[str, set[tuple[str, int]]]
    """Of TCP sockets that listen and bound UDP sockets, by the state of the run."""
    commands: str
    """The command lines of all processes."""
    log: str


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A run with a site's network named for NCCL and gloo, in which pickles fail."""
    folder = tmp_path_factory.mktemp("watched")
    (folder / "sitecustomize.py").write_text(NO_PICKLES)
    spec = tiny(gpus="2", train__steps="6", checkpoint__every_steps="3", **SUPEROFFLOAD)
    # An interface, loopback where there is no other.
    network = next((name for _, name in socket.if_nameindex() if name != "lo"), "lo")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            patch.setenv(name, network)
        patch.setenv("PYTHONPATH", python_path(folder))
        run = start_run(prepare(spec, inspect_machine(), force=True), runs_dir=folder / "runs")
    try:
        yield _watch(run)
    finally:
        state = read_state(run)
        for process in (*((state.supervisor,) if state.supervisor else ()), *state.processes):
            if alive(process):
                os.kill(process.pid, signal.SIGKILL)


def _watch(run: RunDirectory) -> Watched:
    addresses: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
    commands: set[str] = set()
    deadline = time.monotonic() + 300
    while (state := read_state(run)).state not in FINAL_STATES and time.monotonic() < deadline:
        assert state.supervisor is not None
        processes: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            first = psutil.Process(state.supervisor.pid)
            processes = [first, *first.children(recursive=True)]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                commands.add(" ".join(process.cmdline()))
                for each in process.net_connections("inet"):
                    if each.type == socket.SOCK_DGRAM or each.status == psutil.CONN_LISTEN:
                        addresses[state.state].add(each.laddr)
        time.sleep(0.1)
    log = run.log_path(1, state.host).read_text(errors="replace")
    while state.supervisor is not None and alive(state.supervisor) and time.monotonic() < deadline:
        time.sleep(0.1)  # it removes the rendezvous last
    assert not _rendezvous_path(lock_folder(), run.path, 1).exists(), "it vanishes with the run"
    return Watched(state, addresses, "\n".join(commands), log)


@pytest.mark.slow
def test_no_process_of_a_run_listens_on_a_network(watched: Watched) -> None:
    assert watched.last.state == "finished", watched.log[-3000:]
    for part in (
        *("supervise", "deepspeed.launcher.runner", "deepspeed.launcher.launch"),
        *("so_tui_trainer", "superoffload/worker.py"),
    ):
        assert part in watched.commands
    assert watched.addresses["training"], "gloo listens on the loopback interface"
    for address, _ in set().union(*watched.addresses.values()):
        assert ip_address(address.removeprefix("::ffff:")).is_loopback


@pytest.mark.slow
def test_ranks_exchange_no_pickles(watched: Watched) -> None:
    assert "pickled objects are refused here" in watched.log, "the functions were replaced"
    last = watched.last
    assert (last.state, last.step, last.saved_step) == ("finished", 6, 6), watched.log[-3000:]


def test_a_rendezvous_is_private_and_replaces_earlier_ones(tmp_path: Path) -> None:
    first = make_rendezvous(tmp_path, Path("/runs/one"), 1)
    other = make_rendezvous(tmp_path, Path("/runs/two"), 1)
    (first / "store").write_text("stale")
    second = make_rendezvous(tmp_path, Path("/runs/one"), 2)
    assert second == _rendezvous_path(tmp_path, Path("/runs/one"), 2)
    assert second.stat().st_mode & 0o777 == 0o700
    assert sorted(tmp_path.iterdir()) == sorted([other, second])


def test_a_rendezvous_that_another_user_prepared_is_refused(tmp_path: Path) -> None:
    planted = _rendezvous_path(tmp_path, Path("/runs/one"), 1)
    (tmp_path / "elsewhere").mkdir()
    planted.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotOwnError) as refused:
        make_rendezvous(tmp_path, Path("/runs/one"), 1)
    assert (refused.value.path, refused.value.distrust) == (planted, Distrust.WRONG_KIND)
