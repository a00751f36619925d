"""A Slurm that charges accounts and keeps jobs in a database: what it refuses, and what it
keeps.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from so_tui.launch.lifecycle import current_state
from so_tui.launch.slurm import client
from so_tui.launch.slurm.client import Job
from so_tui.launch.slurm.executor import read_submission
from so_tui.runs.records import OutcomeCode
from so_tui.spec import InputError
from tests.slurm.accounting import ACCOUNT, missing
from tests.slurm.cluster import Cluster, running_cluster
from tests.slurm.cluster import missing as missing_slurm
from tests.slurm.submitting import submit, wait_for
from tests.support.commands import forget_cluster

pytestmark = pytest.mark.system


@pytest.fixture
def accounted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster with slurmdbd on MariaDB."""
    if absent := (*missing_slurm(), *missing()):
        pytest.skip(f"Slurm with accounting cannot be run here without {', '.join(absent)}")
    folder = tempfile.TemporaryDirectory(prefix="slurm.", dir="/tmp")
    with folder as path, running_cluster(Path(path), accounted=True) as cluster:
        for name in ("SLURM_CONF", "PATH"):
            monkeypatch.setenv(name, cluster.environ[name])
        forget_cluster(monkeypatch)
        yield cluster


def test_accounting_refuses_and_remembers(accounted: Cluster, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        submit(tmp_path / "refused", slurm__account="other")
    assert [(problem.code, problem.field, problem.value) for problem in caught.value.problems] == [
        ("slurm-account", "slurm.account", "other")
    ]
    assert list((tmp_path / "refused").glob("*/spec.json")) == []
    run = submit(tmp_path, train__steps="50000", slurm__account=ACCOUNT)
    wait_for(run, lambda state: state.state == "training")
    submission = read_submission(run, 1)
    assert submission is not None
    accounted.stop_node("n1")
    state = wait_for(run, lambda state: state.state == "lost")
    assert state.code == OutcomeCode.NODE_FAILED
    assert current_state(run) == state  # recorded
    recorded = _ended(submission.job_id)
    assert (recorded.state, recorded.nodes) == ("NODE_FAIL", "n1")
    assert run.attempt_dir(1).samefile(recorded.folder)
    accounted.start_node("n1")


def _ended(job_id: str) -> Job:
    """Return what the database says of a job, which is asked when the controller has forgotten it.
    It learns of its end a little later.
    """
    end = time.monotonic() + 60
    while (found := client.accounted(job_id)) is None or found.state == "RUNNING":
        assert time.monotonic() < end, found
        time.sleep(0.2)
    return found
