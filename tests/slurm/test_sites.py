"""Every site profile: read, made into a script, and accepted by a real Slurm that has the site's
partitions under another name.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from so_tui.launch.slurm.script import _builtin_sites, batch_script, load_site
from tests.slurm.cluster import Cluster
from tests.support.launching import tiny
from tests.support.plans import plan_of

pytestmark = pytest.mark.system

SITES = sorted(path.stem for path in _builtin_sites().glob("*.toml"))


@pytest.mark.parametrize("nodes", ["1", "2"])
@pytest.mark.parametrize("name", SITES)
def test_slurm_accepts_profiles(name: str, nodes: str, cluster: Cluster, tmp_path: Path) -> None:
    partition = "strict" if load_site(name).refused_options else "main"
    spec = tiny(slurm__partition=partition, slurm__account="project", nodes=nodes)
    script = tmp_path / "job.sh"
    plan = plan_of(spec, cpus=((0,),), gpus=True)
    script.write_text(batch_script(plan, load_site(name), tmp_path, 1))
    # A core for a core: the simulated nodes have two.
    script.write_text(script.read_text().replace("--cpus-per-task=72", "--cpus-per-task=2"))
    tested = subprocess.run(
        ["sbatch", "--test-only", str(script)],
        env=cluster.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert tested.returncode == 0, tested.stderr
