"""``completion``, and the words that a shell offers when TAB is pressed.

The shell waits for them. So nothing here imports msgspec, and the keys of presets and the machines
are read from ``words.json``, which ``tools/words.py`` generates.

Only plain words are offered: those that every shell reads as themselves. No name of a file that
others wrote is ever quoted or expanded, and of a run's folder only its name is read, and whether it
contains a spec.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import argcomplete
from argcomplete.completers import BaseCompleter, FilesCompleter
from argcomplete.shell_integration import shellcode

from so_tui.commands.parser import INTERNAL
from so_tui.folders import builtin_folder, known_runs_dirs, user_folder
from so_tui.trust.files import read_bounded

_FILES = ("PRESET|FILE", "PRESET|FILE|add", "NAME|FILE", "RUN", "DIR")
"""Arguments, as the parser's metavars name them, that may be a path."""
_LARGEST_PRESET_BYTES = 1 << 20
_COMPLETION_S = 1.0
"""How long a folder of runs may take: somebody waits."""
_FIRST_SECTION = re.compile(r"^\s*\[", re.MULTILINE)
_NAME_KEY = re.compile(r"""^\s*name\s*=\s*["']([^"'\n]*)["']""", re.MULTILINE)


def completion(arguments: Namespace) -> int:
    """Print the code with which a shell completes command lines of so-tui. It calls the so-tui of
    PATH, whichever one is typed.
    """
    print(shellcode(["so-tui"], shell=arguments.shell, argcomplete_script="so-tui"), end="")
    return 0


def offer_words(parser: argparse.ArgumentParser) -> None:
    """Write the words that complete the line in ``COMP_LINE`` to file descriptor 8, as
    argcomplete's shell code expects, and exit.
    """
    argcomplete.autocomplete(
        parser, always_complete_options=False, exclude=INTERNAL, default_completer=_Words()
    )


class _Words(BaseCompleter):
    """Completes the arguments that have no ``choices``."""

    def __call__(
        self,
        *,
        prefix: str,
        action: argparse.Action,
        parser: argparse.ArgumentParser,
        parsed_args: Namespace,
    ) -> Mapping[str, str]:
        """Return the plain words, with their descriptions, that an argument may be; those of files
        if no other one begins so.
        """
        metavar = str(action.metavar)
        found = {
            word: text
            for word, text in _words(metavar, prefix, parsed_args)
            if word.startswith(prefix)
        }
        if not found and (
            metavar in _FILES or (metavar == "MODEL" and parsed_args.preset == "add")
        ):
            found = dict.fromkeys(FilesCompleter()(prefix), "")
        return {
            word: text
            for word, text in found.items()
            if shlex.quote(word) == word and not word.startswith("-")
        }


def _words(metavar: str, prefix: str, parsed: Namespace) -> Iterable[tuple[str, str]]:
    """Return the words of an argument other than paths; perhaps also some that do not begin with
    the prefix.
    """
    match metavar:
        case "A.B=VALUE":
            return _settings(prefix)
        case "MACHINE" | "NAME|FILE":
            return tuple(_described()["machines"].items())
        case "PRESET|FILE" | "PRESET|FILE|add":
            adds = [("add", "make a preset from a model")] if metavar.endswith("add") else []
            return [*((name, "") for name in _presets()), *adds]
        case "RUN":
            folders = (parsed.runs_dir,) if getattr(parsed, "runs_dir", None) else known_runs_dirs()
            return [
                ("latest", "the newest run"),
                *((name, "") for folder in folders for name in _runs(folder, prefix)),
            ]
    return ()


def _settings(prefix: str) -> Iterator[tuple[str, str]]:
    """Yield the keys that ``--set`` takes (``offload.ratio=``), or the values of a key that takes
    only some.
    """
    key, equals, _ = prefix.partition("=")
    keys = _described()["keys"]
    if not equals:
        yield from ((f"{name}=", about["description"]) for name, about in keys.items())
    elif key in keys:
        yield from ((f"{key}={value}", "") for value in keys[key]["values"])


def _described() -> Any:
    return json.loads(Path(__file__).with_name("words.json").read_bytes())


def _presets() -> Iterator[str]:
    """Yield the names of the built-in presets and the user's, whether or not the rest of their
    files is valid.
    """
    yield from (path.stem for path in builtin_folder().glob("*.toml"))
    for path in user_folder().glob("*.toml"):
        with suppress(OSError):
            # Parsing TOML takes too long where there are many presets with parameter tables.
            top = _FIRST_SECTION.split(
                read_bounded(path, _LARGEST_PRESET_BYTES).decode(errors="replace"), maxsplit=1
            )[0]
            named = _NAME_KEY.search(top)
            yield named[1] if named else path.stem


def _runs(folder: Path, prefix: str) -> Iterator[str]:
    """Yield the names of the runs of a folder that begin with the prefix; none if it cannot be
    read.
    """
    deadline = time.monotonic() + _COMPLETION_S
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in takewhile(lambda _: time.monotonic() < deadline, entries):
            if entry.name.startswith(prefix) and os.access(f"{entry.path}/spec.json", os.F_OK):
                yield entry.name
