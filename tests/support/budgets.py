"""A pytest plugin that measures every test file and, when asked, fails a session whose files take too long.

``tests/budgets.toml`` holds the budgets: wall-clock seconds on two idle cores, for a file about twice what it takes there. A file that is
not listed has the default budget. Tiers have budgets too, for a whole session. A busy or slow machine must not fail a session, so each
measurement is divided by how much slower than the reference a short loop of plain Python ran meanwhile.
"""

from __future__ import annotations

import time
import tomllib
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

    def tier_exceeded(self, tier: str | None, seconds: float) -> bool:
        """Return whether a session took longer than its tier may."""
        return tier is not None and seconds > self.tiers[tier]


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
    """Attributes the time of a session to its test files, from the reports of all workers."""

    def __init__(self) -> None:
        self.times: dict[str, FileTime] = {}
        self._slowness: dict[str, float] = {}
        self._started = time.perf_counter()
        self._slowness_at_start = slowness()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one phase of a test, fixtures included; calibrate at the first report of each file."""
        file = report.nodeid.partition("::")[0]
        if file not in self.times:
            self.times[file] = FileTime()
            self._slowness[file] = slowness()
        taken = self.times[file]
        taken.tests += report.when == "setup"
        taken.seconds += report.duration
        taken.scaled += report.duration / self._slowness[file]

    def session_s(self) -> float:
        """Return the wall-clock seconds since the session began, on the reference machine."""
        return (time.perf_counter() - self._started) / max(self._slowness_at_start, slowness())


def slowness() -> float:
    """Return how many times slower than the reference this machine is now; at least 1, so that a fast machine gains no budget."""
    return max(1.0, timed_loop() / LOOP_S)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--budgets``."""
    parser.addoption(
        "--budgets",
        choices=("off", "report", "enforce"),
        default="off",
        help="report the slowest test files beside their budgets (tests/budgets.toml), or also fail when one takes longer",
    )
    parser.addoption(
        "--tier",
        metavar="NAME",
        help="with --budgets: the tier whose budget counts for the whole session",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Measure where a report was asked for."""
    if config.getoption("--budgets") != "off" and not hasattr(
        config, "workerinput"
    ):  # workers report to the session that started them
        config.stash[_METER] = meter = Meter()
        config.stash[_BUDGETS] = read_budgets()
        config.pluginmanager.register(meter, "file-budgets")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let several workers begin with the files that take longest, so that none is still busy with one when the others have ended."""
    if hasattr(config, "workerinput"):
        budgets = read_budgets()
        items.sort(
            key=lambda item: -budgets.of(item.nodeid.partition("::")[0])
        )  # a stable sort: the tests of a file stay together


_METER = pytest.StashKey[Meter]()
_BUDGETS = pytest.StashKey[Budgets]()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail an otherwise successful session when budgets are enforced and exceeded."""
    meter = session.config.stash.get(_METER, None)
    if (
        meter is None
        or session.config.getoption("--budgets") != "enforce"
        or exitstatus != pytest.ExitCode.OK
    ):
        return
    budgets = session.config.stash[_BUDGETS]
    if budgets.exceeded(meter.times) or budgets.tier_exceeded(
        session.config.getoption("--tier"), meter.session_s()
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
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
            terminalreporter.line(
                f"{taken.seconds:7.1f} s  budget {budgets.of(file):5.0f} s  {taken.tests:4} tests  {file}{note}"
            )
    if tier := config.getoption("--tier"):
        scaled = meter.session_s()
        note = "  OVER BUDGET" if budgets.tier_exceeded(tier, scaled) else ""
        terminalreporter.line(
            f"tier {tier}: {scaled:.0f} s at reference speed, budget {budgets.tiers[tier]:.0f} s{note}"
        )
    if over:
        terminalreporter.line(
            "Make these tests faster, or raise the budget in tests/budgets.toml with a reason in the commit."
        )
