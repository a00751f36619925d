"""What a run writes through the real supervisor: no secret of the environment, and nothing that
others can open.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from so_tui.runs.records import FINAL_STATES
from tests.support.fake_runs import Runs, wait_for
from tests.support.planted_secrets import SECRETS, open_to_others, secrets_in


@pytest.fixture
def _open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.slow
@pytest.mark.usefixtures("_open_umask")
def test_a_run_records_no_secret_and_is_closed_to_others(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_TRAINER", "steps=3")
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    run = runs.start()
    wait_for(run, lambda state: state.state in FINAL_STATES)
    assert run.command_path(1).exists()
    assert secrets_in(run.path) == []
    assert open_to_others(run.path) == []
