"""A plugin that keeps tests in their tier: one that launches ranks must be marked ``slow``.

It watches the processes that tests start, directly, and tells the CPU seconds of a session.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import PurePath

import pytest

LAUNCHING_TIERS = ("slow", "smoke", "system", "gpu")
LONGEST = (
    "tests/test_smoke.py",
    "tests/slurm/",
    "tests/trainer/test_runs.py",
    "tests/launch/test_supervisor.py",
    "tests/system/",
    "tests/trainer/test_architectures.py",
    "tests/ui/",
    "tests/superoffload/",
    "tests/trainer/",
)
"""What several workers begin with, so that none is busy with one when the others end."""
_TRAINING_COMMANDS = {"run", "resume", "supervise", "validate"}
_started: list[list[str]] = []


def launches_ranks(argv: Sequence[str]) -> bool:
    """Return whether a process with these arguments starts training processes."""
    names = [PurePath(argument).name for argument in argv]
    if "deepspeed" in names or any(each.startswith("deepspeed.launcher") for each in argv):
        return True
    ours = next((at for at, name in enumerate(names) if name in ("so_tui", "so-tui")), None)
    if ours is None or {"--dry-run", "--help"} & {*argv}:
        return False
    return "--probe" in argv or bool(_TRAINING_COMMANDS & {*argv[ours + 1 : ours + 2]})


def _note_process(event: str, arguments: tuple[object, ...]) -> None:
    if event == "subprocess.Popen" and isinstance(argv := arguments[1], list | tuple):
        texts = (each for each in argv if isinstance(each, str | bytes | os.PathLike))
        _started.append([os.fsdecode(each) for each in texts])


def pytest_addoption(parser: pytest.Parser) -> None:
    help = (
        "fail when the session, with its workers and the processes that they started, takes more "
        "CPU seconds"
    )
    parser.addoption("--cpu-limit", type=float, metavar="SECONDS", help=help)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let several workers begin with what takes longest. The tests of a file stay together."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: [not item.nodeid.startswith(name) for name in LONGEST])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Fail an otherwise successful session that exceeded its limit; workers have ended by then."""
    yield
    limit = session.config.getoption("--cpu-limit")
    if limit is not None and cpu_s() > limit and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    limit = config.getoption("--cpu-limit")
    bound = "" if limit is None else f", limit {limit:.0f} s"
    terminalreporter.line(f"CPU time of all processes: {cpu_s():.0f} s{bound}")


def cpu_s() -> float:
    """Return the CPU seconds of this process and of all that it and its children waited for."""
    return sum(os.times()[:4])


def pytest_configure() -> None:
    """Watch every process that is started from here on; an audit hook cannot be removed."""
    sys.addaudithook(_note_process)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Forget the test before, and skip one that needs a CUDA device where there is none."""
    _started.clear()
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Fail a test that launched ranks, itself or in a fixture, without a marker that says so."""
    yield
    if not any(item.get_closest_marker(tier) for tier in LAUNCHING_TIERS):
        launched = [argv for argv in _started if launches_ranks(argv)]
        assert not launched, f"this test launches ranks: mark it `slow`. It started {launched[0]}"
