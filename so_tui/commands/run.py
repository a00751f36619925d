"""``run``, ``resume``, ``watch`` and ``supervise``: start runs and follow them."""

from __future__ import annotations

import logging
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from so_tui.commands.common import (
    chosen_changes,
    chosen_spec,
    machine_for,
    print_json,
    print_note,
    print_rich,
    run_meant,
    usable_terminal,
)
from so_tui.commands.follow import follow
from so_tui.launch.executors import ensure_supervised, executor_of
from so_tui.launch.lifecycle import current_state, start
from so_tui.launch.lifecycle import resume as resume_run
from so_tui.launch.slurm.executor import SlurmExecutor
from so_tui.launch.slurm.script import edited, for_run, kept
from so_tui.plan.plan import Launch
from so_tui.runs import RunDirectory, find_run, read_spec, read_state
from so_tui.runs.directory import LAUNCH_VARIABLE
from so_tui.runs.liveness import EXIT_CODES
from so_tui.spec import Refused, RunSpec, with_values
from so_tui.spec.errors import reject
from so_tui.trust.files import read_bounded
from so_tui.trust.text import quoted

if TYPE_CHECKING:
    from so_tui.ui.app import SoTuiApp


# Runs whose batch script the user gives: changed in an editor before it is submitted, or read from
# a file.
#
# What was changed is never lost: if the submission fails, the script is kept and named.
#
# Problem codes: nothing-to-edit: The run starts on this machine, without a batch script. unused-
# option: Nothing is submitted. script-unreadable: The file of the script is missing, no text, or
# larger than any script.


_MOST_BYTES = 1 << 20


def _refuse_script(spec: RunSpec, option: str, *, dry_run: bool) -> None:
    """Raise InputError if an option of batch scripts is given and none will be submitted."""
    if dry_run:
        raise reject(
            "unused-option",
            option,
            "",
            "has no effect with --dry-run, which prints the script that so-tui would submit",
            "Leave one of them out.",
        )
    if executor_of(spec).here:
        raise reject(
            "nothing-to-edit",
            option,
            spec.name,
            "needs a batch script, and this run starts on this machine",
            "Name a partition with --partition.",
        )


class StartedRun(Struct, frozen=True):
    """What ``run --detach --json`` prints."""

    name: str
    path: str


def run(arguments: Namespace) -> int:
    """Start a run, show it, and return its exit code."""
    from so_tui.launch.checks import CHECKS, missing_inputs, preflight

    spec = chosen_spec(arguments)
    if arguments.machine and executor_of(spec).here and not arguments.dry_run:
        raise reject(
            "not-this-machine",
            "--machine",
            arguments.machine,
            "is not used to start a run, which starts on this machine",
            "Add --dry-run, or start it on that machine.",
        )
    if option := "--edit" if arguments.edit else "--script" if arguments.script else "":
        _refuse_script(spec, option, dry_run=arguments.dry_run)
    if arguments.dry_run:
        if not arguments.machine:  # another machine has other files
            _report_warnings(missing_inputs(spec))
        launch = _prepared(spec, arguments)
        _report_warnings(executor_of(spec).unavailable(launch))
        _report_place(launch)
        from so_tui.launch.show import render_launch, render_start, shown_launch

        if arguments.json:
            print_json(shown_launch(launch))
        else:
            print_rich(render_launch(launch))
            print_rich(render_start(launch), wrap=False)
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
        app = _show_screen(arguments.runs_dir, launch=launch)
        if app.refused is not None:
            raise app.refused
        return _exit_code(app.launched)
    if not arguments.no_preflight:
        launch, warnings = preflight(
            launch,
            runs_dir=arguments.runs_dir,
            begins=lambda check: print_note(f"so-tui: checking {CHECKS[check]} …", stderr=True),
        )
        _report_warnings(warnings)
    _report_place(launch)
    _report_saving(launch)
    return _show(_start(launch, arguments), arguments, owner=True)


def _start(launch: Launch, arguments: Namespace) -> RunDirectory:
    """Start a run, with the batch script that the user gives or changes.

    Raises:
        SoTuiError: As ``start``. A changed script is in a file, and stderr names it.
    """
    if not (arguments.edit or arguments.script):
        return start(launch, runs_dir=arguments.runs_dir)
    script = generated = ""
    try:
        if arguments.script:
            script = read_bounded(arguments.script, _MOST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise reject(
            "script-unreadable",
            "--script",
            str(arguments.script),
            f"cannot be read: {error}",
            "Name a batch script that --edit kept.",
        ) from error

    def chosen(given: str) -> str:
        """Return the script to submit instead of the generated one."""
        nonlocal script, generated
        generated, script = given, for_run(script, given) if script else given
        if arguments.edit:
            script = edited(script)
        return script

    try:
        return start(launch, runs_dir=arguments.runs_dir, executor=SlurmExecutor(edit=chosen))
    except BaseException:
        if arguments.edit and script not in ("", generated):
            file = quoted(str(kept(script, launch.spec.name).path))
            told = f"your script is kept. To submit it: the same command with --script {file}"
            print(f"so-tui: {told}", file=sys.stderr)
        raise


def _prepared(spec: RunSpec, arguments: Namespace) -> Launch:
    """Plan a spec for the machine of its place. Raises as ``prepare``, with how to describe a
    partition's machine.
    """
    from so_tui.launch.launch import prepare
    from so_tui.launch.places import with_remedy

    machine = machine_for(spec, arguments)
    try:
        return replace(prepare(spec, machine, force=arguments.force), called=arguments.name or "")
    except Refused as error:
        raise with_remedy(error, spec.slurm, described=bool(arguments.machine)) from None


def _interrupt_on_termination(arguments: Namespace) -> None:
    """Let SIGTERM interrupt until there is a run to stop. The first process of a container ignores
    it by default.
    """
    if _plain(arguments) and not arguments.detach:
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def _plain(arguments: Namespace) -> bool:
    return arguments.plain or not usable_terminal()


def _report_warnings(warnings: Iterable[object]) -> None:
    for warning in warnings:
        print_note(f"so-tui: warning: {warning}", stderr=True)


def _report_place(launch: Launch) -> None:
    from so_tui.launch.places import unknown_nodes

    if text := unknown_nodes(launch.spec, launch.machine):
        print_note(f"so-tui: {text}", stderr=True)


def _report_saving(launch: Launch) -> None:
    from so_tui.plan.saving import may_lose_much, saving_text

    warning = "warning: " if may_lose_much(launch.plan) else ""
    print_note(f"so-tui: {warning}{saving_text(launch.plan)}", stderr=True)


def resume(arguments: Namespace) -> int:
    """Start another attempt of a run from its last checkpoint, with changed settings if some are
    given.
    """
    from so_tui.launch.launch import prepare_resume
    from so_tui.launch.places import machine_of

    target = run_meant(arguments, "resume")
    # records the end of a job whose node has failed, which its heartbeat shows only minutes later
    current_state(target)
    _interrupt_on_termination(arguments)
    changes = chosen_changes(arguments)
    spec = read_spec(target)
    launch = prepare_resume(
        target,
        machine_of((with_values(spec, changes) if changes else spec).slurm),
        values=changes,
        force=arguments.force,
        start_over=arguments.start_over,
        assume_dead=arguments.assume_dead,
    )
    _report_warnings(launch.plan.replaced_texts)
    _report_saving(launch)
    resume_run(target, launch)
    return _show(target, arguments, owner=True)


def watch(arguments: Namespace) -> int:
    """Show a run, live or past. Leaving does not affect it.

    Raises:
        InputError: The run is damaged, so that its end could not be seen.
    """
    target = find_run(arguments.run, arguments.runs_dir)
    read_state(target)
    ensure_supervised(target)
    return _show(target, arguments, owner=False)


def _show(target: RunDirectory, arguments: Namespace, *, owner: bool) -> int:
    """Show the dashboard, progress lines or only the name. Return the run's exit code if it has
    ended, else 0.
    """
    if getattr(arguments, "detach", False):
        if getattr(arguments, "json", False):
            print_json(StartedRun(target.name, str(target.path)))
        else:
            print(target.name)
        return 0
    if _plain(arguments):
        return follow(target, owner=owner)

    _show_screen(arguments.runs_dir, open_run=target)
    return _exit_code(target)


def _exit_code(target: RunDirectory | None) -> int:
    """Return the exit code of a run that was shown on the screen; 0 unless it has ended: the user
    left while it trains, and the screen has said how to see it again.
    """
    return 0 if target is None else EXIT_CODES.get(current_state(target).state, 0)


def supervise(arguments: Namespace) -> int:
    """Supervise a run: the body of the supervisor's process."""
    from so_tui.launch.supervisor.run import supervise as supervise_run

    digest = os.environ.get(LAUNCH_VARIABLE)
    run = RunDirectory(Path(arguments.run))
    if arguments.in_job:
        from so_tui.launch.in_job import supervise_in_job

        return supervise_in_job(run, arguments.attempt, digest)
    return supervise_run(run, arguments.attempt, digest or "")


# ``so-tui`` without a command: the screen.


NO_TERMINAL = """\
so-tui: the screen needs a terminal (stdin or stdout is not one, or TERM is dumb). \
These commands need none:
  so-tui inspect              what this machine has        \
so-tui run PRESET --plain   train, printing progress lines
  so-tui plan [PRESET]        what fits here, how fast     so-tui watch RUN --plain    follow a run
  so-tui presets              what can be trained          so-tui runs                 every run
`so-tui --help` lists them all."""


def open_screen(arguments: Namespace) -> int:
    """Open the screen with the presets."""
    if not usable_terminal():
        print(NO_TERMINAL, file=sys.stderr)
        return 2
    if not arguments.machine:
        _show_screen(arguments.runs_dir)
        return 0
    from so_tui.machine.known import machine_of  # reads its file of machines

    _show_screen(
        arguments.runs_dir, machine=machine_of(arguments.machine), machine_file=arguments.machine
    )
    return 0


def _show_screen(runs_dir: Path | None, **shown: Any) -> SoTuiApp:
    """Run the Textual application until the user leaves it, and return it; ``shown`` as for its
    constructor.
    """
    from so_tui.settings_file import load_settings
    from so_tui.ui.app import SoTuiApp

    logging.disable(logging.INFO)  # --verbose would write over the screen
    app = SoTuiApp(runs_dir=runs_dir, settings=load_settings(), **shown)
    app.run()
    return app
