"""What a run listens on: other hosts must reach nothing of it, and other users of this host as little as possible."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from so_tui.launch import prepare, start
from so_tui.launch.locks import lock_folder
from so_tui.machine import inspect_machine
from so_tui.runs import RunDirectory, alive, read_state
from so_tui.runs.records import FINAL_STATES
from tests.support.launching import tiny
from tests.support.shared_run import SUPEROFFLOAD
from tests.support.sockets import Listening, listening

WATCH_EVERY_S = 0.2


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_listening_socket_is_found_with_its_address(family: socket.AddressFamily, address: str) -> None:
    with socket.socket(family) as open_to_others:
        open_to_others.bind((address, 0))
        open_to_others.listen()
        port = open_to_others.getsockname()[1]
        (found,) = [one for one in listening(os.getpid()) if one.port == port]
    assert (str(found.address), found.on_loopback) == (address, address != "0.0.0.0")


@contextlib.contextmanager
def _run_of_two_ranks(folder: Path) -> Iterator[RunDirectory]:
    spec = tiny(**SUPEROFFLOAD, train__steps="6", checkpoint__every_steps="3")
    run = start(prepare(spec, inspect_machine(), force=True), runs_dir=folder)
    try:
        yield run
    finally:
        state = read_state(run)
        for process in (*((state.supervisor,) if state.supervisor else ()), *state.processes):
            if alive(process):
                os.kill(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_no_process_of_a_run_listens_beyond_this_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    found: dict[str, set[Listening]] = {}
    before = set(lock_folder().iterdir())
    with _run_of_two_ranks(tmp_path) as run:
        deadline = time.monotonic() + 300
        while (state := read_state(run)).state not in FINAL_STATES and time.monotonic() < deadline:
            assert state.supervisor is not None
            found.setdefault(state.state, set()).update(listening(state.supervisor.pid))
            time.sleep(WATCH_EVERY_S)
    assert state.state == "finished", run.log_path(1, state.host).read_text(errors="replace")[-3000:]
    assert {"loading", "training"} <= found.keys()
    assert found["training"], "gloo's sockets are there, so the test sees what it should"
    assert {one for sockets in found.values() for one in sockets if not one.on_loopback} == set()
    left = {path.name for path in set(lock_folder().iterdir()) - before}
    assert not [name for name in left if "rendezvous" in name]
