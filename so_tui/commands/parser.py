"""The command line's arguments, made of ``commands.toml``. ``handler`` of a parsed command names
its function as ``module:function`` in this package.
"""

from __future__ import annotations

import argparse
import math
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

from so_tui.launch import DEFAULT_GRACE_S

EXIT_CODES = {
    0: "done",
    1: "the run failed",
    2: "wrong usage or input",
    3: "refused (does not fit or cannot run here)",
    4: "stopped by the user",
    130: "interrupted before anything started",
}
_CODES = [f"{code} {meaning}" for code, meaning in EXIT_CODES.items()]
EPILOG = f"""\
exit codes: {", ".join(_CODES[:4])},
            {", ".join(_CODES[4:])}

first steps: so-tui inspect        what this machine has
             so-tui plan           what it can train
             so-tui run tiny       one minute of real training, anywhere
"""
INTERNAL = ("supervise",)
"""Commands that other commands call, and users do not."""
_ANYWHERE = ("machine", "output")
"""Groups of options that may also stand before the command: without a default, which would replace
what was given there.
"""


class _ShowVersion(argparse.Action):
    """Prints the version when it is asked for: finding the commit starts git in a checkout."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        from so_tui.version import version_text

        print(version_text())
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    table = tomllib.loads(Path(__file__).with_name("commands.toml").read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(
        prog="so-tui",
        description=(
            "Plan, launch and watch full-parameter fine-tuning with DeepSpeed SuperOffload. "
            "Without a command, opens the screen."
        ),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action=_ShowVersion, nargs=0, help="show version and commit, and exit"
    )
    shared, same = table["shared"], table["same"]
    for name in _ANYWHERE:
        _add_arguments(parser, shared[name], same)
    parser.set_defaults(parser=parser, handler="run:open_screen", runs_dir=None, takes_machine=True)
    groups = {}
    for name, arguments in shared.items():
        groups[name] = argparse.ArgumentParser(
            add_help=False, argument_default=argparse.SUPPRESS if name in _ANYWHERE else None
        )
        _add_arguments(groups[name], arguments, same)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, given in table["commands"].items():
        text = given["help"]
        command = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            parents=[groups[group] for group in given["shares"]],
        )
        if "epilog" in given:
            command.formatter_class = argparse.RawDescriptionHelpFormatter
            command.epilog = given["epilog"]
        _add_arguments(command, given.get("arguments", {}), same)
        command.set_defaults(
            parser=command,
            handler=given["handler"],
            takes_machine="machine" in given["shares"],
        )
    commands.choices["stop"].set_defaults(grace=DEFAULT_GRACE_S)
    return parser


def _add_arguments(
    parser: argparse.ArgumentParser, arguments: dict[str, Any], same: dict[str, Any]
) -> None:
    """Add arguments as ``commands.toml`` describes them, or ``same`` under their names."""
    alternatives = None
    for names, given in arguments.items():
        options = dict(same[given] if isinstance(given, str) else given)
        if options.pop("flag", False):
            options["action"] = "store_true"
        if options.pop("many", False):
            options |= {"action": "append", "default": []}
        if "type" in options:
            options["type"] = _TYPES[options["type"]]
        for kind in (int, float):
            if bounds := options.pop(kind.__name__, None):
                options["type"] = partial(_number, kind, *bounds)
        if alternative := options.pop("alternative", ""):
            alternatives = alternatives or parser.add_mutually_exclusive_group(
                required=alternative == "required"
            )
            alternatives.add_argument(*names.split(), **options)
        else:
            parser.add_argument(*names.split(), **options)


def _number(kind: type[int] | type[float], lowest: float, highest: float, text: str) -> float:
    """Return the number that a text is: a finite one within a range, bounds included."""
    try:
        value = kind(text)
    except ValueError:  # also for integers of thousands of digits
        value = math.nan
    if not lowest <= value <= highest:  # also true for NaN
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is not an integer from {lowest:,d} to {highest:,d}"
            if kind is int
            else f"{text[:40]!r} is not a number from {lowest:,g} to {highest:,g}"
        )
    return value


def _run_name(text: str) -> str:
    from so_tui.runs.listing import checked_name
    from so_tui.spec.errors import InputError

    try:
        return checked_name(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _folder(text: str) -> Path:
    from so_tui.spec.check import path_fault

    if fault := path_fault(text):
        raise argparse.ArgumentTypeError(fault)
    return Path(text)


_TYPES = {"file": Path, "folder": _folder, "run-name": _run_name}
"""By the name that ``commands.toml`` has for them."""
