"""Launching a run from the screen: asked once, checked and started in a thread, and on the dashboard from the confirmation on."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from so_tui.ui import messages
from so_tui.ui.text import Content

if TYPE_CHECKING:
    from so_tui.launch import Launch
    from so_tui.ui.app import SoTuiApp


@dataclass(frozen=True, slots=True)
class Checking:
    """A launch that has been confirmed, and has no run directory yet."""

    label: str
    since: float
    """Monotonic seconds."""
    asked_on: str
    """The screen on which it was confirmed."""

    def lines(self, width: int) -> Content:
        """Return what is launched and how long it has been checked, in ``width`` cells."""
        from so_tui.ui.start_timeline import CHECKS, Stage, timeline_lines  # not needed for the first paint

        stage = Stage(CHECKS, time.monotonic() - self.since, running=True, detail="model, data, software, disk")
        return Content.assemble((self.label, "bold"), "\n\n", timeline_lines([stage], width))


def ask_to_launch(app: SoTuiApp, launch: Launch, facts: Iterable[Content]) -> None:
    """Ask once, then start ``launch`` where its spec says."""
    from so_tui.launch.executors import executor_of
    from so_tui.ui.screens.dialogs import Question

    if not app.may_start():
        return
    if app.machine_file and app.machine is not None and executor_of(launch.spec).here:
        there = f"This plan is for {app.machine.label} ({app.machine_file}), but runs start on the machine that so-tui runs on."
        back = "Start it on that machine, or press o and leave the field empty to plan for this one."
        app.post_message(messages.Failed(f"{launch.spec.label} was not started", (there, back)))
        return

    def answered(yes: bool | None) -> None:
        if yes:
            start_launch(app, launch)

    app.push_screen(Question(f"Launch {launch.spec.label}?", list(facts), yes="Launch", default_yes=True), answered)


def start_launch(app: SoTuiApp, launch: Launch) -> None:
    """Start ``launch`` unless something else is being started. The dashboard shows its checks, and then the run."""
    from so_tui.ui.page import Page

    if not app.may_start():
        return
    if isinstance(page := app.screen_stack[0], Page):
        page.action_leave_field()  # or the user would still be typing there after coming back
    app.starting = launch.spec.label
    app.checking = Checking(launch.spec.label, time.monotonic(), app.current_mode)
    app.run_worker(partial(_launch, app, launch), thread=True, group="launch", name="launch", exit_on_error=False)
    app.switch_mode("dashboard")


def go_back(app: SoTuiApp) -> None:
    """Leave the checks of a launch that came to nothing for where it was confirmed.

    Not if the user has gone elsewhere, has a dialog open, or is quitting, when there is no screen any more.
    """
    checking, app.checking = app.checking, None
    if checking is not None and app.current_mode == "dashboard" and len(app.screen_stack) == 1:
        app.switch_mode(checking.asked_on)


def _launch(app: SoTuiApp, launch: Launch) -> None:
    """Run the preflight checks, then hand the run to its supervisor. A refusal is shown with its reasons. Runs in a thread."""
    from msgspec.structs import replace

    from so_tui.launch import preflight, start
    from so_tui.spec.errors import Refused, SoTuiError

    try:
        if app.start_run is not None:
            run = app.start_run(launch, runs_dir=app.runs_dir)
        else:
            checked, warnings = preflight(launch, runs_dir=app.runs_dir)
            for warning in warnings:
                app.call_from_thread(app.notify, warning, severity="warning", markup=False)
            run = start(checked, runs_dir=app.runs_dir)
    except SoTuiError as error:
        retry = replace(launch, forced=True) if isinstance(error, Refused) and error.forceable else None
        app.post_message(messages.NotLaunched(f"{launch.spec.label} was not started", tuple(str(error).splitlines()), retry_forced=retry))
    else:
        app.post_message(messages.Launched(run))
