"""Importing DeepSpeed's Muon compiles nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from superoffload.deepspeed_adapter.engine import _compiled_when_called

MUON = """
import sys, torch
compiled = []
torch.compile = lambda function: compiled.append(function) or function
from superoffload.deepspeed_adapter.engine import import_muon
early = "deepspeed.runtime.zero.muon.original_muon" in sys.modules  # versions before 0.19 import it themselves
import_muon()
from deepspeed.runtime.zero.muon import original_muon
assert early or not compiled, compiled
step = original_muon.zeropower_via_newtonschulz5(torch.eye(4), 5)
assert step.shape == (4, 4)
assert len(compiled) >= 1
from deepspeed.runtime import compiler
assert compiler.compile() is torch.compile, "as it was"
"""  # noqa: E501


@pytest.mark.slow
def test_muon_is_compiled_when_it_is_called() -> None:
    done = subprocess.run([sys.executable, "-c", MUON], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_function_is_compiled_once_at_its_first_call() -> None:
    compiled: list[str] = []

    def compile_now(function: Callable[..., int]) -> Callable[..., int]:
        compiled.append(function.__name__)
        return lambda *arguments, **keywords: -function(*arguments, **keywords)

    def added(one: int, other: int) -> int:
        return one + other

    call = _compiled_when_called(compile_now, added)
    assert (call.__name__, compiled) == ("added", [])
    assert (call(1, other=2), call(3, 4), compiled) == (-3, -7, ["added"])
