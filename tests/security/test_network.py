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
from pathlib import Path

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
from tests.support.sockets import OpenSocket, open_sockets, tree

NO_PICKLES = """
import importlib.abc, importlib.machinery, os, sys

NAME = "torch.distributed.distributed_c10d"

class Refusing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != NAME:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def replaced(module):
            execute(module)
            def refuse(*_arguments, **_keywords):
                raise RuntimeError("a pickled object was exchanged")
            for function in ("_object_to_tensor", "_tensor_to_object"):
                getattr(module, function)
                setattr(module, function, refuse)
            if "RANK" in os.environ:
                print("pickled objects are refused here", flush=True)

        spec.loader.exec_module = replaced
        return spec

sys.meta_path.insert(0, Refusing())
"""
"""Replaces the functions through which all of torch's object collectives go."""


def test_listening_sockets_are_found_with_their_addresses() -> None:
    with socket.socket() as everywhere, socket.socket(socket.AF_INET6) as loopback:
        everywhere.bind(("", 0))
        everywhere.listen()
        loopback.bind(("::1", 0))
        loopback.listen()
        found = {(entry.port, entry.reachable) for entry in open_sockets([os.getpid()])}
        assert (everywhere.getsockname()[1], True) in found
        assert (loopback.getsockname()[1], False) in found


@dataclass(frozen=True)
class Watched:
    """What was seen of a run under its supervisor: two ranks with Adam workers."""

    last: RunState
    sockets: dict[str, set[OpenSocket]]
    """By the state of the run."""
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
    sockets: defaultdict[str, set[OpenSocket]] = defaultdict(set)
    commands: set[bytes] = set()
    deadline = time.monotonic() + 300
    while (state := read_state(run)).state not in FINAL_STATES and time.monotonic() < deadline:
        assert state.supervisor is not None
        pids = tree(state.supervisor.pid)
        sockets[state.state].update(open_sockets(pids))
        for pid in pids:
            with suppress(OSError):
                commands.add(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" "))
        time.sleep(0.1)
    log = run.log_path(1, state.host).read_text(errors="replace")
    while state.supervisor is not None and alive(state.supervisor) and time.monotonic() < deadline:
        time.sleep(0.1)  # it removes the rendezvous last
    assert not _rendezvous_path(lock_folder(), run.path, 1).exists(), "it vanishes with the run"
    return Watched(state, sockets, b"\n".join(commands).decode(errors="replace"), log)


@pytest.mark.slow
def test_no_process_of_a_run_listens_on_a_network(watched: Watched) -> None:
    assert watched.last.state == "finished", watched.log[-3000:]
    for part in (
        *("supervise", "deepspeed.launcher.runner", "deepspeed.launcher.launch"),
        *("so_tui_trainer", "superoffload/worker.py"),
    ):
        assert part in watched.commands
    assert watched.sockets["training"], "gloo listens on the loopback interface"
    assert not [entry for found in watched.sockets.values() for entry in found if entry.reachable]


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
