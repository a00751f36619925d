"""What several commands need: the spec a user named, the machine it is for, and how to print."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from so_tui.machine.types import Machine
from so_tui.spec import InputError, Problem, RunSpec, find_preset, with_values


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
        changes["gpus"] = f"[{arguments.gpus}]" if "," in arguments.gpus else arguments.gpus
    return changes


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
    from rich.console import Console

    # What is printed often comes from elsewhere (an exception, a path): its brackets are no markup, its colons no emoji.
    console = Console(highlight=False, markup=False, emoji=False)
    for renderable in renderables:
        console.print(renderable)
