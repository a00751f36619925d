"""One Slurm for the tests of this folder; no job and no process is left after a test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import NODES, Cluster, running_cluster
from tests.support.waiting import wait_until

SITE = 'title = "two simulated nodes"\npoll_s = 1\nwarning_s = 30\ninterface = "lo"\n'
"""A profile whose scheduler may be asked every second."""


@pytest.fixture(scope="session")
def _slurm() -> Iterator[Cluster]:
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(_slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two idle nodes. Whatever the test leaves in the queue fails it and is removed."""
    _slurm.use(monkeypatch)
    yield _slurm
    left = _slurm.left()
    _slurm.clear()
    for node in NODES:
        _slurm.start_node(node)
    _slurm.wait_ready()
    assert left == ("", ()), "the test left jobs or processes"


@pytest.fixture(autouse=True)
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Use the profile in this file, and a queue file of the test's own."""
    path = Path(os.environ["XDG_CONFIG_HOME"]) / "so-tui" / "sites" / "generic.toml"
    path.parent.mkdir(parents=True)
    path.write_text(SITE)
    monkeypatch.setattr("so_tui.launch.slurm.client.cache_home", lambda: tmp_path / "cache")
    return path


@pytest.fixture
def busy(cluster: Cluster) -> Iterator[Cluster]:
    """Fill both nodes with another job."""
    batch = ("--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 300")
    job = cluster.run("sbatch", *batch).strip()
    wait_until(lambda: "RUNNING" in cluster.jobs())
    yield cluster
    cluster.run("scancel", job)
