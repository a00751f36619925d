"""``trust``: whose Python code the user lets run; and the question where a command needs it."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from so_tui.commands.common import agreed, can_ask, print_json, print_note
from so_tui.spec.check import is_folder, path_fault
from so_tui.spec.consents import NOT_TRUSTED, allow, consents, is_allowed, revoke
from so_tui.spec.errors import InputError, reject, shown, some
from so_tui.trust.text import printable_line


def trust(arguments: Namespace) -> int:
    """List what the user allowed; allow the code of a source, or take that back."""
    source = arguments.source
    if not source:
        if arguments.yes or arguments.revoke:
            option = "--yes" if arguments.yes else "--revoke"
            raise reject("missing", "SOURCE", "", f"is missing, which {option} needs", _REMEDY)
        _list(json=arguments.json)
        return 0
    if fault := path_fault(source):
        raise reject("invalid-path", "SOURCE", shown(source), fault, _REMEDY)
    if arguments.revoke:
        folder = Path(source)
        if not revoke(str(folder.absolute()) if is_folder(folder) else source.partition("@")[0]):
            raise reject(
                "not-trusted",
                "SOURCE",
                source,
                "is not among what you trust",
                "`so-tui trust` lists that.",
            )
        print(printable_line(f"no longer trusted: {source}"))
        return 0
    from so_tui.launch.helper_jobs import code_of

    code = code_of(source)
    files = some(code.files) or "no Python code"
    if not is_allowed(code):
        if code.files and not arguments.yes:
            raise code.refusal("SOURCE", "--yes")  # on a terminal the user is asked then
        allow(code)
    print(printable_line(f"trusted: {code.name} (SHA-256 {code.hash}: {files})"))
    return 0


_REMEDY = "Give a hub id such as owner/name, owner/name@REVISION, or a folder."


def _list(*, json: bool) -> None:
    found = consents()
    if json:
        print_json(found)
    elif found:
        for each in found:
            print(printable_line(f"{each.date}  {each.hash}  {each.source}"))
    else:
        print_note("You trust no model's code. `so-tui trust SOURCE` shows and allows it.")


def asked_to_allow(error: InputError) -> bool:
    """Ask on the terminal whether to allow the code that a command has refused, and record a yes.
    Return whether the user said yes; False without a terminal, or if something else is wrong as
    well.
    """
    if not can_ask() or any(problem.code != NOT_TRUSTED for problem in error.problems):
        return False
    from so_tui.launch.helper_jobs import refused_code

    for code in refused_code(error):
        for line in code.lines():
            print(printable_line(line), file=sys.stderr)
        if not agreed("Have you read it, and do you trust it?"):
            return False
        allow(code)
    return True
