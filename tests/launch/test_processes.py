"""Which processes of a host are a run's, and what each is."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from so_tui.launch.command import RUN_ID_MARKER, RUN_MARKER
from so_tui.launch.supervisor import processes
from so_tui.launch.supervisor.processes import (
    OwnProcesses,
    ProcessTree,
    _order_of_loss,
    _send,
    markers,
)
from so_tui.runs import RunDirectory
from so_tui.runs.directory import write_manifest
from so_tui.runs.liveness import Stat, read_stat
from so_tui.runs.records import Process, Role
from tests.support.waiting import LIMIT_S, running, wait_for_environment, wait_until


@contextmanager
def started(argv: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program, and end it whatever happens."""
    with subprocess.Popen(argv, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def marked(folder: Path) -> dict[str, str]:
    return {**os.environ, RUN_MARKER: str(folder)}


def roles(tree: ProcessTree) -> dict[int, str]:
    return {known.pid: known.role for known in tree.alive}


SLEEPER = f"{sys.executable} -c 'import time; time.sleep(60)' deepspeed.launcher.launch"


def wait_for_sleeper(pid: int) -> None:
    cmdline = Path(f"/proc/{pid}/cmdline")
    wait_until(lambda: b"deepspeed.launcher.launch" in cmdline.read_bytes().split(b"\0"))


def test_process_before_exec_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if nobody looks for long: a supervisor on a busy host may not run for seconds, and a
    launcher that it takes for something else is never missed.
    """
    go = tmp_path / "go"
    script = f"until test -e {go}; do sleep 0.05; done; exec {SLEEPER}"
    with started(["sh", "-c", script], env=marked(tmp_path)) as process:
        tree = ProcessTree(frozenset({f"SO_TUI_RUN={tmp_path}"}), os.getpid())
        monkeypatch.setattr(processes, "_YOUNG_TICKS", 10**9)
        tree.scan()
        assert roles(tree)[process.pid] == "other"
        go.touch()
        wait_for_sleeper(process.pid)
        monkeypatch.setattr(processes, "_YOUNG_TICKS", 0)  # it has grown old meanwhile
        tree.scan()
        assert roles(tree)[process.pid] == "launcher"


def test_what_has_no_command_line_yet_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """However old it is. So is a process while its program is loaded; a shell without a name stands
    for it.
    """
    monkeypatch.setattr(processes, "_YOUNG_TICKS", 0)
    with started([""], executable="/bin/sh", stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        tree = ProcessTree(frozenset({"SO_TUI_RUN=/nowhere"}), os.getpid())
        tree.scan()
        assert roles(tree)[process.pid] == "other"
        process.stdin.write(f"exec {SLEEPER}\n".encode())
        process.stdin.flush()
        wait_for_sleeper(process.pid)
        tree.scan()
        assert roles(tree)[process.pid] == "launcher"


def test_an_alert_command_is_no_process_of_the_run(tmp_path: Path) -> None:
    """Although it was seen before its environment: a program has none while it is loaded. It is
    neither waited for nor ended with the run, and nothing was lost.
    """
    go = tmp_path / "go"
    script = f"until test -e {go}; do sleep 0.05; done; exec env SO_TUI_ALERT_KIND=loss sleep 60"
    with started(["sh", "-c", script]) as process:
        tree = ProcessTree(frozenset({"SO_TUI_RUN=/nowhere"}), os.getpid())
        tree.scan()
        assert process.pid in roles(tree)
        go.touch()
        environ = Path(f"/proc/{process.pid}/environ")
        wait_until(lambda: b"SO_TUI_ALERT_KIND=loss" in environ.read_bytes())
        tree.scan()
        assert process.pid not in {known.pid for known in (*tree.alive, *tree.gone)}


def test_the_id_tells_a_run_from_an_earlier_one(tmp_path: Path) -> None:
    """At the same path."""
    run = RunDirectory(tmp_path)
    with started(["sleep", "60"], env=marked(tmp_path) | {RUN_ID_MARKER: "one"}) as process:
        wait_for_environment(process.pid)
        assert OwnProcesses().carry(markers(run)), "a run of an older version has no id"
        write_manifest(run)
        manifest = json.loads(run.manifest_path.read_bytes())
        for known, carried in (("one", True), ("two", False)):
            run.manifest_path.write_text(json.dumps(manifest | {"id": known}))
            assert OwnProcesses().carry(markers(run)) == carried
            tree = ProcessTree(markers(run), supervisor_pid=-1)
            tree.scan(thorough=True)
            assert [found.pid for found in tree.alive] == [process.pid] * carried


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run processes of other users")
def test_a_process_of_another_user_is_none_of_ours(tmp_path: Path) -> None:
    """Even with the marker, and as our child."""
    run = RunDirectory(tmp_path)
    with started(["sleep", "60"], env=marked(tmp_path), user=61_999) as process:
        wait_for_environment(process.pid)
        tree = ProcessTree(markers(run), supervisor_pid=os.getpid())
        tree.scan(thorough=True)
        assert process.pid not in roles(tree)
        stat = read_stat(process.pid)
        assert stat is not None
        _send(Process(pid=process.pid, start_time=stat.start_time), signal.SIGKILL)
        time.sleep(0.1)
        assert process.poll() is None
        assert not OwnProcesses().carry(markers(run))


def test_refused_signal_is_reported_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A security module may refuse it; nothing else does for processes of one user."""
    run, environ, kill = RunDirectory(tmp_path), marked(tmp_path), os.kill
    with (
        started(["sleep", "60"], env=environ) as first,
        started(["sleep", "60"], env=environ) as second,
    ):

        def refuse(pid: int, signum: int) -> None:
            if pid == first.pid:
                raise PermissionError(errno.EPERM, "Operation not permitted")
            kill(pid, signum)

        for process in (first, second):
            wait_for_environment(process.pid)
        tree = ProcessTree(markers(run), supervisor_pid=-1)
        tree.scan(thorough=True)
        with monkeypatch.context() as patch:
            patch.setattr(os, "kill", refuse)
            with pytest.raises(PermissionError):
                tree.signal(signal.SIGKILL)
        assert second.wait(timeout=LIMIT_S) == -signal.SIGKILL
        assert first.poll() is None


def ranks(codes: dict[int, int | None]) -> dict[Process, int | None]:
    """Return ranks of which one scan found that they had ended with these exit codes."""
    return {
        Process(pid=100 + rank, start_time=1, role="rank", rank=rank): code
        for rank, code in codes.items()
    }


def cause(lost: dict[Process, int | None]) -> Process:
    return min(lost, key=lambda process: _order_of_loss(process, lost[process]))


@pytest.mark.parametrize(
    ("codes", "wanted"),
    [
        ({0: -signal.SIGTERM, 1: 1}, 1),  # the launcher ends the others once a rank has failed
        ({0: 128 + signal.SIGTERM, 1: 1}, 1),
        ({0: -signal.SIGTERM, 1: -signal.SIGSEGV}, 1),
        ({0: 1, 1: -signal.SIGKILL}, 1),  # the others fail because they wait for it
        ({0: -signal.SIGTERM, 1: None}, 1),
        ({0: None, 1: 128 + signal.SIGTERM}, 0),
    ],
)
def test_cause_is_not_what_the_launcher_ended(codes: dict[int, int | None], wanted: int) -> None:
    assert cause(ranks(codes)).rank == wanted


@pytest.mark.parametrize("role", ["launcher", "runner"])
def test_what_started_the_ranks_is_the_cause_of_their_end(role: Role) -> None:
    starter = Process(pid=7, start_time=1, role=role)
    assert cause(ranks({0: -signal.SIGKILL, 1: 1}) | {starter: None}) == starter


def test_reused_pid_is_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pids are reused, on a small host within minutes. Here the kernel is imitated: it says later
    that the process began later.
    """

    def later(pid: int) -> Stat | None:
        stat = read_stat(pid)
        return stat and dataclasses.replace(stat, start_time=stat.start_time + 1)

    argv = ["sh", "-c", "read line; exit 3"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, env=marked(tmp_path)) as process:
        wait_for_environment(process.pid)
        tree = ProcessTree(markers(RunDirectory(tmp_path)), supervisor_pid=-1)
        tree.scan()
        (known,) = tree.alive
        with monkeypatch.context() as patch:
            patch.setattr(processes, "read_stat", later)
            assert tree.scan() == []
            (reused,) = tree.alive
            assert (reused.pid, reused.start_time) == (known.pid, known.start_time + 1)
            assert list(tree.gone) == [known]
            process.communicate(b"\n", timeout=LIMIT_S)
            tree.scan()
        assert list(tree.gone) == [known, reused]


def test_last_processes_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_MOST_GONE", 3)
    environment = {**os.environ, RUN_MARKER: str(tmp_path)}
    tree = ProcessTree(markers(RunDirectory(tmp_path)), supervisor_pid=-1)
    started: list[Process] = []
    ended: list[Process] = []
    for arguments in (["--local_rank=0"], [], [], [], []):
        command = ["sh", "-c", "read line; exit 3", *arguments]
        with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) as process:
            wait_for_environment(process.pid)
            tree.scan()
            started += tree.alive
            assert process.stdin is not None
            process.stdin.close()
            wait_until(lambda: not running(process.pid))
            ended += tree.scan()
    assert ended == [started[0]]
    assert list(tree.gone) == [started[0], *started[-2:]]
    assert [tree.gone.get(process) for process in started] == [3, None, None, 3, 3]


SUBREAPER = """
import os, subprocess, sys, time
from so_tui.launch.supervisor.processes import ProcessTree, become_subreaper, reap_orphans

def states():
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = open(f"/proc/{name}/stat", "rb").read().rpartition(b")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            found[int(name)] = fields[0].decode()
    return found

def wait_for(count):
    while list(states().values()).count("Z") < count:
        time.sleep(0.01)

become_subreaper()
own = subprocess.Popen(["sh", "-c", "read line; exit 5"], stdin=subprocess.PIPE)
tree = ProcessTree(frozenset({"MARK=none"}), os.getpid())
tree.scan()
for turn in range(3):
    subprocess.run(["sh", "-c", "sh -c exit & sh -c exit & exit"], check=True)
    wait_for(2)
    tree.scan()
    reap_orphans({own.pid, None})
print(len(states()) - 1, len(tree.gone))
own.stdin.close()
wait_for(1)
tree.scan()
reap_orphans({own.pid, None})
print(own.wait(), list(tree.gone.values()))
reap_orphans(set())
print(states())
"""


def test_orphans_are_reaped_and_children_are_not() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SUBREAPER],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    assert done.stdout.splitlines() == ["0 0", "5 [5]", "{}"], done.stderr


def test_a_signal_goes_only_to_the_process_that_was_recorded() -> None:
    """Its pid may be another process's by now: what tells them apart is when they started."""
    with started(["sleep", "60"]) as process:
        stat = read_stat(process.pid)
        assert stat is not None
        _send(Process(pid=process.pid, start_time=stat.start_time - 1), signal.SIGKILL)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
        _send(Process(pid=process.pid, start_time=stat.start_time), signal.SIGTERM)
        assert process.wait(LIMIT_S) == -signal.SIGTERM
