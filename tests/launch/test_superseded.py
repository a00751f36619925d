"""A supervisor that was cut off for so long that another attempt began ends its own processes and
writes nothing more.
"""

from __future__ import annotations

import time

import pytest
from msgspec.structs import replace

from so_tui.runs import alive, read_state, write_state
from tests.support.fake_runs import Runs


@pytest.mark.slow
@pytest.mark.parametrize("newer", [True, False], ids=["newer attempt", "other supervisor"])
def test_superseded_supervisor_leaves(newer: bool, runs: Runs) -> None:
    run, state = runs.training()
    assert state.supervisor is not None
    other = replace(state.supervisor, pid=1 << 21)
    found = replace(
        state,
        attempt=state.attempt + newer,
        supervisor=other,
        host="elsewhere",
        detail="the other's",
    )
    deadline = time.monotonic() + 30
    while alive(state.supervisor) and time.monotonic() < deadline:
        write_state(run, found)  # again, because its last write may come just after ours
        time.sleep(0.2)
    try:
        assert not alive(state.supervisor)
        assert any(map(alive, state.processes)) != newer
        assert read_state(run) == found
    finally:
        write_state(run, state)  # so that what is left is found and ended
