"""Alerts: what is noticed, and the user's own command, which never harms the run."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from so_tui.folders import settings_file
from so_tui.launch.command import AlertCommand
from so_tui.launch.supervisor import alerts as alerting
from so_tui.launch.supervisor.processes import ProcessTree
from so_tui.runs import RunDirectory
from so_tui.runs.liveness import read_stat
from so_tui.runs.records import Alert, MetricRecord, PhaseRecord, RunState
from so_tui.settings import ALERTS, AlertSettings
from so_tui.settings_file import change_settings
from so_tui.spec import InputError, find_preset
from tests.support.fake_runs import Runs, ended, wait_for
from tests.support.problems import raising
from tests.support.records import step_record
from tests.support.waiting import running, wait_until

TRAINING = RunState(name="r", state="training", attempt=1, step=5)
SAVING = replace(TRAINING, state="saving")
SETTINGS = AlertSettings(loss_above=3.0, stall_s=60, disk_free_gb=10)
NAN, HIGH, GOOD = (step_record(5, loss=loss) for loss in (float("nan"), 4.0, 2.0))
STEEP = step_record(6, gradient_norm=float("inf"))
LONG = step_record(1, attempt=2, step_s=100.0)
SAVES = PhaseRecord(attempt=2, time=0.0, phase="saving")
TRAINS = replace(SAVES, phase="training")


def kinds(alerts: tuple[Alert, ...]) -> list[str]:
    return [alert.kind for alert in alerts]


@pytest.mark.parametrize(
    ("attempt", "looks"),
    [
        (
            1,  # each event is noticed once, until it passes
            [
                (1, TRAINING, [NAN, NAN], ["not-finite"]),
                (2, TRAINING, [HIGH, HIGH], ["loss"]),
                (3, TRAINING, [GOOD, HIGH, NAN], ["loss", "not-finite"]),
                (62, TRAINING, [], []),
                (64, TRAINING, [], ["stall"]),
                (500, TRAINING, [], []),
                (501, TRAINING, [GOOD], []),
                (600, TRAINING, [], ["stall"]),
                (601, TRAINING, [STEEP], ["not-finite"]),
            ],
        ),
        (
            2,  # long steps and other phases are no stall, and other attempts' steps are none
            [
                (0, TRAINING, [LONG], []),
                (900, TRAINING, [], []),
                (1001, TRAINING, [], ["stall"]),
                (1002, SAVING, [LONG, SAVES], []),
                (9000, SAVING, [], []),
                (9059, TRAINING, [TRAINS], []),
                (9060, TRAINING, [NAN], []),
                (9070, SAVING, [SAVES, LONG], []),  # a full disk has not taken that it trains
                (10_071, SAVING, [], ["stall"]),
            ],
        ),
    ],
)
def test_events_of_steps_are_noticed(
    attempt: int, looks: list[tuple[float, RunState, list[MetricRecord], list[str]]]
) -> None:
    watch = alerting._AlertWatch(attempt, 0.0)
    for now, state, records, noticed in looks:
        assert kinds(watch.observe(state, records, now, SETTINGS)) == noticed
    assert watch.observe(TRAINING, [NAN], 1e5, AlertSettings(on=())) == ()


def test_full_disk_and_end_are_noticed(tmp_path: Path) -> None:
    watch, gb = alerting._AlertWatch(1, 0.0), 10**9
    for free, full, noticed in (
        ({"/a": 100 * gb, "/b": 9 * gb}, False, ["disk"]),
        ({"/a": 21 * gb // 2}, False, []),
        ({"/a": 12 * gb}, False, []),
        ({}, True, ["disk"]),
    ):
        assert kinds(watch.disks(TRAINING, free, SETTINGS, full=full)) == noticed
    found = alerting._free_bytes([str(tmp_path), str(tmp_path / "not" / "yet")])
    assert len(found) == 2
    assert found[str(tmp_path)] > 0
    ends = {"finished": "ended", "stopped": "ended", "failed": "failed", "lost": "failed"}
    for state, kind in ends.items():
        last: Any = replace(TRAINING, state=state)
        assert kinds(alerting._AlertWatch(1, 0.0).end(last, SETTINGS)) == [kind]
        assert watch.end(last, AlertSettings(on=())) == ()
    many = tuple(
        Alert(kind="loss", attempt=1, time=0, step=step) for step in range(3 * alerting.KEPT)
    )
    assert alerting.remembered((), many)[-1].step == 3 * alerting.KEPT - 1
    assert len(alerting.remembered(many, many)) == alerting.KEPT


def test_sentences_hold_nothing_that_acts_on_a_terminal() -> None:
    hostile = "a\x1b]0;owned\x07\n;x" + "\u202e" * 5 + "y" * 400
    state = replace(TRAINING, state="failed", reason="\x1b]52;c;x\x07")
    for kind in ALERTS:
        alert = Alert(kind=kind, attempt=1, time=0, step=2**53, value=1e300, bound=-1e300)
        text = alerting.alert_text(alert, hostile, state)
        assert text.startswith("so-tui: ")
        assert text.isprintable()
        assert ";" not in text
        assert len(text) < 200
    assert alerting.known(replace(alert, kind="\x1b[2J")) is None
    assert alerting.alert_text(replace(alert, kind="newer"), "r", TRAINING) == ""


def ask(runner: AlertCommand, *command: str, timeout_s: float = 600.0, **about: str) -> int | None:
    """Have a command report an alert, and return its process if it is under way."""
    told = {"SO_TUI_ALERT_KIND": "loss", **about}
    runner.request(list(command), told, "so-tui: $(touch x)", timeout_s)
    return runner.pid


def test_command_gets_the_alert_and_no_script(tmp_path: Path) -> None:
    out, runner = tmp_path / "out", AlertCommand()
    script = "import os, sys; told = sys.argv[2:], os.environ['SO_TUI_ALERT_RUN']\n"
    script += "open(sys.argv[1], 'w').write(repr(told))"
    argv = [sys.executable, "-c", script, str(out), "{text}", "x{text}"]
    ask(runner, *argv, SO_TUI_ALERT_RUN="a b")
    runner.finish()
    assert out.read_text() == repr((["so-tui: $(touch x)", "x{text}"], "a b"))


SLEEP = f"sleep 98765.{os.getpid()}"
"""As no other process of this machine is called."""


@pytest.mark.parametrize(
    ("script", "said", "timeout_s"),
    [
        (None, "was not started", 60.0),
        ("echo no net >&2; exit 3", "ended with exit code 3: no net", 60.0),
        (f"{SLEEP} & {SLEEP}", "took too long", 0.3),
        ("yes", "took too long", 0.3),
        ("kill -9 $$", "exit code -9", 60.0),
        ("printf '\\033]0;x\\007'; exit 1", "\\x1b]0;x\\x07", 60.0),
    ],
    ids=["missing", "fails", "hangs", "floods", "killed", "hostile"],
)
def test_a_command_that_fails_is_logged_and_leaves_nothing(
    script: str | None, said: str, timeout_s: float, capsys: pytest.CaptureFixture[str]
) -> None:
    runner, begun = AlertCommand(), time.monotonic()
    command = ["/bin/sh", "-c", script] if script else ["/nowhere/at-all"]
    ask(runner, *command, timeout_s=timeout_s)
    runner.finish()
    assert time.monotonic() - begun < 30
    log = capsys.readouterr().err
    assert said in log
    assert len(log) < 2500
    # What is killed goes on until the kernel has got round to it.
    left = ["pgrep", "-f", f"^{SLEEP}"]
    wait_until(lambda: not subprocess.run(left, capture_output=True, check=False).stdout)


def test_an_error_of_one_command_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = AlertCommand()
    ask(commands, "true")
    with monkeypatch.context() as patch:
        patch.setattr("os.waitid", raising(ChildProcessError()))
        with pytest.raises(ChildProcessError):
            commands.tick()
    ask(commands, "touch", str(tmp_path / "ran"))
    commands.finish()
    assert (tmp_path / "ran").exists()


def test_bare_command_is_collected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A supervisor sees a process of the run in it, which must not keep the next one waiting."""
    begun, go, runner = tmp_path / "begun", tmp_path / "go", AlertCommand()
    script = f": > {begun}; until test -e {go}; do sleep 0.05; done; exit 3"
    pid = ask(runner, "env", "-i", "/bin/sh", "-c", script)
    assert pid is not None
    wait_until(begun.exists)
    tree = ProcessTree(frozenset({"SO_TUI_RUN=/nowhere"}), os.getpid())
    tree.scan()
    assert pid in {process.pid for process in tree.alive}
    go.touch()
    wait_until(lambda: not running(pid))
    tree.scan()
    runner.tick()
    assert runner.pid is None
    assert "exit code 3" in capsys.readouterr().err


def test_a_command_that_may_not_be_killed_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as one that runs as another user. The kernel's refusal is imitated."""
    refused = PermissionError(errno.EPERM, os.strerror(errno.EPERM))
    monkeypatch.setattr(os, "killpg", raising(refused))
    runner, told = AlertCommand(), tmp_path / "told"
    first = ask(runner, "sleep", "20", timeout_s=0.1)
    assert first is not None
    ask(runner, "touch", str(told))
    runner.finish()
    assert running(first)
    assert told.exists()
    assert "took too long" in capsys.readouterr().err
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not running(first))
    runner.tick()
    assert read_stat(first) is None


def test_only_own_settings_set_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the user's own file has alerts, and only while it is private."""
    planted = "[alerts]\ncommand = ['/bin/touch', '/tmp/planted']\n[prometheus]\nfolder = '/tmp'\n"
    preset = tmp_path / "p.toml"
    preset.write_text(f"extends = 'tiny'\n{planted}")
    with pytest.raises(InputError) as caught:
        find_preset(str(preset))
    assert {problem.field for problem in caught.value.problems} >= {"alerts", "prometheus"}
    folder = tmp_path / "run"
    for name in ("settings.toml", "so-tui/settings.toml", ".config/so-tui/settings.toml"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(planted)
    alert = {"kind": "loss", "attempt": 1, "time": 1, "step": 1, "command": ["x"]}
    state = {"name": "r", "state": "training", "alerts": [alert]}
    (folder / "state.json").write_text(json.dumps(state))
    monkeypatch.chdir(folder)
    monkeypatch.setattr("so_tui.launch.supervisor.alerts._SETTINGS_S", 0.0)
    own = alerting.Announcer(RunDirectory(folder), 1, "node1", "")
    assert own._settings().alerts == AlertSettings()
    assert not own._settings().prometheus.folder
    assert not any("command" in field for field in Alert.__struct_fields__)
    change_settings({"alerts.command": ["/bin/true"]})
    assert own._settings().alerts.command == ("/bin/true",)
    settings_file().chmod(0o644)
    for _ in range(2):
        assert own._settings().alerts.command == ()
    assert len(capsys.readouterr().err.splitlines()) == 1, "each problem is logged once"
    settings_file().unlink()
    assert own._settings().alerts == AlertSettings()


@pytest.mark.slow
@pytest.mark.parametrize("manners", ["steps=10 held"])
def test_real_supervisor_runs_the_command_and_writes_figures(runs: Runs, tmp_path: Path) -> None:
    out, figures = tmp_path / "told", tmp_path / "figures"
    figures.mkdir()
    # It outlives the run, until its time is over.
    told = "$SO_TUI_ALERT_KIND $SO_TUI_ALERT_STEP $SO_TUI_ALERT_TEXT"
    script = f'echo "{told}" >> {out}; exec sleep 60'
    alerts = {"alerts.command": ["/bin/sh", "-c", script], "alerts.command_timeout_s": 2}
    change_settings(alerts | {"alerts.loss_above": 1.5, "prometheus.folder": str(figures)})
    run = runs.start()
    wait_for(run, lambda state: state.step >= 10)
    log = next(run.attempt_dir(1).glob("supervisor.*.log"))
    (host,) = run.logs(1)
    path = figures / f"so-tui-{run.name}-{host}.prom"
    wait_until(lambda: path.exists() and 'state="training"' in path.read_text())
    (run.path / "released").touch()
    last = wait_for(run, ended)
    assert (last.state, last.exit_code) == ("finished", 0)
    assert kinds(last.alerts) == ["loss", "ended"]
    wait_until(lambda: out.read_text().count("\n") == 2)
    loss, end = out.read_text().splitlines()
    assert loss.startswith("loss 1 so-tui: the loss of ")
    assert end == f"ended 10 so-tui: {run.name} has finished at step 10"
    assert "took too long" in log.read_text()
    wait_until(lambda: not path.exists())
