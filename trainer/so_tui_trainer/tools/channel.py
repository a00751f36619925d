"""How a helper process answers: a request on stdin, or one in each line; lines of JSON on stdout, everything else on stderr."""

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
    """Answer the request on stdin.

    Problems that a user can solve are an answer too: ``{"problems": [...], "done": true}``, with exit code 2 (or the error's own).

    Args:
        work: Yields the answers to a request.

    Returns:
        The exit code.
    """
    return serve_lines(lambda lines: work(json.loads("".join(lines))))


def serve_lines(work: Callable[[Iterator[str]], Iterator[Answer]]) -> int:
    """Answer requests on stdin as they come, one in each line; otherwise like ``serve``."""
    # Libraries print to stdout, which is reserved for answers.
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    code = 0
    try:
        for answer in work(iter(sys.stdin.readline, "")):
            stream.write(json.dumps(answer) + "\n")
            stream.flush()
    except (SoTuiError, OffloadError) as error:
        stream.write(json.dumps({"problems": problems_json(error), "done": True}) + "\n")
        print(error, file=sys.stderr)
        code = error.exit_code if isinstance(error, SoTuiError) else 1
    stream.close()
    return code


def requested_spec(request: Answer) -> RunSpec:
    """Return the spec of a request.

    Raises:
        InputError: It is not valid.
    """
    return check_tree(request["spec"])


def problems_json(error: SoTuiError | OffloadError) -> list[Answer]:
    """Return the problems of an error as plain values; one problem without a field if the error has none."""
    code = error.code if isinstance(error, OffloadError) and error.code else "error"
    found = (
        error.problems
        if isinstance(error, InputError)
        else (Problem(code=code, field="", value="", message=str(error), remedy=""),)
    )
    problems: list[Answer] = msgspec.to_builtins(found)
    return problems
