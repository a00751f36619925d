"""Commands called in this process, with their errors as values."""

from __future__ import annotations

from functools import cache

import pytest

from so_tui.cli import _call
from so_tui.commands.parser import build_parser
from so_tui.launch.slurm import client
from so_tui.spec import InputError, Refused


def problems_of(*argv: str) -> list[tuple[str, str, str]]:
    """Call a command whose input is wrong; return code, field and value of each problem."""
    with pytest.raises(InputError) as caught:
        _call(build_parser().parse_args(argv))
    return [(problem.code, problem.field, problem.value) for problem in caught.value.problems]


def refusals_of(*argv: str) -> tuple[str, ...]:
    """Call a command that must be refused, and return the codes of the refusals."""
    with pytest.raises(Refused) as caught:
        _call(build_parser().parse_args(argv))
    return caught.value.codes


def forget_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Slurm asked again which cluster this is, during a test."""
    monkeypatch.setattr(client, "_silence", [])
    monkeypatch.setattr(client, "cluster_name", cache(client.cluster_name.__wrapped__))
