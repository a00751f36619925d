"""Launching a run from the screen: asked once, checked and started in a thread, and on the
dashboard from the confirmation on.
"""

from __future__ import annotations

import shutil
import time
from functools import partial
from typing import TYPE_CHECKING

from so_tui.ui.messages import Failed, Launched, NotLaunched, Offer, code_refused, in_thread
from so_tui.ui.page import Page
from so_tui.ui.shared_app import Checking
from so_tui.ui.text import Content, shows_ascii
from so_tui.units import plural

if TYPE_CHECKING:
    from so_tui.launch.checks import Check
    from so_tui.launch.slurm.script import Draft
    from so_tui.plan.plan import Launch, Plan
    from so_tui.spec import RunSpec
    from so_tui.ui.shared_app import SharedApp


def ask_to_launch(app: SharedApp, launch: Launch, draft: Draft | None = None) -> None:
    """Ask once, then start ``launch`` where its spec says, with the batch script that the user has
    changed before or changes now.
    """
    from so_tui.launch.executors import executor_of
    from so_tui.launch.places import unknown_nodes
    from so_tui.ui.dialogs import JobQuestion, LaunchQuestion
    from so_tui.ui.plan_view import launch_facts

    if not app.may_start() or refused_elsewhere(app, launch.spec):
        return
    place = unknown_nodes(launch.spec, launch.machine)
    title, facts = f"Launch {launch.spec.label}?", launch_facts(launch.plan, place)
    question = (
        LaunchQuestion(title, facts, launch)
        if executor_of(launch.spec).here
        else JobQuestion(title, facts, launch, draft)
    )

    def answered(yes: bool | None) -> None:
        if yes:
            start_launch(app, question.launch, question.draft)
        elif question.draft is not None:
            app.notify(_where_kept(question.draft), title="Your script is kept", markup=False)

    app.push_screen(question, answered)


def refused_elsewhere(app: SharedApp, spec: RunSpec) -> bool:
    """Return whether ``spec`` cannot start from here, since its plan is for another machine, and
    tell the user.
    """
    from so_tui.launch.executors import executor_of

    if not app.machine_file or app.machine is None or not executor_of(spec).here:
        return False
    file = "" if app.machine_file == app.machine.label else f" ({app.machine_file})"
    there = f"This plan is for {app.machine.label}{file}. Runs start on this machine only."
    back = "`o` with an empty name comes back to it; or start so-tui on that machine."
    app.post_message(Failed(f"{spec.label} was not started", (there, back)))
    return True


def launch_anyway(app: SharedApp, launch: Launch, draft: Draft | None = None) -> Offer:
    """Return the offer to start ``launch`` although something speaks against it."""
    return Offer("Launch anyway", partial(start_launch, app, launch, draft))


def start_launch(app: SharedApp, launch: Launch, draft: Draft | None = None) -> None:
    """Start ``launch`` unless something else is being started. The dashboard shows its checks, and
    then the run.

    Args:
        app: The application.
        launch: What is started.
        draft: The user's batch script; None for the one that so-tui writes.
    """
    if not app.may_start():
        return
    if isinstance(page := app.screen_stack[0], Page):
        page.action_leave_field()  # or the user would still be typing there after coming back
    app.starting = launch.spec.label
    app.checking = Checking(launch.spec.label, time.monotonic(), app.current_mode)
    in_thread(app, partial(_launch, app, launch, draft), "launch", group="launch")
    app.switch_mode("dashboard")


def _launch(app: SharedApp, launch: Launch, draft: Draft | None) -> None:
    """Run the preflight checks, then hand the run to its supervisor. A refusal is shown with its
    reasons. Runs in a thread.
    """
    from msgspec import structs

    from so_tui.launch.checks import preflight
    from so_tui.launch.lifecycle import start
    from so_tui.launch.slurm.executor import SlurmExecutor
    from so_tui.launch.slurm.script import for_run
    from so_tui.spec.errors import Refused, SoTuiError

    def begins(check: Check) -> None:
        app.call_later(app.begin_check, check, time.monotonic())

    try:
        checked, warnings = preflight(launch, runs_dir=app.runs_dir, begins=begins)
        for warning in warnings:
            app.call_from_thread(app.notify, warning, severity="warning", markup=False)
        executor = SlurmExecutor(edit=partial(for_run, draft.script)) if draft else None
        run = start(checked, runs_dir=app.runs_dir, executor=executor)
    except SoTuiError as error:
        offer, lines = None, str(error).splitlines()
        if draft:
            offer = Offer("Edit the script", partial(ask_to_launch, app, launch, draft))
            lines.append(f"Your script is kept. {_where_kept(draft)}")
        if isinstance(error, Refused) and error.forceable:
            offer = launch_anyway(app, structs.replace(launch, forced=True), draft)
        title = f"{launch.spec.label} was not started"
        if refused := code_refused(app, title, error, partial(start_launch, app, launch, draft)):
            lines, offer = [*refused.lines, *lines[len(str(error).splitlines()) :]], refused.offer
        app.post_message(NotLaunched(title, tuple(lines), error, offer=offer))
    else:
        if draft is not None:
            draft.path.unlink(missing_ok=True)
        app.post_message(Launched(run))


def _where_kept(draft: Draft) -> str:
    """Say how a script that was not submitted is submitted later."""
    from so_tui.trust.text import quoted

    return f"`so-tui run` submits it with --script {quoted(str(draft.path))}."


def show_plan(app: SharedApp, title: str, plan: Plan, command: str = "") -> None:
    """Show a whole plan over the screen."""
    from so_tui.ui import plan_view
    from so_tui.ui.dialogs import Notice

    def lay(width: int) -> Content:
        return plan_view.whole(plan, max(36, width), command=command, plain=shows_ascii(app))

    noun = "GPU" if plan.on_gpus else "rank"
    app.push_screen(Notice(f"{title} on {plural(plan.gpus, noun)}", [lay], bad=False))


# Whether Slurm is here.


def has_slurm() -> bool:
    """Return whether jobs can be submitted from here."""
    return shutil.which("sbatch") is not None
