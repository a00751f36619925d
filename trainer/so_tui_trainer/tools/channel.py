"""How a helper process talks: one request on stdin, answers as lines of JSON on stdout, everything else on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from so_tui.spec import InputError, Problem, RunSpec, SoTuiError, check_tree
from superoffload.errors import OffloadError

Answer = dict[str, Any]


def serve(work: Callable[[Answer], Iterator[Answer]]) -> int:
    """Answer the request on stdin with what ``work`` yields, a line each; returns the exit code.

    What a user can mend is an answer too: ``{"problems": [...], "done": true}``, exit code 2 (or the error's own).
    """
    # Libraries print to stdout, where only answers may stand.
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    code = 0
    try:
        for answer in work(json.load(sys.stdin)):
            stream.write(json.dumps(answer) + "\n")
            stream.flush()
    except (SoTuiError, OffloadError) as error:
        stream.write(json.dumps({"problems": problems_json(error), "done": True}) + "\n")
        print(error, file=sys.stderr)
        code = error.exit_code if isinstance(error, SoTuiError) else 1
    stream.close()
    return code


def requested_spec(request: Answer) -> RunSpec:
    """The spec of a request. Raises InputError."""
    return check_tree(request["spec"])


def problems_json(error: Exception) -> list[Answer]:
    """What is wrong, as plain values; one problem without a field where the error names none."""
    found = error.problems if isinstance(error, InputError) else (Problem(field="", value="", message=str(error), remedy=""),)
    problems: list[Answer] = msgspec.to_builtins(found)
    return problems
