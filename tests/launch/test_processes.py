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
from so_tui.runs import RunDirectory
from so_tui.runs.directory import write_manifest
from so_tui.runs.liveness import Stat, read_stat
from so_tui.runs.records import Process, Role
from tests.support.waiting import LIMIT_S, running, wait_for_environment, wait_until

NO_MARKS = frozenset({"SO_TUI_RUN=/nowhere"})
WAITS = ["sh", "-c", "read line; exit 3"]
SLEEPER = f"exec {sys.executable} -c 'import time; time.sleep(60)' deepspeed.launcher.launch"


@contextmanager
def started(
    *argv: str, run: Path | None = None, run_id: str = "", **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program that carries the marks of a run, and end it whatever happens."""
    marks = {RUN_MARKER: str(run)} if run else {}
    env = os.environ | marks | ({RUN_ID_MARKER: run_id} if run_id else {})
    with subprocess.Popen(argv, stdin=subprocess.PIPE, env=env, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def say(process: subprocess.Popen[bytes], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n".encode())
    process.stdin.flush()


def roles(tree: processes.ProcessTree) -> dict[int, str]:
    return {known.pid: known.role for known in tree.alive}


def is_marked(run: RunDirectory) -> bool:
    return any(processes.markers(run) <= environ for environ in processes.own_environs())


def recorded(pid: int) -> Process:
    stat = read_stat(pid)
    assert stat is not None
    return Process(pid=pid, start_time=stat.start_time)


@pytest.mark.parametrize(
    ("argv", "young"), [(["sh", "-c", f"read line; {SLEEPER}"], True), ([""], False)]
)
def test_process_before_exec_is_known(
    argv: Sequence[str], young: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if nobody looks for long: a launcher that is taken for something else is never missed. A
    shell without a name stands for a program that is being loaded, however old it is.
    """
    monkeypatch.setattr(processes, "_YOUNG_TICKS", 10**9 if young else 0)
    with started(*argv, executable="/bin/sh") as process:
        tree = processes.ProcessTree(NO_MARKS, os.getpid())
        tree.scan()
        assert roles(tree)[process.pid] == "other"
        say(process, SLEEPER)
        cmdline = Path(f"/proc/{process.pid}/cmdline")
        wait_until(lambda: b"deepspeed.launcher.launch" in cmdline.read_bytes().split(b"\0"))
        monkeypatch.setattr(processes, "_YOUNG_TICKS", 0)  # it has grown old meanwhile
        tree.scan()
        assert roles(tree)[process.pid] == "launcher"


def test_an_alert_command_is_no_process_of_the_run() -> None:
    """Although it was seen before its environment, which it lacks while it is loaded."""
    script = "read line; exec env SO_TUI_ALERT_KIND=loss sleep 60"
    with started("sh", "-c", script) as process:
        tree = processes.ProcessTree(NO_MARKS, os.getpid())
        tree.scan()
        assert process.pid in roles(tree)
        say(process, "go")
        environ = Path(f"/proc/{process.pid}/environ")
        wait_until(lambda: b"SO_TUI_ALERT_KIND=loss" in environ.read_bytes())
        tree.scan()
        assert process.pid not in {known.pid for known in (*tree.alive, *tree.gone)}


def test_the_id_tells_a_run_from_an_earlier_one(tmp_path: Path) -> None:
    """At the same path."""
    run = RunDirectory(tmp_path)
    with started("sleep", "60", run=tmp_path, run_id="one") as process:
        wait_for_environment(process.pid)
        # A run of an older version has no id.
        assert is_marked(run)
        write_manifest(run)
        manifest = json.loads(run.manifest_path.read_bytes())
        for known, carried in (("one", True), ("two", False)):
            run.manifest_path.write_text(json.dumps(manifest | {"id": known}))
            assert is_marked(run) == carried
            tree = processes.ProcessTree(processes.markers(run), supervisor_pid=-1)
            tree.scan(thorough=True)
            assert [found.pid for found in tree.alive] == [process.pid] * carried


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run processes of other users")
def test_a_process_of_another_user_is_none_of_ours(tmp_path: Path) -> None:
    """Even with the marker, and as our child."""
    run = RunDirectory(tmp_path)
    with started("sleep", "60", run=tmp_path, user=61_999) as process:
        wait_for_environment(process.pid)
        tree = processes.ProcessTree(processes.markers(run), supervisor_pid=os.getpid())
        tree.scan(thorough=True)
        assert process.pid not in roles(tree)
        processes._send(recorded(process.pid), signal.SIGKILL)
        time.sleep(0.1)
        assert process.poll() is None
        assert not is_marked(run)


def test_refused_signal_is_reported_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A security module may refuse it; nothing else does for processes of one user."""
    run, kill = RunDirectory(tmp_path), os.kill
    sleep = ("sleep", "60")
    with started(*sleep, run=tmp_path) as first, started(*sleep, run=tmp_path) as second:

        def refuse(pid: int, signum: int) -> None:
            if pid == first.pid:
                raise PermissionError(errno.EPERM, "Operation not permitted")
            kill(pid, signum)

        for process in (first, second):
            wait_for_environment(process.pid)
        tree = processes.ProcessTree(processes.markers(run), supervisor_pid=-1)
        tree.scan(thorough=True)
        with monkeypatch.context() as patch:
            patch.setattr(os, "kill", refuse)
            with pytest.raises(PermissionError):
                tree.signal(signal.SIGKILL)
        assert second.wait(timeout=LIMIT_S) == -signal.SIGKILL
        assert first.poll() is None


RANK = ("numactl", "-m", "0", "python", "-u", "-m", "so_tui_trainer", "--local_rank=0")
LAUNCHER = ("python", "-u", "-m", "deepspeed.launcher.launch", "so_tui_trainer")
RUNNER = ("python", "-m", "deepspeed.launcher.runner", "--module", "so_tui_trainer")
SPAWNED = ("python", "-c", "from multiprocessing.spawn import m", "--multiprocessing-fork")
WORKER = ("python", "-P", "/lib/superoffload/worker.py", "3")


@pytest.mark.parametrize(
    ("argv", "parent", "role"),
    [
        (RUNNER, None, "runner"),
        (LAUNCHER, "runner", "launcher"),
        (LAUNCHER, "launcher", "other"),
        (("dpkg", "-l", "numactl"), "launcher", "other"),
        (RANK, "launcher", "rank"),
        (RANK, "rank", "other"),
        (SPAWNED, "rank", "adam"),
        (WORKER, "rank", "adam"),
        (WORKER, "other", "other"),
    ],
)
def test_roles(argv: tuple[str, ...], parent: Role | None, role: Role) -> None:
    assert processes._role_of(argv, parent) == role


STARTER, TERM = -1, signal.SIGTERM


@pytest.mark.parametrize(
    ("codes", "wanted"),
    [
        ({0: -TERM, 1: 1}, 1),  # the launcher ends the others once a rank has failed
        ({0: -TERM, 1: -signal.SIGSEGV}, 1),
        ({0: 1, 1: -signal.SIGKILL}, 1),  # the others fail because they wait for it
        ({0: -TERM, 1: None}, 1),
        ({0: None, 1: 128 + TERM}, 0),
        ({0: -signal.SIGKILL, 1: 1, STARTER: None}, STARTER),
    ],
)
def test_cause_is_not_what_followed(codes: dict[int, int | None], wanted: int) -> None:
    """One scan found that ranks and what started them had ended with these exit codes."""
    for starter in ("launcher", "runner"):
        lost = {
            Process(pid=9 + rank, start_time=1, role=starter if rank < 0 else "rank"): code
            for rank, code in codes.items()
        }
        cause = min(lost, key=lambda process: processes._order_of_loss(process, lost[process]))
        assert cause.pid == 9 + wanted


def test_reused_pid_is_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the kernel is imitated: it says later that the process began later."""

    def later(pid: int) -> Stat | None:
        stat = read_stat(pid)
        return stat and dataclasses.replace(stat, start_time=stat.start_time + 1)

    with started(*WAITS, "--local_rank=0", run=tmp_path) as process:
        wait_for_environment(process.pid)
        tree = processes.ProcessTree(processes.markers(RunDirectory(tmp_path)), supervisor_pid=-1)
        tree.scan()
        (known,) = tree.alive
        with monkeypatch.context() as patch:
            patch.setattr(processes, "read_stat", later)
            assert tree.scan() == [known]
            (reused,) = tree.alive
            assert (reused.pid, reused.start_time) == (known.pid, known.start_time + 1)
            assert list(tree.gone) == [known]
            process.communicate(b"\n", timeout=LIMIT_S)
            tree.scan()
        assert list(tree.gone) == [known, reused]


def test_only_leading_processes_are_remembered(tmp_path: Path) -> None:
    tree = processes.ProcessTree(processes.markers(RunDirectory(tmp_path)), supervisor_pid=-1)
    ended: list[Process] = []
    for arguments in (["--local_rank=0"], []):
        with started(*WAITS, *arguments, run=tmp_path) as process:
            wait_for_environment(process.pid)
            tree.scan()
            (last,) = tree.alive
            say(process, "")
            wait_until(lambda: not running(process.pid))
            ended += tree.scan()
            assert tree.alive == ()
    assert last not in ended
    assert tree.gone == dict.fromkeys(ended, 3)
    assert len(ended) == 1


def test_a_signal_goes_only_to_the_process_that_was_recorded() -> None:
    """Its pid may be another process's by now: what tells them apart is when they started."""
    with started("sleep", "60") as process:
        known = recorded(process.pid)
        earlier = Process(pid=known.pid, start_time=known.start_time - 1)
        processes._send(earlier, signal.SIGKILL)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
        processes._send(known, signal.SIGTERM)
        assert process.wait(LIMIT_S) == -signal.SIGTERM
