"""A pytest plugin that keeps tests in their tier: a test that launches ranks must be marked ``slow`` (or ``smoke``, ``system``, ``gpu``).

Tiers are markers, described in CONTRIBUTING.md. The plugin watches the processes that the test process starts, directly: a launch in a
grandchild goes unnoticed, so commands that train in a process of their own are recognised by their arguments.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import PurePath

import pytest

LAUNCHING_TIERS = ("slow", "smoke", "system", "gpu")
_TRAINING_COMMANDS = {"run", "resume", "supervise", "validate"}
_started: list[list[str]] = []


def launches_ranks(argv: Sequence[str]) -> bool:
    """Return whether a process with these arguments starts training processes."""
    if any(
        argument.startswith("deepspeed.launcher") or PurePath(argument).name == "deepspeed"
        for argument in argv
    ):
        return True
    if "--dry-run" in argv or "--help" in argv:
        return False
    ours = [
        index
        for index, argument in enumerate(argv)
        if argument == "so_tui" or PurePath(argument).name == "so-tui"
    ]
    return bool(ours) and (
        bool(_TRAINING_COMMANDS & set(argv[ours[0] + 1 : ours[0] + 2])) or "--probe" in argv
    )


def _note_process(event: str, arguments: tuple[object, ...]) -> None:
    if event == "subprocess.Popen":
        argv = arguments[1]
        if isinstance(argv, list | tuple):
            _started.append(
                [
                    os.fsdecode(argument)
                    for argument in argv
                    if isinstance(argument, str | bytes | os.PathLike)
                ]
            )


def pytest_configure() -> None:
    """Watch every process that is started from here on; an audit hook cannot be removed."""
    sys.addaudithook(_note_process)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Forget the test before; the fixtures of this one are set up after this."""
    _started.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Fail a test that launched ranks, itself or in a fixture, without a marker that says so."""
    yield
    if not any(item.get_closest_marker(tier) for tier in LAUNCHING_TIERS):
        launched = [argv for argv in _started if launches_ranks(argv)]
        assert not launched, f"this test launches ranks: mark it `slow`. It started {launched[0]}"
