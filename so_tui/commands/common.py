"""Shared by the commands: the spec that the user named, the machine it is for, and printing."""

from __future__ import annotations

import logging
import os
import re
import sys
from argparse import Namespace
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from so_tui.machine.types import Machine
from so_tui.spec import (
    InputError,
    Problem,
    RunSpec,
    field_index,
    find_preset,
    parse_value,
    problems_in,
    with_values,
)
from so_tui.spec.errors import reject
from so_tui.trust.streams import beneath, console
from so_tui.trust.text import brief_message, printable_line, printable_source

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from so_tui.runs import RunDirectory

_LOG = logging.getLogger(__name__)
_notes_shown = True
_SHORT_OPTIONS = {
    "gpus": "gpus",
    "nodes": "nodes",
    "partition": "slurm.partition",
    "account": "slurm.account",
    "time": "slurm.time_limit",
}
_INDEX = r"\s*(0|[1-9][0-9]{0,17})\s*"
_GPUS = re.compile(rf"{_INDEX}(,{_INDEX})*(,\s*)?")


def chosen_spec(arguments: Namespace) -> RunSpec:
    """Return the named preset or file with ``--set`` and ``--gpus`` applied. Raises InputError."""
    changes = chosen_changes(arguments)
    preset = find_preset(arguments.preset)
    _LOG.info("preset %s: %s, %s", preset.spec.name, preset.origin, preset.path)
    for problem in preset.problems:
        print_note(f"so-tui: warning: {problem}", stderr=True)
    return with_values(preset.spec, changes) if changes else preset.spec


def chosen_changes(arguments: Namespace) -> dict[str, str]:
    """Return the dotted keys and values of ``--set``, ``--gpus``, ``--nodes`` and the options of
    Slurm.

    Raises:
        InputError: With the codes ``no-equals-sign``, ``not-gpus``, ``contradicting-options``.
    """
    remedy = "Write a.b=value, for example offload.ratio=0.5."
    if bad := [
        Problem("no-equals-sign", "--set", change, "has no `=`", remedy)
        for change in arguments.set
        if "=" not in change
    ]:
        raise InputError(bad)
    changes = {
        key.strip(): value.strip()
        for key, _, value in (change.partition("=") for change in arguments.set)
    }
    for option, key in _SHORT_OPTIONS.items():
        value = getattr(arguments, option, None)
        if value is None:
            continue
        if option == "gpus":
            given_value("gpus", value)
        info, set_to = field_index()[key], changes.get(key, value)
        if set_to != value and parse_value(set_to, info) != parse_value(value, info):
            raise reject(
                "contradicting-options",
                f"--{option}",
                value,
                f"contradicts --set {key}={set_to}",
                "Give only one of the two.",
            )
        changes[key] = value
    return changes


def chosen_options(arguments: Namespace) -> list[str]:
    """Return ``chosen_changes`` as the words of a command: with a short option where there is
    one.
    """
    short = {key: f"--{option}" for option, key in _SHORT_OPTIONS.items()}
    pairs = (
        (short[key], value) if key in short else ("--set", f"{key}={value}")
        for key, value in chosen_changes(arguments).items()
    )
    return [word for pair in pairs for word in pair]


def given_value(key: Literal["gpus", "nodes"], text: str) -> Any:
    """Return the value of ``--gpus``, a count or a list of indices, or of ``--nodes``.

    Raises:
        InputError: It is neither a number nor a list (code ``not-gpus``), or out of range.
    """
    if key == "gpus" and not _GPUS.fullmatch(text):
        raise reject(
            "not-gpus",
            "--gpus",
            text,
            "is neither a number of GPUs nor a list of indices",
            "Give a number, or indices separated by commas: --gpus 0,2.",
        )
    value = parse_value(text, field_index()[key])
    if wrong := [problem for problem in problems_in({key: value}) if problem.field == key]:
        raise InputError(wrong)
    return value


def chosen_machine(arguments: Namespace) -> Machine:
    """Return the machine of ``--machine NAME|FILE``, or this one."""
    if arguments.machine:
        from so_tui.machine.known import machine_of

        return machine_of(arguments.machine)
    from so_tui.machine import inspect_machine

    return inspect_machine()


def machine_for(spec: RunSpec, arguments: Namespace) -> Machine:
    """Return the machine to plan a spec for: that of ``--machine FILE``, or of the place where the
    spec runs.
    """
    from so_tui.launch.places import machine_of

    return chosen_machine(arguments) if arguments.machine else machine_of(spec.slurm)


def run_meant(arguments: Namespace, action: str) -> RunDirectory:
    """Return the run that was named, or on a terminal the latest one (to stop, the latest that has
    not ended), once the user has agreed.

    Raises:
        InputError: There is no such run; or none was named, and there is no terminal to ask on
            (code ``run-not-named``) or the user refused (``not-confirmed``).
    """
    from so_tui.runs import find_run, read_state
    from so_tui.runs.listing import LATEST, list_runs
    from so_tui.runs.records import FINAL_STATES
    from so_tui.trust.files import Distrust, distrust_of_folder

    run = find_run(arguments.run or LATEST, arguments.runs_dir)
    if arguments.run:
        return run
    remedy = f"`so-tui {action} {LATEST}` takes the latest run, `so-tui runs` lists all."
    if not can_ask():
        raise reject("run-not-named", "run", "", "is not named", remedy)
    state = read_state(run)
    if action == "stop" and state.state in FINAL_STATES:
        runs = list_runs(arguments.runs_dir)
        mine = (one for one in runs if distrust_of_folder(one.path) is not Distrust.OTHER_OWNER)
        live = next((one for one in mine if read_state(one).state not in FINAL_STATES), None)
        if live is None:
            return run  # There is nothing to ask: the command says that it has ended.
        run, state = live, read_state(live)
    if not agreed(f"{action} {run.name} ({state.state}, step {state.step})?"):
        raise reject("not-confirmed", "run", run.name, f"was not asked to {action}", remedy)
    return run


def can_ask() -> bool:
    """Return whether there is a terminal on which the user can answer."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def agreed(question: str) -> bool:
    """Ask a question on the terminal, and return whether the user said yes."""
    print(printable_line(f"{question} [y/N] "), end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def usable_terminal() -> bool:
    """Return whether a screen can be shown. Textual does not check, and would write escape codes
    into a pipe.
    """
    return (
        sys.stdin.isatty()
        and sys.stdout.isatty()
        and os.environ.get("TERM", "dumb") not in ("dumb", "")
    )


def show_notes(shown: bool) -> None:
    """Choose for this process whether notes and progress are printed: not with ``--quiet``."""
    global _notes_shown
    _notes_shown = shown


def print_note(text: str, *, stderr: bool = False) -> None:
    """Print a line of progress or a note, unless ``--quiet`` is given. With ``stderr``, stdout has
    only results.
    """
    if _notes_shown:
        print(printable_line(text), file=sys.stderr if stderr else sys.stdout, flush=True)


def note_problems(problems: Iterable[Problem]) -> None:
    """Name presets of the user that were left out, on stderr: stdout has only results."""
    for problem in problems:
        print(f"problem: {brief_message(str(problem))}", file=sys.stderr)


def print_json(value: object) -> None:
    """Print a struct, or plain values, as indented JSON in ASCII."""
    import json

    import msgspec

    print(
        printable_source(json.dumps(msgspec.to_builtins(value, str_keys=True), indent=2))
    )  # DEL is ASCII


def plain_table(*headings: str, right: Collection[str] = ()) -> Table:
    """Return a table without lines; columns wrap, and those in ``right`` are aligned there."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    return table


def print_rich(*renderables: Any, wrap: bool = True) -> None:
    """Print for people, in colour if the terminal has it and NO_COLOR is not set. Without ``wrap``,
    lines stay whole, to be copied.
    """
    with rich_output() as out:
        for renderable in renderables:
            out.print(renderable, soft_wrap=not wrap)


@contextmanager
def rich_output() -> Iterator[Console]:
    """Lend a console. What is printed on it into a file or a pipe lacks what fills lines up to the
    width.
    """
    out = console()
    if out.is_terminal:
        yield out
        return
    with out.capture() as caught:
        yield out
    out.file.writelines(f"{line.rstrip()}\n" for line in caught.get().splitlines())


class ProgressLine:
    """A line on stderr that each update replaces. Does nothing if stderr is not a terminal."""

    def __init__(self, *, shown: bool = True) -> None:
        visible = shown and _notes_shown and sys.stderr.isatty()
        self._terminal = beneath(sys.stderr) if visible else None

    def show(self, text: str) -> None:
        """Replace the line."""
        if self._terminal is not None:
            self._terminal.write(f"\r\x1b[K{printable_line(text)}")
            self._terminal.flush()

    @property
    def hidden(self) -> bool:
        """Whether nothing is shown."""
        return self._terminal is None

    def clear(self) -> None:
        """Empty the line."""
        self.show("")


# ``--verbose``: what so-tui decides and calls, as modules log it, on stderr.


class _OneLine(logging.Formatter):
    """Makes each message one printable line, whoever wrote what is in it."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_line(super().format(record))


def log_to_stderr() -> None:
    """Show the messages of so-tui's own loggers from now on."""
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine("%(name)s: %(message)s"))
    logger = logging.getLogger("so_tui")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
