"""The simulated cluster itself: two hosts, a queue, and a site's rules."""

from __future__ import annotations

import subprocess

import pytest

from tests.slurm.cluster import NODES, Cluster

pytestmark = pytest.mark.system


def test_each_node_is_a_host_of_its_own(cluster: Cluster) -> None:
    assert sorted(cluster.run("srun", "-N2", "-n2", "hostname").split()) == list(NODES)


def test_a_partition_can_refuse_options_as_a_site_does(cluster: Cluster) -> None:
    argv = ["sbatch", "--partition=strict", "--gres=gpu:1", "--wrap=true"]
    refused = subprocess.run(argv, env=cluster.environ, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "not allowed" in refused.stderr
