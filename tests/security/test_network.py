"""Nobody can join the ranks of a run, or reach any of its processes, over a network."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from so_tui.launch.rendezvous import make_rendezvous, remove_rendezvous, rendezvous_path
from so_tui.runs import create_run
from so_tui.runs.records import EndRecord
from tests.support.launching import records, start, tiny
from tests.support.sockets import OpenSocket, open_sockets, tree


def test_listening_sockets_are_found_with_their_addresses() -> None:
    with socket.socket() as everywhere, socket.socket(socket.AF_INET6) as loopback:
        everywhere.bind(("", 0))
        everywhere.listen()
        loopback.bind(("::1", 0))
        loopback.listen()
        found = {(entry.port, entry.reachable) for entry in open_sockets([os.getpid()])}
        assert (everywhere.getsockname()[1], True) in found
        assert (loopback.getsockname()[1], False) in found


@pytest.mark.slow
def test_no_process_of_a_run_listens_on_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a site's network named for NCCL and gloo, as modules of clusters do."""
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, _network())
    run = create_run(tiny(gpus="2", train__steps="6"), tmp_path / "runs")
    process = start(run, tiny(gpus="2", train__steps="6"))
    seen: set[OpenSocket] = set()
    most = 0
    while process.poll() is None:
        pids = tree(process.pid)
        most = max(most, len(pids))
        seen |= open_sockets(pids)
        time.sleep(0.1)
    end = records(run)[-1]
    assert isinstance(end, EndRecord)
    assert (process.returncode, end.state, end.step) == (0, "finished", 6)
    assert most >= 4, "runner, launcher and both ranks were seen"
    assert seen, "gloo listens on the loopback interface"
    assert [entry for entry in seen if entry.reachable] == []


def test_a_rendezvous_is_private_and_replaces_those_of_earlier_attempts(tmp_path: Path) -> None:
    first = make_rendezvous(tmp_path, Path("/runs/one"), 1)
    other = make_rendezvous(tmp_path, Path("/runs/two"), 1)
    (first / "store").write_text("stale")
    second = make_rendezvous(tmp_path, Path("/runs/one"), 2)
    assert (first.exists(), other.exists(), second.stat().st_mode & 0o777) == (False, True, 0o700)
    assert second == rendezvous_path(tmp_path, Path("/runs/one"), 2)
    remove_rendezvous(second)
    remove_rendezvous(second)
    assert sorted(tmp_path.iterdir()) == [other]


def test_a_rendezvous_that_another_user_prepared_is_refused(tmp_path: Path) -> None:
    planted = rendezvous_path(tmp_path, Path("/runs/one"), 1)
    (tmp_path / "elsewhere").mkdir()
    planted.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        make_rendezvous(tmp_path, Path("/runs/one"), 1)


def _network() -> str:
    """Return the name of an interface other than loopback, or of loopback where there is no other."""
    return next((name for _, name in socket.if_nameindex() if name != "lo"), "lo")
