"""Commands called in this process, with their errors as values, and in one of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import IO, Any, NamedTuple

import pytest

from so_tui.cli import _call
from so_tui.commands.parser import build_parser
from so_tui.launch.slurm import client
from so_tui.spec import InputError


class Called(NamedTuple):
    code: int
    out: str
    err: str


Call = Callable[..., Called]


def in_a_process(
    *argv: str, stdout: IO[str] | int = subprocess.PIPE, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Call a command in a process of its own, whose options are ``more``."""
    called = [sys.executable, "-P", "-m", "so_tui", *argv]
    return subprocess.run(
        called, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False, **more
    )


def problems_of(*argv: str) -> list[tuple[str, str, str]]:
    """Call a command whose input is wrong; return code, field and value of each problem."""
    with pytest.raises(InputError) as caught:
        _call(build_parser().parse_args(argv))
    return [(problem.code, problem.field, problem.value) for problem in caught.value.problems]


def forget_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Slurm asked again which cluster this is, during a test."""
    monkeypatch.setattr(client, "_silence", [])
    monkeypatch.setattr(client, "cluster_name", cache(client.cluster_name.__wrapped__))
