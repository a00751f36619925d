"""The Machine screen: this host at work, as a tree, its software, doctor's findings, validation."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from textual.containers import Vertical
from textual.widget import Widget
from textual.widgets import Markdown, Static

from so_tui.folders import validation_dir
from so_tui.launch.supervisor.samples import HostProcess
from so_tui.ui.app import SoTuiApp
from so_tui.ui.charts.chart import Chart
from so_tui.ui.machine import validation
from so_tui.ui.machine.host import HostPanel, _process_lines
from so_tui.ui.machine.screen import MachineScreen
from so_tui.ui.numa_nodes import NumaNodes
from so_tui.validation import report as reports
from so_tui.validation.report import Outcome
from tests.support.make_run import quad_machine, write_run
from tests.support.pictured import FixedMonitor
from tests.support.screen import SIZES, Driver, opened, rows_of
from tests.validation.test_report import REPORT, trained


@pytest.fixture(autouse=True)
def _sampled_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("so_tui.ui.machine.screen.SAMPLE_S", 0.2)
    monkeypatch.setattr("so_tui.ui.machine.host._PROCESSES_S", 0.3)


@pytest.fixture
def bound_child() -> Iterator[tuple[int, int]]:
    """Start a process that computes on one core. Return its pid and that core."""
    core = min(os.sched_getaffinity(0))
    program = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", program]) as child:
        try:
            yield child.pid, core
        finally:
            child.kill()


def offered(ui: Driver) -> set[str]:
    """Return which keys of the half that describes the machine are in force."""
    active = [key for key in ui.screen.active_bindings.values() if key.enabled]
    own = {"copy", "distances", "inspect_again", "hardware"}
    return own & {key.binding.action for key in active}


@pytest.mark.parametrize("size", [*SIZES, pytest.param((200, 50), marks=pytest.mark.slow)])
async def test_this_host_is_sampled_while_it_is_shown(
    runs_dir: Path, size: tuple[int, int], bound_child: tuple[int, int]
) -> None:
    pid, core = map(str, bound_child)
    async with opened(runs_dir, size, this_machine=True) as ui:
        await ui.press("5")
        nodes, screen = ui.find("NumaNodes", NumaNodes), ui.screen
        assert isinstance(screen, MachineScreen)
        await ui.until(lambda: nodes.pictures and nodes.pictures[0].view.load[0].length >= 2)
        assert max(load for picture in nodes.pictures for load in picture.view.sample.cores) > 0
        if len(os.sched_getaffinity(0)) > 1:
            await ui.until(lambda: pid in ui.shown("#processes").split())
            rows = [line.split() for line in ui.shown("#processes").splitlines()]
            (row,) = (row for row in rows if row[:1] == [pid])
            assert row[5] == core
            assert row[6].startswith("python"), "what it runs"
        assert screen.sample_soon()
        await ui.press("1")
        await ui.presets()
        assert not screen.sample_soon(), "only while it is shown"
        await ui.press("5", "h")
        await ui.until(
            lambda: nodes.plot == "cores" and any(row.startswith("o ") for row in rows_of(nodes))
        )
        about = ui.find("#about", Vertical)
        both = size[0] >= 160
        assert about.display == both, "both halves where there is room"
        own = {"copy", "distances"} if both else {"hardware"}
        assert offered(ui) == own | {"inspect_again"}
        await ui.press("H")
        await ui.until(lambda: about.display and ui.find("#tree", Static).region.area > 0)
        assert {"copy", "distances"} <= offered(ui)


async def test_a_sample_that_comes_during_a_resize_is_drawn_after_it(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("so_tui.ui.machine.screen.Monitor", FixedMonitor)
    machine = replace(quad_machine(), live=True)
    view = FixedMonitor(machine).poll()
    async with opened(runs_dir, (200, 50), machine=machine) as ui:
        await ui.press("5")
        panel = ui.find("HostPanel", HostPanel)
        await ui.until(lambda: panel.query(Chart))
        panel.first += 1
        await asyncio.gather(panel.show(view), panel.show(view))
        assert len(panel.query(Chart)) == 2


async def test_a_screen_chosen_before_the_first_paint_is_loaded(runs_dir: Path) -> None:
    app = SoTuiApp(runs_dir=runs_dir, open_run=write_run(runs_dir, steps=2))
    async with app.run_test() as pilot:
        app.action_show("machine")
        await Driver(app, pilot).until(lambda: app.machine is not None)


def shown(processes: list[HostProcess], width: int) -> list[str]:
    return _process_lines(processes, width, 5).plain.splitlines()


def test_users_of_gpus_are_listed_with_what_they_use() -> None:
    own = ("python", "someone", 65.25, 90 << 30, tuple(range(72)))
    command = ("/opt/env/bin/python", "-m", "train\x1b[2J", "--steps", "9")
    training = HostProcess(7, *own, {0: 40 << 30, 2: None}, command)
    other = HostProcess(8, "tar", "root", 1.0, None, (), {})
    _, first, second = shown([training, other], 120)
    told = r"7 someone 65.2 90.0 GiB 0,2 40.0 GiB 0-71 python -m train\x1b[2J --steps 9"
    assert (first.split(), second.split()) == (told.split(), ["8", "root", "1.0", "tar"])
    assert shown([training, *[other] * 9], 120)[-1].strip() == "7 more"
    for width in range(60, 140):
        assert max(map(len, shown([training, other], width))) <= width
    heading, line = shown([HostProcess(8, "tar", "root", 1.0, None, (3,), {})], 78)
    assert "GPU" not in heading
    assert heading.index("bound") == line.rindex("3")
    assert heading.index("command") == line.rindex("tar")


# The screen of a validation: a report, one that is still written, and none.

LONG = "\x1b[31mtook longer than 165 s " * 9
OUTCOMES = (
    *REPORT.outcomes,
    trained("losses-gpu", (8.0, 7.0), 1.0, losses_only=True),
    trained("losses-2", (8.0, None), 1.0, losses_only=True),
    Outcome(key="hung", title="one that hung", estimate_s=9, state="timed-out", reason=LONG),
)
FULL = replace(REPORT, outcomes=OUTCOMES, agreement=reports._agreement_of(OUTCOMES))


async def test_a_report_can_be_read_whole_in_a_small_terminal(runs_dir: Path) -> None:
    reports.write(validation_dir(), FULL)
    async with opened(runs_dir, (80, 24)) as ui:
        await ui.press("5", "e")
        await ui.until(lambda: ui.screen.query("_Table Static"))
        tables = [*ui.screen.query("_Table Static").results(Static)]
        await ui.until(lambda: all(table.size for table in tables))
        drawn = [line.text for table in tables for line in table.render_lines(table.size.region)]
        assert any("DeepSpeed's" in line for line in drawn)
        assert not [line for line in drawn if "…" in line]
        await ui.press("right")
        await ui.until(lambda: ui.find("#report-body", Widget).scroll_x > 0)
        text = ui.find("#report", Markdown).source
        assert all(reason in text for reason in ("timed-out", "left-out", "not finite"))
        assert "\x1b" not in text


async def test_a_slowly_read_report_is_shown_and_a_changed_one_read_again(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading takes longer than the time after which it is read again, as on slow disks."""
    begun, ended, own_read = threading.Event(), threading.Event(), reports.read
    calls = []

    def read(folder: Path) -> reports.Report | None:
        calls.append(folder)
        begun.set()
        ended.wait(60)
        return own_read(folder)

    monkeypatch.setattr(validation, "READ_EVERY_S", 0.01)
    monkeypatch.setattr(reports, "read", read)
    reports.write(validation_dir(), FULL)
    async with opened(runs_dir, (80, 24)) as ui:
        await ui.press("5", "e")
        await ui.until(begun.is_set)
        await asyncio.sleep(0.2)
        assert len(calls) == 1
        ended.set()
        await ui.until(lambda: "parts measured" in ui.shown("#report-status"))
        (validation_dir() / reports.FILE).unlink()
        await ui.until(lambda: "no report yet" in ui.shown("#report-status"))
        (validation_dir() / reports.FILE).write_text("{")
        await ui.until(lambda: "is no report" in ui.shown("#report-status"))
