"""The screen beside a real Slurm: a queued run that it did not start, and the partitions it can
name.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from so_tui.launch.lifecycle import current_state
from tests.slurm.cluster import Cluster
from tests.slurm.submitting import submit, wait_for
from tests.support.screen import opened

pytestmark = pytest.mark.system


async def test_a_screen_shows_why_a_run_waits_and_cancels_it(busy: Cluster, tmp_path: Path) -> None:
    run = submit(tmp_path)
    wait_for(run, lambda state: "waits" in state.detail)
    async with opened(tmp_path, open_run=run) as ui:
        await ui.until(lambda: "free nodes" in ui.text())
        await ui.press("s")
        await ui.until(lambda: "Cancel" in ui.text())
        await ui.press("y")
        await ui.until(lambda: current_state(run).state == "stopped")
        await ui.state_shown("stopped")


async def test_a_screen_follows_a_job_on_another_host(cluster: Cluster, tmp_path: Path) -> None:
    run = submit(tmp_path, train__steps="3")
    async with opened(tmp_path, open_run=run) as ui:
        await ui.until(lambda: "step 3 / 3" in ui.text(), 240)
        await ui.until(lambda: current_state(run).state == "finished", 120)
        await ui.state_shown("finished")


async def test_configure_names_the_partitions(cluster: Cluster, tmp_path: Path) -> None:
    async with opened(tmp_path) as ui:
        await ui.press("2")
        await ui.until(lambda: "main, strict" in ui.text())
