"""Alerts: what is noticed, the user's command, and that it comes from the user's own settings and
never harms the run.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from so_tui.folders import settings_file
from so_tui.launch.command import AlertCommand
from so_tui.launch.launch import prepare
from so_tui.launch.supervisor.alerts import (
    KEPT,
    Announcer,
    _AlertWatch,
    _free_bytes,
    _OwnSettings,
    alert_text,
    known,
    remembered,
)
from so_tui.launch.supervisor.processes import ProcessTree
from so_tui.machine import Machine
from so_tui.runs import RunDirectory
from so_tui.runs.liveness import read_stat
from so_tui.runs.records import Alert, RunState
from so_tui.settings import AlertSettings
from so_tui.settings_file import change_settings
from so_tui.spec import InputError, find_preset
from tests.support.fake_runs import Runs, ended, release, wait_for
from tests.support.records import step_record
from tests.support.supervising import prepared_run
from tests.support.waiting import running, wait_until

TRAINING = RunState(name="r", state="training", attempt=1, step=5)


def kinds(alerts: tuple[Alert, ...]) -> list[str]:
    return [alert.kind for alert in alerts]


def test_each_event_is_noticed_once_until_it_passes() -> None:
    watch = _AlertWatch(1, 0.0)
    settings = AlertSettings(loss_above=3.0, stall_s=60)
    nan, high, good = (step_record(5, loss=loss) for loss in (float("nan"), 4.0, 2.0))
    assert kinds(watch.observe(TRAINING, [nan, nan], 1, settings)) == ["not-finite"]
    assert kinds(watch.observe(TRAINING, [high, high], 2, settings)) == ["loss"]
    assert kinds(watch.observe(TRAINING, [good, high, nan], 3, settings)) == ["loss", "not-finite"]
    assert kinds(watch.observe(TRAINING, [], 62, settings)) == []
    (stall,) = watch.observe(TRAINING, [], 64, settings)
    assert (stall.kind, stall.value) == ("stall", 61)
    assert watch.observe(TRAINING, [], 500, settings) == ()
    assert watch.observe(TRAINING, [good], 501, settings) == ()
    assert kinds(watch.observe(TRAINING, [], 600, settings)) == ["stall"]
    assert kinds(
        watch.observe(
            TRAINING, [step_record(6, loss=2.0, gradient_norm=float("inf"))], 601, settings
        )
    ) == ["not-finite"]


def test_long_steps_and_other_phases_are_no_stall() -> None:
    watch = _AlertWatch(2, 0.0)
    settings = AlertSettings(stall_s=60)
    slow = msgspec.structs.replace(step_record(1), attempt=2, step_s=100.0)
    assert watch.observe(TRAINING, [slow], 0, settings) == ()
    assert watch.observe(TRAINING, [], 900, settings) == ()
    assert kinds(watch.observe(TRAINING, [], 1001, settings)) == ["stall"]
    saving = msgspec.structs.replace(TRAINING, state="saving")
    assert watch.observe(saving, [slow], 1002, settings) == ()
    assert watch.observe(saving, [], 9000, settings) == ()
    assert watch.observe(TRAINING, [], 9059, settings) == ()
    assert (
        watch.observe(TRAINING, [step_record(1, loss=float("nan"))], 9060, settings) == ()
    )  # of attempt 1


def test_full_disk_and_end_are_noticed(tmp_path: Path) -> None:
    watch, gb = _AlertWatch(1, 0.0), 10**9
    settings = AlertSettings(disk_free_gb=10)
    for free, full, noticed in (
        ({"/a": 100 * gb, "/b": 9 * gb}, False, ["disk"]),
        ({"/a": 21 * gb // 2}, False, []),
        ({"/a": 12 * gb}, False, []),
        ({}, True, ["disk"]),
    ):
        assert kinds(watch.disks(TRAINING, free, settings, full=full)) == noticed
    found = _free_bytes([str(tmp_path), str(tmp_path / "not" / "yet")])
    assert len(found) == 2
    assert found[str(tmp_path)] > 0
    ends: dict[Any, str] = {"finished": "ended", "stopped": "ended", "failed": "failed"}
    for state, kind in (ends | {"lost": "failed"}).items():
        assert kinds(_AlertWatch(1, 0.0).end(RunState(name="r", state=state), settings)) == [kind]
    none = AlertSettings(on=())
    assert watch.end(RunState(name="r", state="failed"), none) == ()
    assert watch.observe(TRAINING, [step_record(5, loss=float("nan"))], 1, none) == ()
    many = tuple(Alert(kind="loss", attempt=1, time=0, step=step) for step in range(3 * KEPT))
    assert remembered((), many)[-1].step == 3 * KEPT - 1
    assert len(remembered(many, many)) == KEPT


@pytest.mark.parametrize("kind", ["ended", "failed", "not-finite", "stall", "loss", "disk"])
def test_sentences_hold_nothing_that_acts_on_a_terminal(kind: str) -> None:
    hostile = "a\x1b]0;owned\x07\n;x" + "\u202e" * 5 + "y" * 400
    alert = Alert(kind=kind, attempt=1, time=0, step=2**53, value=1e300, bound=-1e300)
    text = alert_text(alert, hostile, RunState(name="x", state="failed", reason="\x1b]52;c;x\x07"))
    assert text.startswith("so-tui: ")
    assert text.isprintable()
    assert ";" not in text
    assert len(text) < 200
    assert known(Alert(kind="\x1b[2J", attempt=1, time=0, step=1)) is None
    assert alert_text(Alert(kind="newer", attempt=1, time=0, step=1), "r", TRAINING) == ""


LOSS = {"SO_TUI_ALERT_KIND": "loss"}


def ran(
    command: list[str], text: str = "so-tui: it", timeout_s: float = 20.0, **about: str
) -> None:
    runner = AlertCommand()
    runner.request(command, {**LOSS, **about}, text, timeout_s)
    runner.finish()


def test_command_gets_the_alert_and_no_script(tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = (
        "import os, sys; open(sys.argv[1], 'w').write(repr((sys.argv[2:], "
        "os.environ['SO_TUI_ALERT_RUN'])))"
    )
    ran(
        [sys.executable, "-c", script, str(out), "{text}", "x{text}"],
        text="so-tui: $(touch x)",
        SO_TUI_ALERT_RUN="a b",
    )
    assert out.read_text() == repr((["so-tui: $(touch x)", "x{text}"], "a b"))


SLEEP = f"sleep 98765.{os.getpid()}"
"""As no other process of this machine is called."""


@pytest.mark.parametrize(
    ("command", "said", "timeout_s"),
    [
        (["/nowhere/at-all"], "was not started", 60.0),
        (["sh", "-c", "echo no net >&2; exit 3"], "ended with exit code 3: no net", 60.0),
        (["/bin/sh", "-c", f"{SLEEP} & {SLEEP}"], "took too long", 0.3),
        (["/bin/sh", "-c", "yes"], "took too long", 0.3),
        (["/bin/sh", "-c", "kill -9 $$"], "exit code -9", 60.0),
        (["/bin/sh", "-c", "printf '\\033]0;x\\007'; exit 1"], "\\x1b]0;x\\x07", 60.0),
    ],
    ids=["missing", "fails", "hangs", "floods", "killed", "hostile"],
)
def test_a_command_that_fails_is_logged_and_leaves_nothing(
    command: list[str], said: str, timeout_s: float, capsys: pytest.CaptureFixture[str]
) -> None:
    started = time.monotonic()
    ran(command, timeout_s=timeout_s)
    assert time.monotonic() - started < 30
    log = capsys.readouterr().err
    assert said in log
    assert len(log) < 2500
    # What is killed goes on until the kernel has got round to it.
    left = ["pgrep", "-f", f"^{SLEEP}"]
    wait_until(lambda: not subprocess.run(left, capture_output=True, check=False).stdout)


def test_an_error_of_one_command_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ChildProcessError

    commands = AlertCommand()
    commands.request(["true"], {}, "", timeout_s=60)
    with monkeypatch.context() as patch:
        patch.setattr("os.waitid", fail)
        with pytest.raises(ChildProcessError):
            commands.tick()
    commands.request(["touch", str(tmp_path / "ran")], {}, "", timeout_s=60)
    commands.finish()
    assert (tmp_path / "ran").exists()


def test_command_under_way_is_not_taken_for_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = AlertCommand()
    started = time.monotonic()
    # Its orphan becomes a child of a supervisor, too.
    script = f"({SLEEP} &) ; touch {tmp_path / 'begun'}; {SLEEP}"
    runner.request(["/bin/sh", "-c", script], {"SO_TUI_ALERT_KIND": "loss"}, "so-tui: it", 600.0)
    runner.tick()
    assert time.monotonic() - started < 60
    wait_until((tmp_path / "begun").exists)
    tree = ProcessTree(frozenset({"SO_TUI_RUN=/nowhere"}), os.getpid())
    tree.scan(thorough=True)
    commands = [Path(f"/proc/{process.pid}/cmdline").read_bytes() for process in tree.alive]
    assert not any(b"sleep" in command for command in commands)
    monkeypatch.setattr("so_tui.launch.command._END_S", 0.0)
    runner.finish()


def test_bare_command_is_collected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A supervisor sees a process of the run in it. Were it collected as such, no later command
    would be started.
    """
    begun, go, runner = tmp_path / "begun", tmp_path / "go", AlertCommand()
    script = f": > {begun}; until test -e {go}; do sleep 0.05; done; exit 3"
    runner.request(
        ["env", "-i", "/bin/sh", "-c", script], {"SO_TUI_ALERT_KIND": "loss"}, "so-tui: it", 600.0
    )
    pid = runner.pid
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
    """Such as one that runs as another user, or waits for a disk. The kernel's refusal is
    imitated.
    """

    def refuse(group: int, signum: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "killpg", refuse)
    runner, started, go, told = AlertCommand(), time.monotonic(), tmp_path / "go", tmp_path / "told"
    lasting = ["/bin/sh", "-c", f"for _ in $(seq 600); do test -e {go} && exit; sleep 0.05; done"]
    runner.request(lasting, {"SO_TUI_ALERT_KIND": "loss"}, "so-tui: it", 0.1)
    first = runner.pid
    assert first is not None
    runner.request(
        ["/bin/sh", "-c", f"echo told > {told}"], {"SO_TUI_ALERT_KIND": "loss"}, "so-tui: it", 20.0
    )
    runner.finish()
    assert time.monotonic() - started < 15
    assert told.read_text() == "told\n"
    assert "took too long" in capsys.readouterr().err
    assert running(first)
    go.touch()
    wait_until(lambda: not running(first))
    runner.tick()
    assert read_stat(first) is None


def test_only_own_settings_set_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever somebody writes alerts and tokens into what others get: only the user's own file has
    them.
    """
    planted = "[alerts]\ncommand = ['/bin/touch', '/tmp/planted']\n[prometheus]\nfolder = '/tmp'\n"
    preset = tmp_path / "p.toml"
    preset.write_text(f"extends = 'tiny'\n{planted}")
    with pytest.raises(InputError) as caught:
        find_preset(str(preset))
    assert {problem.field for problem in caught.value.problems} >= {"alerts", "prometheus"}
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("settings.toml", "so-tui/settings.toml", ".config/so-tui/settings.toml"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(planted)
    state = {
        "name": "r",
        "state": "training",
        "alerts": [{"kind": "loss", "attempt": 1, "time": 1, "step": 1, "command": ["x"]}],
    }
    (folder / "state.json").write_text(json.dumps(state))
    monkeypatch.chdir(folder)
    settings = _OwnSettings().current()
    assert settings.alerts.command == ()
    assert not settings.prometheus.folder
    assert not any("command" in field for field in Alert.__struct_fields__)


def test_changed_settings_take_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("so_tui.launch.supervisor.alerts._SETTINGS_S", 0.0)
    own = _OwnSettings()
    assert own.current().alerts.command == ()
    change_settings({"alerts.command": ["/bin/true"]})
    assert own.current().alerts.command == ("/bin/true",)
    settings_file().chmod(0o644)
    assert own.current().alerts.command == ()
    settings_file().unlink()
    assert own.current().alerts == AlertSettings()


def test_an_announcer_tells_of_the_end(tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = (
        'printf "%s|%s|%s" "$SO_TUI_ALERT_KIND" "$SO_TUI_ALERT_STEP" "$SO_TUI_ALERT_TEXT" > '
        + str(out)
    )
    change_settings({"alerts.command": ["/bin/sh", "-c", script]})
    announcer = Announcer(RunDirectory(tmp_path), 1, "host", "")
    last = RunState(name="x", state="failed", step=7)
    new = announcer.end(last)
    assert kinds(new) == ["failed"]
    announcer.tell(new, last)
    announcer.finish()
    assert out.read_text() == f"failed|7|so-tui: {tmp_path.name} has failed at step 7"


@pytest.mark.slow
def test_real_supervisor_runs_the_command_and_writes_figures(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, figures = tmp_path / "told", tmp_path / "figures"
    figures.mkdir()
    script = (
        'echo "$SO_TUI_ALERT_KIND $SO_TUI_ALERT_STATE" >> ' + f"{out}; exec sleep 60"
    )  # it outlives the run, until its time is over
    change_settings(
        {
            "alerts.command": ["/bin/sh", "-c", script],
            "alerts.command_timeout_s": 2,
            "alerts.loss_above": 1.5,
            "prometheus.folder": str(figures),
        }
    )
    monkeypatch.setenv("FAKE_TRAINER", "steps=10 held")
    run = runs.start()
    wait_for(run, lambda state: state.step >= 10)
    log = next(run.attempt_dir(1).glob("supervisor.*.log"))
    (host,) = run.logs(1)
    path = figures / f"so-tui-{run.name}-{host}.prom"
    wait_until(lambda: path.exists() and 'state="training"' in path.read_text())
    release(run)
    last = wait_for(run, ended)
    assert (last.state, last.exit_code) == ("finished", 0)
    assert [alert.kind for alert in last.alerts] == ["loss", "ended"]
    wait_until(lambda: out.read_text() == "loss training\nended finished\n")
    assert "took too long" in log.read_text()
    wait_until(lambda: not path.exists())


SUPERVISED = """
import sys
from pathlib import Path
from so_tui.launch.supervisor.run import supervise
from so_tui.runs import RunDirectory
from so_tui.runs.lock import run_lock
from so_tui.runs.state import read_state

run = RunDirectory(sys.argv[1])

def ended():
    with run_lock(run) as lock:
        free = lock is not None
    Path(sys.argv[2]).write_text(f"{read_state(run).state} {'free' if free else 'locked'}")

sys.exit(supervise(run, 1, ended=ended))
"""


@pytest.mark.slow
def test_run_continues_before_its_last_command_ends(
    runs: Runs, tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job that continues a run is submitted in the last seconds of a job, in which the command
    that tells of the end may hang.
    """
    continued, told = tmp_path / "continued", tmp_path / "told"
    script = f"until test -e {continued}; do sleep 0.05; done; mv {continued} {told}"
    change_settings({"alerts.command": ["/bin/sh", "-c", script], "alerts.command_timeout_s": 50})
    monkeypatch.setenv("FAKE_TRAINER", "steps=1")
    run = prepared_run(prepare(runs.spec, machine, force=True), runs.folder)
    runs.adopt(run)
    argv = [sys.executable, "-c", SUPERVISED, str(run.path), str(continued)]
    assert subprocess.run(argv, timeout=100, check=False).returncode == 0
    assert told.read_text() == "finished free"
