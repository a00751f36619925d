"""``run``, ``resume``, ``watch`` and ``supervise``: start runs and follow them."""

from __future__ import annotations

import argparse
import os
import signal
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from so_tui.commands.common import (
    chosen_changes,
    chosen_spec,
    machine_for,
    note,
    print_json,
    print_rich,
    usable_terminal,
)
from so_tui.commands.progress import exit_code_of, follow
from so_tui.runs import RunDirectory, find_run, read_spec, read_state
from so_tui.spec import InputError, Problem, Refused, RunSpec, with_values

if TYPE_CHECKING:
    from so_tui.launch import Launch
    from so_tui.launch.checks import Check


class StartedRun(Struct, frozen=True):
    """What ``run --detach --json`` prints."""

    name: str
    path: str


def run(arguments: argparse.Namespace) -> int:
    """Start a run, show it, and return its exit code."""
    from so_tui.launch import missing_inputs, preflight
    from so_tui.launch.executors import executor_of

    spec = chosen_spec(arguments)
    if arguments.machine and executor_of(spec).here and not arguments.dry_run:
        message, remedy = (
            "is not used to start a run, which starts on this machine",
            "Add --dry-run, or start it on that machine.",
        )
        raise InputError(
            [
                Problem(
                    code="not-this-machine",
                    field="--machine",
                    value=arguments.machine,
                    message=message,
                    remedy=remedy,
                )
            ]
        )
    if option := "--edit" if arguments.edit else "--script" if arguments.script else "":
        from so_tui.commands.batch_script import refuse_script

        refuse_script(spec, option, dry_run=arguments.dry_run)
    if arguments.dry_run:
        if not arguments.machine:  # another machine has other files
            _report_warnings(arguments, tuple(str(problem) for problem in missing_inputs(spec)))
        launch = _prepared(spec, arguments)
        _report_warnings(
            arguments, tuple(str(problem) for problem in executor_of(spec).unavailable(launch))
        )
        _print_launch(launch, as_json=arguments.json)
        return 0
    _interrupt_on_termination(arguments)
    launch = _prepared(spec, arguments)
    if not (
        arguments.no_preflight
        or arguments.edit
        or arguments.script
        or arguments.detach
        or _plain(arguments)
    ):
        from so_tui.commands.screen import show_launch

        return _exit_code(show_launch(arguments.runs_dir, launch))
    if not arguments.no_preflight:
        launch, warnings = preflight(
            launch, runs_dir=arguments.runs_dir, begins=partial(_note_check, arguments)
        )
        _report_warnings(arguments, warnings)
    return _show(_start(launch, arguments), arguments, owner=True)


def _note_check(arguments: argparse.Namespace, check: Check) -> None:
    """Say what is checked now, beside the results, which stdout has."""
    from so_tui.launch.checks import CHECKS

    note(arguments, f"so-tui: checking {CHECKS[check]} …", stderr=True)


def _start(launch: Launch, arguments: argparse.Namespace) -> RunDirectory:
    """Start a run, with the batch script that the user gives or changes."""
    if not (arguments.edit or arguments.script):
        from so_tui.launch import start

        return start(launch, runs_dir=arguments.runs_dir)
    from so_tui.commands.batch_script import ScriptChoice, read_script, start_with_script

    given = read_script(arguments.script) if arguments.script else ""
    return start_with_script(launch, ScriptChoice(given=given, edits=arguments.edit), arguments)


def _prepared(spec: RunSpec, arguments: argparse.Namespace) -> Launch:
    """Plan a spec for the machine of its place. Raises as ``prepare``, with how to describe a partition's machine."""
    from so_tui.launch import prepare
    from so_tui.launch.places import with_remedy

    machine = machine_for(spec, arguments)
    try:
        return replace(prepare(spec, machine, force=arguments.force), called=arguments.name or "")
    except Refused as error:
        raise with_remedy(error, spec, described=bool(arguments.machine)) from None


def _print_launch(launch: Launch, *, as_json: bool) -> None:
    from so_tui.launch.render import render_launch, render_start, shown_launch

    if as_json:
        print_json(shown_launch(launch))
    else:
        print_rich(render_launch(launch))
        print_rich(render_start(launch), wrap=False)


def _interrupt_on_termination(arguments: argparse.Namespace) -> None:
    """Let SIGTERM interrupt until there is a run to stop. The first process of a container ignores it by default."""
    if _plain(arguments) and not arguments.detach:
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def _plain(arguments: argparse.Namespace) -> bool:
    return arguments.plain or not usable_terminal()


def _report_warnings(arguments: argparse.Namespace, warnings: tuple[str, ...]) -> None:
    for warning in warnings:
        note(arguments, f"so-tui: warning: {warning}", stderr=True)


def resume(arguments: argparse.Namespace) -> int:
    """Start another attempt of a run from its last checkpoint, with changed settings if some are given."""
    from so_tui.launch import current_state, machine_of, prepare_resume
    from so_tui.launch import resume as resume_run

    target = find_run(arguments.run, arguments.runs_dir)
    current_state(
        target
    )  # records the end of a job whose node has failed, which its heartbeat shows only minutes later
    _interrupt_on_termination(arguments)
    changes = chosen_changes(arguments)
    spec = read_spec(target)
    launch = prepare_resume(
        target,
        machine_of(with_values(spec, changes) if changes else spec),
        values=changes,
        force=arguments.force,
        start_over=arguments.start_over,
        assume_dead=arguments.assume_dead,
    )
    resume_run(target, launch)
    return _show(target, arguments, owner=True)


def watch(arguments: argparse.Namespace) -> int:
    """Show a run, live or past. Leaving does not affect it.

    Raises:
        InputError: The run is damaged, so that its end could not be seen.
    """
    from so_tui.launch import ensure_supervised

    target = find_run(arguments.run, arguments.runs_dir)
    read_state(target)
    ensure_supervised(target)
    return _show(target, arguments, owner=False)


def _show(target: RunDirectory, arguments: argparse.Namespace, *, owner: bool) -> int:
    """Show the dashboard, progress lines or only the name. Return the run's exit code if it has ended, else 0."""
    if getattr(arguments, "detach", False):
        if getattr(arguments, "json", False):
            print_json(StartedRun(target.name, str(target.path)))
        else:
            print(target.name)
        return 0
    if _plain(arguments):
        return follow(target, owner=owner, quiet=arguments.quiet)
    from so_tui.commands.screen import show_screen

    show_screen(arguments.runs_dir, target)
    return _exit_code(target)


def _exit_code(target: RunDirectory | None) -> int:
    """Return the exit code of a run that was shown on the screen; 0 unless it has ended."""
    code = None if target is None else exit_code_of(target)
    return (
        0 if code is None else code
    )  # the user left while it trains, and the screen has said how to see it again


def supervise(arguments: argparse.Namespace) -> int:
    """Supervise a run: the body of the supervisor's process."""
    from so_tui.launch import supervise as supervise_run
    from so_tui.launch.starter import take_token

    token = take_token(os.environ)  # before anything is started, which would inherit it
    if arguments.in_job:
        from so_tui.launch.in_job import supervise_in_job

        return supervise_in_job(RunDirectory(arguments.run), arguments.attempt, token)
    return supervise_run(RunDirectory(arguments.run), arguments.attempt, token)
