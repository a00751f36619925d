"""What the screen tells of runs: once, in fixed words, and only of the user's own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from so_tui.runs.records import Alert
from so_tui.settings import AlertSettings, Settings
from so_tui.ui.shared_app import _Announcer, _notification
from tests.support.make_run import write_run
from tests.support.records import change_state
from tests.support.screen import opened

CONTROLS = re.compile(
    r"\x1b\[22;2t|\x1b\[23;2t|\x07|\x1b\]2;[^\x00-\x1f\x7f]*\x1b\\|\x1b\]9;[^\x00-\x1f\x7f;]*\x1b\\"
)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    written: list[str] = []
    monkeypatch.setattr(_Announcer, "write_to_terminal", lambda _, text: written.append(text))
    monkeypatch.setattr("so_tui.ui.app.RUNS_POLL_S", 0.1)
    for name in ("TMUX", "VTE_VERSION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    return written


async def test_an_alert_is_announced_once_in_fixed_words(runs_dir: Path, sent: list[str]) -> None:
    run = write_run(runs_dir, steps=3, name="evil\x1b]52;c;eA==\x07;x")
    old = alert("loss", value=9.0, bound=3.0)
    change_state(run, alerts=(old,))
    async with opened(runs_dir) as ui:
        await ui.until(lambda: any("\x1b]2;so-tui: evil" in text for text in sent))
        assert not ui.notes()
        change_state(
            run, reason="\x1b]0;x\x07", alerts=(old, alert("\x1b[2J"), alert("not-finite"))
        )
        await ui.until(lambda: "\a" in "".join(sent))
        await ui.until(lambda: any("not finite" in note for note in ui.notes()))
        change_state(run, heartbeat=99)
        await ui.pilot.pause(0.4)
        assert len(ui.notes()) == 1
        await ui.press("q")
    everything = "".join(sent)
    assert everything.count("\x1b]9;") == 1
    assert CONTROLS.sub("", everything) == ""
    assert everything.endswith("\x1b[23;2t")


def alert(kind: str, **more: float) -> Alert:
    return Alert(kind=kind, attempt=1, time=2.0, step=3, **more)


async def test_others_runs_and_unwanted_kinds_are_not_announced(
    runs_dir: Path, sent: list[str]
) -> None:
    mine, theirs = (write_run(runs_dir, steps=3, name=name) for name in ("mine", "theirs"))
    theirs.path.chmod(0o777)
    quiet = Settings(alerts=AlertSettings(bell=False, notify="off", title=False, on=("failed",)))
    async with opened(runs_dir, settings=quiet) as ui:
        await ui.until(lambda: len(ui.app.runs) == 2)
        for run in (mine, theirs):
            change_state(run, state="failed", alerts=(alert("loss"), alert("failed")))
        await ui.until(lambda: ui.notes())
        await ui.pilot.pause(0.3)
        assert ui.notes() == ["mine has failed at step 3"]
    assert "".join(sent) == ""


def test_each_terminal_gets_its_notification() -> None:
    osc9, osc777 = "\x1b]9;so-tui: x\x1b\\", "\x1b]777;notify;so-tui;so-tui: x\x1b\\"
    in_tmux = "\x1bPtmux;\x1b\x1b]9;so-tui: x\x1b\x1b\\\x1b\\"
    for how, environ, expected in (
        ("auto", {"TERM": "xterm-kitty"}, osc9),
        ("auto", {"TERM": "foot"}, osc777),
        ("osc777", {"TERM": "xterm"}, osc777),
        ("auto", {"TERM": "tmux-256color", "TMUX": "1"}, in_tmux),
        ("auto", {"TERM": "linux"}, ""),
        ("off", {"TERM": "xterm"}, ""),
    ):
        assert _notification("so-tui: x", how, environ) == expected


async def test_an_unreadable_run_is_not_announced_as_failed(
    runs_dir: Path, sent: list[str]
) -> None:
    run = write_run(runs_dir, steps=3, name="away")
    async with opened(runs_dir) as ui:
        await ui.until(lambda: ui.app.runs and ui.app.runs[0].live)
        elsewhere = run.state_path.rename(run.path / "elsewhere")
        await ui.until(lambda: not ui.app.runs[0].readable)
        assert not ui.notes()
        elsewhere.rename(run.state_path)
        await ui.until(lambda: ui.app.runs[0].live)
        assert not ui.notes()
        change_state(run, state="lost")
        await ui.until(lambda: len(ui.notes()) == 1)
