"""The command line's arguments, made of ``commands.toml``. ``handler`` of a parsed command names
its function as ``module:function`` in this package.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import tomllib
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn

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


_MEANT = {
    **dict.fromkeys(("train", "start", "launch", "finetune", "submit"), "run"),
    **dict.fromkeys(("ls", "list", "ps", "status", "queue"), "runs"),
    **dict.fromkeys(("kill", "cancel", "end", "quit"), "stop"),
    **dict.fromkeys(("attach", "monitor", "top", "show"), "watch"),
    **dict.fromkeys(("log", "tail"), "logs"),
    **dict.fromkeys(("continue", "restart"), "resume"),
    **dict.fromkeys(("info", "hardware", "machine"), "inspect"),
    **dict.fromkeys(("check", "diagnose", "env"), "doctor"),
    **dict.fromkeys(("download", "pull"), "fetch"),
    **dict.fromkeys(("models", "preset"), "presets"),
    **dict.fromkeys(("estimate", "dry-run"), "plan"),
    **dict.fromkeys(("config", "configure"), "settings"),
    **dict.fromkeys(("infer", "sample"), "generate"),
    **dict.fromkeys(("diff",), "compare"),
    **dict.fromkeys(("dataset", "preview"), "data"),
}
"""Words of other tools, by the command that does the same here."""


class _Parser(argparse.ArgumentParser):
    """The parser of the whole line, which knows what was meant by a word that is no command."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        word = _command_in(self._words)
        if not word or word in _table()["commands"]:
            super().error(message)
        from so_tui.spec.errors import shown

        self.exit(2, f"so-tui: {shown(word)} is not a command. {_meant(word)}\n")


class _ShowVersion(argparse.Action):
    """Prints the version when it is asked for: finding the commit starts git in a checkout."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        from so_tui.version import version_text

        print(version_text())
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    table = _table()
    parser = _Parser(
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
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", parser_class=argparse.ArgumentParser
    )
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


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("commands.toml").read_text(encoding="utf-8"))


def _command_in(words: Sequence[str]) -> str:
    """Return the word in the place of the command; empty if there is none."""
    before = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    for name in _ANYWHERE:
        _add_arguments(before, _table()["shared"][name], _table()["same"])
    before.add_argument("command", nargs="?", default="")
    try:
        return str(before.parse_known_args(words)[0].command)
    except argparse.ArgumentError:  # an option lacks its value
        return ""


def _meant(word: str) -> str:
    """Return what may have been meant by a word that is no command."""
    from so_tui.spec.errors import nearest

    known = tuple(name for name in _table()["commands"] if name not in INTERNAL)
    if meant := _MEANT.get(word.lower()):
        return f"`so-tui {meant}` does that."
    if hint := nearest(word, known):
        return f"{hint}`so-tui --help` lists the commands."
    from so_tui.spec import load_catalog

    if word in load_catalog().presets:
        return f"It is a preset: `so-tui run {word}` trains it, and `so-tui plan {word}` plans it."
    return "`so-tui --help` lists the commands."


def unknown_arguments(arguments: argparse.Namespace, unknown: Sequence[str]) -> str:
    """Return what to say of arguments that a command does not have: where one is named as a key of
    a preset is, how to set that.
    """
    said = f"unrecognized arguments: {' '.join(unknown)}"
    if not hasattr(arguments, "set"):
        return said
    from so_tui.spec.keys import KEYS_MEANT, field_index

    paths = {path.rpartition(".")[2].replace("_", "-"): path for path in field_index()}
    for option, after in zip(unknown, [*unknown[1:], ""], strict=True):
        name, _, value = option.removeprefix("--").partition("=")
        name = name.replace("_", "-")
        path = KEYS_MEANT.get(name) or paths.get(name)
        if path and option.startswith("--"):
            # A word may have been taken for the preset instead, and what follows be that.
            value = value or (after if after[:1].isdigit() else "VALUE")
            said += f"\n--{name} is set with --set {shlex.quote(f'{path}={value}')}"
    return said


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
