"""Draw the pictures of the README.

``h200`` is the dashboard of a real run on two H200, from its records in ``h200.tar.xz``. Dashboard,
Presets and Configure are those of four GH200, with the simulated run of the tests: what a user of
such a host will see. Runs and Machine are of a real run of the tiny model on this host.

    make screenshots
    python screenshots/make.py --simulated  # only what needs no run on this host: seconds
    python screenshots/make.py --run RUN --name dashboard-two-nodes
        # only the dashboard, of a run that there is

Everything but the pictures goes to a temporary folder.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest
    from textual.app import App

    from tests.support.screen import Driver


FOLDER = Path(__file__).parent
SIZES = {"": (120, 36), "-80x24": (80, 24)}
STEPS = "400"
"""More than are done before the last picture, so that all show a live run."""
STEPS_BEFORE_THE_PICTURE = 60
GIVE_UP_S = 300.0
SIMULATED_RUN = "qwen3-14b-a"
CONFIGURED, TITLE = "qwen3-14b", "Qwen3 14B"
"""The preset on Presets and Configure, and what it is called."""


def save(app: App[None], name: str) -> None:
    """Save what the application shows."""
    app.save_screenshot(f"{name}.svg", path=str(FOLDER))
    print(f"screenshots/{name}.svg", flush=True)


async def draw(runs_dir: Path) -> None:
    """Start the run, wait until there is something to see, and save a picture of every page."""
    from so_tui.launch.checks import preflight
    from so_tui.launch.launch import prepare
    from so_tui.launch.lifecycle import start, stop
    from so_tui.machine import inspect_machine
    from so_tui.runs import state_with_truth
    from so_tui.runs.records import FINAL_STATES
    from so_tui.spec import find_preset, with_values
    from so_tui.ui.app import SoTuiApp

    launch = prepare(
        with_values(find_preset("tiny").spec, {"train.steps": STEPS}), inspect_machine()
    )
    preflight(launch)
    run = start(launch, runs_dir=runs_dir)
    waiting_since = time.monotonic()
    while (state := state_with_truth(run)).step < STEPS_BEFORE_THE_PICTURE:
        if state.state in FINAL_STATES or time.monotonic() - waiting_since > GIVE_UP_S:
            sys.exit(
                f"{run.name} did not get to step {STEPS_BEFORE_THE_PICTURE}: {state.state} "
                f"{state.reason}"
            )
        await asyncio.sleep(0.5)
    for suffix, size in SIZES.items():
        app = SoTuiApp(runs_dir=runs_dir, open_run=run)
        async with app.run_test(size=size) as pilot:
            for page in ("runs", "machine"):
                app.action_show(page)
                # Workers answer, the dashboard sees a few samples, and Machine takes enough for
                # lines.
                await pilot.pause(15.0 if page == "machine" else 4.0)
                save(app, f"{page}{suffix}")
    stop(run, grace_s=60)


async def draw_simulated(runs_dir: Path) -> None:
    """Save pictures of dashboard, Presets and Configure on a host of four GH200, with a run made
    from records: nothing is measured.
    """
    import pytest
    from msgspec.structs import replace

    from so_tui.runs import RunDirectory
    from so_tui.ui.app import SoTuiApp

    sys.path.insert(0, str(FOLDER.parent))
    from tests.support import pictured
    from tests.support.make_run import quad_machine
    from tests.support.screen import Driver

    with pytest.MonkeyPatch.context() as patch:
        _stop_clocks(patch)
        pictured.write_runs(runs_dir, patch)
        patch.setattr("time.time", lambda: pictured.NOW)
        for suffix, size in SIZES.items():
            machine = replace(quad_machine(), live=True)
            app = SoTuiApp(
                machine=machine, runs_dir=runs_dir, open_run=RunDirectory(runs_dir / SIMULATED_RUN)
            )
            async with app.run_test(size=size) as pilot:
                await _save_pages(Driver(app, pilot), suffix)
    time.tzset()


async def draw_recorded(runs_dir: Path) -> None:
    """Save a picture of the dashboard of the recorded run, at the time of its last record."""
    import pytest
    from msgspec.structs import replace

    from so_tui.launch.launch import read_launch
    from so_tui.runs import RunDirectory
    from so_tui.ui.app import SoTuiApp

    with tarfile.open(FOLDER / "h200.tar.xz") as archive:
        archive.extractall(runs_dir, filter="data")
    (folder,) = runs_dir.iterdir()
    run = RunDirectory(folder)
    machine = replace(read_launch(run, 1).machine, live=True)
    (samples,) = folder.glob("samples.*/raw-*.jsonl")
    copied_at = json.loads(samples.read_text().splitlines()[-1])["time"]
    with pytest.MonkeyPatch.context() as patch:
        _stop_clocks(patch)
        patch.setattr("time.time", lambda: copied_at)
        app = SoTuiApp(machine=machine, runs_dir=runs_dir, open_run=run)
        async with app.run_test(size=SIZES[""]) as pilot:
            await pilot.pause(6.0)
            save(app, "h200")
    time.tzset()


def _stop_clocks(patch: pytest.MonkeyPatch) -> None:
    """Let records of the past stand for a run that is live, though nobody supervises it."""
    patch.setenv("TZ", "UTC")
    time.tzset()
    patch.setattr("so_tui.runs.liveness._age_s", lambda _: 0.0)
    patch.setattr("so_tui.runs.HeartbeatWatch.unchanged_s", lambda *_: 0.0)
    patch.setattr("so_tui.doctor.findings", lambda *_, **__: ())


async def _save_pages(ui: Driver, suffix: str) -> None:
    from textual.widgets import DataTable

    from so_tui.ui.charts.chart import Chart
    from so_tui.ui.presets.screen import PresetsScreen

    await ui.until(lambda: ui.find("#loss", Chart).lines, GIVE_UP_S)
    await ui.pilot.pause(3.0)
    save(ui.app, f"dashboard{suffix}")
    await ui.press("1")
    await ui.until(lambda: isinstance(ui.screen, PresetsScreen) and ui.screen.rows, GIVE_UP_S)
    table = ui.find("#table", DataTable)
    table.move_cursor(row=table.get_row_index(CONFIGURED), column=0)
    await ui.until(lambda: TITLE in ui.shown("#detail-title"), GIVE_UP_S)
    await ui.pilot.pause(1.0)
    save(ui.app, f"presets{suffix}")
    await ui.press("enter")
    await ui.until(
        lambda: ui.screen.query("#verdict") and "fits" in ui.shown("#verdict"), GIVE_UP_S
    )
    await ui.pilot.pause(3.0)
    save(ui.app, f"configure{suffix}")


async def draw_dashboard(folder: Path, name: str) -> None:
    """Save a picture of the dashboard of a run, live or ended."""
    from so_tui.runs import RunDirectory
    from so_tui.ui.app import SoTuiApp

    app = SoTuiApp(runs_dir=folder.parent, open_run=RunDirectory(folder))
    async with app.run_test(size=SIZES[""]) as pilot:
        await pilot.pause(6.0)
        app.save_screenshot(f"{name}.svg", path=str(FOLDER))


def main() -> None:
    """Draw all pictures, or those that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--simulated", action="store_true", help="draw only what needs no real run")
    parser.add_argument(
        "--run", type=Path, metavar="RUN", help="folder of a run whose dashboard is drawn"
    )
    parser.add_argument(
        "--name", default="dashboard", help="name of the picture of --run, without .svg"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="so-tui-screenshots-") as scratch:
        # The pictures must not show the settings and runs of the user who draws them, and have
        # colours.
        os.environ.update(
            XDG_CONFIG_HOME=f"{scratch}/config",
            XDG_STATE_HOME=f"{scratch}/state",
            COLORTERM="truecolor",
        )
        os.environ.pop("NO_COLOR", None)
        if given.run:
            asyncio.run(draw_dashboard(given.run.absolute(), given.name))
            return
        asyncio.run(draw_recorded(Path(scratch) / "recorded"))
        asyncio.run(draw_simulated(Path(scratch) / "simulated"))
        if not given.simulated:
            asyncio.run(draw(Path(scratch) / "runs"))


if __name__ == "__main__":
    main()
