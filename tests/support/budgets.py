"""A pytest plugin that measures every test file and, when asked, fails a session whose files take too long.

``tests/budgets.toml`` holds the budgets: wall-clock seconds on two idle cores, for a file about twice what it takes there. A file that is
not listed has the default budget. Tiers have budgets too, for all files together. A busy or slow machine must not fail a session, so each
measurement is divided by how much slower than the reference a short loop of plain Python ran right before and after the tests of that file.
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest

BUDGETS = Path(__file__).parents[1] / "budgets.toml"
LOOP_S = 0.015
"""Seconds that ``timed_loop`` takes on the reference machine."""
_SHOWN = 12


@dataclass
class FileTime:
    """What one test file has taken so far."""

    seconds: float = 0.0
    """Wall-clock seconds, all phases of all tests."""
    scaled: float = 0.0
    """The same on the reference machine."""
    tests: int = 0


@dataclass(frozen=True)
class Budgets:
    """Seconds that test files and whole tiers may take."""

    default: float
    files: dict[str, float]
    tiers: dict[str, float]

    def of(self, file: str) -> float:
        """Return the budget of a file, given by its path relative to the repository."""
        return self.files.get(file, self.default)

    def exceeded(self, times: dict[str, FileTime]) -> dict[str, FileTime]:
        """Return the files that took longer than their budget, the slowest first."""
        over = {file: taken for file, taken in times.items() if taken.scaled > self.of(file)}
        return dict(sorted(over.items(), key=lambda item: -item[1].scaled))

    def tier_exceeded(self, tier: str | None, times: dict[str, FileTime]) -> bool:
        """Return whether all files together took longer than their tier may."""
        return tier is not None and sum(taken.scaled for taken in times.values()) > self.tiers[tier]


def read_budgets(path: Path = BUDGETS) -> Budgets:
    """Read the budgets of all files and tiers."""
    content = tomllib.loads(path.read_text())
    files = {str(file): float(seconds) for file, seconds in content["files"].items()}
    return Budgets(default=float(content["default"]), files=files, tiers=dict(content["tiers"]))


def timed_loop() -> float:
    """Return the seconds that a fixed amount of plain Python takes now."""
    begun = time.perf_counter()
    total = 0
    for number in range(400_000):
        total += number & 7
    return time.perf_counter() - begun


class Meter:
    """Attributes the time of a session to its test files."""

    def __init__(self) -> None:
        self.times: dict[str, FileTime] = {}
        self._slowness = 1.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
        """Time a test with its fixtures; calibrate at the first and the last test of a file."""
        file = file_of(item)
        taken = self.times.setdefault(file, FileTime())
        if not taken.tests:
            self._slowness = slowness()
        begun = time.perf_counter()
        result = yield
        seconds = time.perf_counter() - begun
        taken.tests += 1
        taken.seconds += seconds
        taken.scaled += seconds / self._slowness
        if nextitem is None or file_of(nextitem) != file:
            self._slowness = max(self._slowness, slowness())
            taken.scaled = min(taken.scaled, taken.seconds / self._slowness)
        return result


def slowness() -> float:
    """Return how many times slower than the reference this machine is now; at least 1, so that a fast machine gains no budget."""
    return max(1.0, timed_loop() / LOOP_S)


def file_of(item: pytest.Item) -> str:
    """Return the path of a test's file, relative to the repository."""
    return item.nodeid.partition("::")[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--budgets``."""
    parser.addoption(
        "--budgets",
        choices=("off", "report", "enforce"),
        default="off",
        help="report the slowest test files beside their budgets (tests/budgets.toml), or also fail when one takes longer",
    )
    parser.addoption("--tier", metavar="NAME", help="with --budgets: the tier whose budget counts for all tests together")


def pytest_configure(config: pytest.Config) -> None:
    """Measure where a report was asked for."""
    if config.getoption("--budgets") != "off":
        config.stash[_METER] = meter = Meter()
        config.stash[_BUDGETS] = read_budgets()
        config.pluginmanager.register(meter, "file-budgets")


_METER = pytest.StashKey[Meter]()
_BUDGETS = pytest.StashKey[Budgets]()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail an otherwise successful session when budgets are enforced and exceeded."""
    meter = session.config.stash.get(_METER, None)
    if meter is None or session.config.getoption("--budgets") != "enforce" or exitstatus != pytest.ExitCode.OK:
        return
    budgets = session.config.stash[_BUDGETS]
    if budgets.exceeded(meter.times) or budgets.tier_exceeded(session.config.getoption("--tier"), meter.times):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """List the slowest files, and every file that exceeded its budget."""
    meter = config.stash.get(_METER, None)
    if meter is None:
        return
    budgets = config.stash[_BUDGETS]
    over = budgets.exceeded(meter.times)
    slowest = sorted(meter.times.items(), key=lambda item: -item[1].seconds)
    total = sum(taken.seconds for _, taken in slowest)
    terminalreporter.section(f"test files by time ({total:.0f} s in {len(slowest)} files)")
    for file, taken in slowest:
        if file in over or slowest.index((file, taken)) < _SHOWN:
            note = f"  OVER BUDGET: {taken.scaled:.1f} s at reference speed" if file in over else ""
            terminalreporter.line(f"{taken.seconds:7.1f} s  budget {budgets.of(file):5.0f} s  {taken.tests:4} tests  {file}{note}")
    if tier := config.getoption("--tier"):
        scaled = sum(taken.scaled for taken in meter.times.values())
        note = "  OVER BUDGET" if budgets.tier_exceeded(tier, meter.times) else ""
        terminalreporter.line(f"tier {tier}: {scaled:.0f} s at reference speed, budget {budgets.tiers[tier]:.0f} s{note}")
    if over:
        terminalreporter.line("Make these tests faster, or raise the budget in tests/budgets.toml with a reason in the commit.")
