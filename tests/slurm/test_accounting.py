"""What a Slurm that charges accounts and keeps jobs in a database refuses and keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from so_tui.launch.lifecycle import current_state
from so_tui.launch.slurm import client
from so_tui.runs.records import OutcomeCode
from tests.slurm.cluster import ACCOUNT, running_cluster
from tests.slurm.submitting import submission_of, submit, trains, wait_for
from tests.support.problems import rejected
from tests.support.waiting import wait_until


@pytest.mark.system
def test_accounting_refuses_and_remembers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_cluster(accounted=True) as accounted:
        accounted.use(monkeypatch)
        with rejected("slurm-account", field="slurm.account"):
            submit(tmp_path / "refused", slurm__account="other")
        assert list((tmp_path / "refused").glob("*/spec.json")) == []
        run = submit(tmp_path, train__steps="50000", slurm__account=ACCOUNT)
        wait_for(run, trains)
        number = submission_of(run).job_id
        accounted.stop_node("n1")
        state = wait_for(run, lambda state: state.state == "lost")
        assert state.code == OutcomeCode.NODE_FAILED
        assert current_state(run) == state  # recorded

        def in_the_database() -> bool:
            """It is asked when the controller has forgotten a job, and learns of an end later."""
            job = client.accounted(number)
            return job is not None and job.state == "NODE_FAIL"

        wait_until(in_the_database)
        recorded = client.accounted(number)
        assert recorded is not None
        assert recorded.nodes == "n1"
        assert run.attempt_dir(1).samefile(recorded.folder)
        accounted.start_node("n1")
