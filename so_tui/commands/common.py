"""What several commands need: the spec a user named, the machine it is for, and how to print."""

from __future__ import annotations

import argparse
import os
import re
import sys
from typing import TYPE_CHECKING, Any

from so_tui.machine.types import Machine
from so_tui.spec import InputError, Problem, RunSpec, field_index, find_preset, parse_value, problems_in, with_values

if TYPE_CHECKING:
    from rich.console import Console

_GPUS = re.compile(r"[0-9]{1,20}(,[0-9]{1,20})*,?")


def chosen_spec(arguments: argparse.Namespace) -> RunSpec:
    """The preset or file that was named, with ``--set`` and ``--gpus`` applied. Raises InputError."""
    changes = chosen_changes(arguments)
    spec = find_preset(arguments.preset).spec
    return with_values(spec, changes) if changes else spec


def chosen_changes(arguments: argparse.Namespace) -> dict[str, str]:
    """Dotted keys and values of ``--set`` and ``--gpus``. Raises InputError."""
    remedy = "Write it as a.b=value, e.g. offload.ratio=0.5"
    bad = [change for change in arguments.set if "=" not in change]
    if bad:
        raise InputError([Problem(field="--set", value=change, message="has no `=`", remedy=remedy) for change in bad])
    changes = {key.strip(): value.strip() for key, _, value in (change.partition("=") for change in arguments.set)}
    if arguments.gpus is not None:
        given = given_gpus(arguments.gpus)
        if "gpus" in changes and parse_value(changes["gpus"], field_index()["gpus"]) != given:
            message, remedy = f"and --set gpus={changes['gpus']} say different things", "Keep one of the two"
            raise InputError([Problem(field="--gpus", value=arguments.gpus, message=message, remedy=remedy)])
        changes["gpus"] = str(given)
    return changes


def given_gpus(text: str) -> int | list[int]:
    """What ``--gpus`` says: how many, or which ones. Raises InputError."""
    words = text.replace(" ", "")
    if not _GPUS.fullmatch(words):
        remedy = "Give a number, or indices with commas between them: --gpus 0,2"
        raise InputError([Problem(field="--gpus", value=text, message="is neither a number of GPUs nor a list of them", remedy=remedy)])
    given = [int(index) for index in words.rstrip(",").split(",")] if "," in words else int(words)
    wrong = [problem for problem in problems_in({"gpus": given}) if problem.field == "gpus"]
    if wrong:
        raise InputError(wrong)
    return given


def chosen_machine(arguments: argparse.Namespace) -> Machine:
    """The machine of ``--machine FILE``, or this one."""
    if arguments.machine:
        from so_tui.machine import load_machine

        return load_machine(arguments.machine)
    from so_tui.machine import inspect_machine

    return inspect_machine()


def usable_terminal() -> bool:
    """Whether a screen can be shown: Textual itself would write escape codes into a pipe."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "")


def print_json(value: bytes | dict[str, Any]) -> None:
    """Print JSON, indented for the eye."""
    import json

    print(json.dumps(json.loads(value) if isinstance(value, bytes) else value, indent=2, ensure_ascii=False))


def print_rich(*renderables: Any) -> None:
    """Print for people, with colour where the terminal has it (NO_COLOR is respected)."""
    out = console()
    for renderable in renderables:
        out.print(renderable)


def console() -> Console:
    """Where commands print. What they print often comes from elsewhere (an exception, a path): its brackets are no markup, its colons no
    emoji.
    """
    from rich.console import Console

    class OwnConsole(Console):
        def on_broken_pipe(self) -> None:
            """Rich would exit with 1; a reader that has seen enough is no failure."""
            raise BrokenPipeError

    return OwnConsole(highlight=False, markup=False, emoji=False)
