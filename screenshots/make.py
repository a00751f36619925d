"""Draw the pictures of the README from a real run: train the tiny model, open the screen on it, and visit the five pages.

    make screenshots
    python screenshots/make.py --run RUN --name dashboard-two-nodes     # only the dashboard, of a run that there is

Everything but the pictures goes to a temporary folder.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

FOLDER = Path(__file__).parent
SIZES = {"": (120, 36), "-80x24": (80, 24)}
STEPS = "400"
"""More than are done before the last picture, so that all show a live run."""
STEPS_BEFORE_THE_PICTURE = 60
GIVE_UP_S = 300.0


async def draw(runs_dir: Path) -> None:
    """Start the run, wait until there is something to see, and save a picture of every page."""
    from so_tui.launch import preflight, prepare, start, stop
    from so_tui.machine import inspect_machine
    from so_tui.runs import state_with_truth
    from so_tui.runs.records import FINAL_STATES
    from so_tui.spec import find_preset, with_values
    from so_tui.ui.app import SoTuiApp

    launch = prepare(with_values(find_preset("tiny").spec, {"train.steps": STEPS}), inspect_machine())
    preflight(launch)
    run = start(launch, runs_dir=runs_dir)
    waiting_since = time.monotonic()
    while (state := state_with_truth(run)).step < STEPS_BEFORE_THE_PICTURE:
        if state.state in FINAL_STATES or time.monotonic() - waiting_since > GIVE_UP_S:
            sys.exit(f"{run.name} did not get to step {STEPS_BEFORE_THE_PICTURE}: {state.state} {state.reason}")
        await asyncio.sleep(0.5)
    for suffix, size in SIZES.items():
        app = SoTuiApp(runs_dir=runs_dir, open_run=run)
        async with app.run_test(size=size) as pilot:
            for page in ("dashboard", "presets", "configure", "runs", "machine"):
                app.action_show(page)
                # Workers answer, the dashboard sees a few samples, and Machine takes enough for lines.
                await pilot.pause(15.0 if page == "machine" else 4.0)
                app.save_screenshot(f"{page}{suffix}.svg", path=str(FOLDER))
                print(f"screenshots/{page}{suffix}.svg", flush=True)
    stop(run, grace_s=60)


async def draw_dashboard(folder: Path, name: str) -> None:
    """Save a picture of the dashboard of a run, live or ended."""
    from so_tui.runs import RunDirectory
    from so_tui.ui.app import SoTuiApp

    app = SoTuiApp(runs_dir=folder.parent, open_run=RunDirectory(folder))
    async with app.run_test(size=SIZES[""]) as pilot:
        await pilot.pause(6.0)
        app.save_screenshot(f"{name}.svg", path=str(FOLDER))


def main() -> None:
    """Draw all pictures, or the one that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, metavar="RUN", help="folder of a run whose dashboard is drawn")
    parser.add_argument("--name", default="dashboard", help="name of the picture of --run, without .svg")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="so-tui-screenshots-") as scratch:
        # The pictures must not show the settings and runs of the user who draws them, and have colours.
        os.environ.update(XDG_CONFIG_HOME=f"{scratch}/config", XDG_STATE_HOME=f"{scratch}/state", COLORTERM="truecolor")
        os.environ.pop("NO_COLOR", None)
        asyncio.run(draw_dashboard(given.run.absolute(), given.name) if given.run else draw(Path(scratch) / "runs"))


if __name__ == "__main__":
    main()
