"""One Slurm for the tests of this folder; no job and no process is left after a test."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import NODES, Cluster, missing, running_cluster
from tests.support.commands import forget_cluster
from tests.support.waiting import wait_until

QUICKLY = Path(__file__).with_name("quickly.toml")


@pytest.fixture(scope="session")
def _slurm() -> Iterator[Cluster]:
    """Start Slurm once; skip where it cannot run."""
    if absent := missing():
        pytest.skip(f"Slurm cannot be run here without {', '.join(absent)}")
    with (
        tempfile.TemporaryDirectory(prefix="slurm.", dir="/tmp") as folder,
        running_cluster(Path(folder)) as cluster,
    ):
        yield cluster


@pytest.fixture
def cluster(_slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two idle nodes, which the test's own commands find too. Whatever the test leaves in the queue
    fails it and is removed.
    """
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, _slurm.environ[name])
    forget_cluster(monkeypatch)
    yield _slurm
    left = _slurm.left()
    _slurm.clear()
    for node in NODES:
        _slurm.start_node(node)
    _slurm.wait_ready()
    assert left == ("", ()), "the test left jobs or processes"


@pytest.fixture(autouse=True)
def _polled_quickly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use a profile whose scheduler may be asked every second, and a queue file of the test's
    own.
    """
    sites = Path(os.environ["XDG_CONFIG_HOME"]) / "so-tui" / "sites"
    sites.mkdir(parents=True)
    (sites / "generic.toml").write_text(QUICKLY.read_text())
    monkeypatch.setattr("so_tui.launch.slurm.client.cache_home", lambda: tmp_path / "cache")


@pytest.fixture
def busy(cluster: Cluster) -> Iterator[Cluster]:
    """Fill both nodes with another job."""
    job = cluster.run(
        "sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 300"
    ).strip()
    wait_until(lambda: "RUNNING" in cluster.jobs())
    yield cluster
    cluster.run("scancel", job)
