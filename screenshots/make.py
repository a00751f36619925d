"""Draws the pictures of the README from a real run: trains the tiny model, opens the screen on it, and walks through the five pages.

    make screenshots

Everything it makes but the pictures goes to a folder that is removed at the end.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

FOLDER = Path(__file__).parent
SIZES = {"": (120, 36), "-80x24": (80, 24)}
STEPS_BEFORE_THE_PICTURE = 25
GIVE_UP_S = 300.0


async def draw(runs_dir: Path) -> None:
    """Start the run, wait until there is something to see, and save a picture of every page."""
    from so_tui.launch import preflight, start, stop
    from so_tui.machine import inspect_machine
    from so_tui.runs import state_with_truth
    from so_tui.runs.records import FINAL_STATES
    from so_tui.spec import find_preset
    from so_tui.ui.app import SoTuiApp

    machine = inspect_machine()
    spec = find_preset("tiny").spec
    preflight(spec, machine)
    run = start(spec, machine, runs_dir=runs_dir)
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
                await pilot.pause(4.0)  # workers answer, and the dashboard sees a few samples
                app.save_screenshot(f"{page}{suffix}.svg", path=str(FOLDER))
                print(f"screenshots/{page}{suffix}.svg", flush=True)
    stop(run, grace_s=60)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="so-tui-screenshots-") as scratch:
        # Nothing of the person who draws them may show: own settings, own runs, colours on.
        os.environ.update(XDG_CONFIG_HOME=f"{scratch}/config", XDG_STATE_HOME=f"{scratch}/state", COLORTERM="truecolor")
        os.environ.pop("NO_COLOR", None)
        asyncio.run(draw(Path(scratch) / "runs"))


if __name__ == "__main__":
    main()
