"""Which processes of a host are a run's, and what each is."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import cast

import msgspec
import pytest

from so_tui.launch import processes
from so_tui.launch.environment import RUN_ID_MARKER, RUN_MARKER
from so_tui.launch.marker import markers
from so_tui.launch.processes import FirstLoss, OwnProcesses, ProcessTree, role_of, send
from so_tui.runs import RunDirectory
from so_tui.runs.manifest import new_manifest, write_manifest
from so_tui.runs.process_stat import read_stat
from so_tui.runs.records import Process
from tests.support.waiting import LIMIT_S, wait_for_environment, wait_until


def test_what_was_seen_between_fork_and_exec_is_known_even_if_nobody_looks_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor on a busy host may not run for seconds; a launcher that it takes for something else is never missed."""
    go, markers = tmp_path / "go", frozenset({f"SO_TUI_RUN={tmp_path}".encode()})
    sleeper = f"{sys.executable} -c 'import time; time.sleep(60)' deepspeed.launcher.launch"
    script = f"until test -e {go}; do sleep 0.05; done; exec {sleeper}"
    with subprocess.Popen(["sh", "-c", script], env={**os.environ, "SO_TUI_RUN": str(tmp_path)}) as process:
        try:
            tree = ProcessTree(markers, os.getpid())
            monkeypatch.setattr(processes, "_YOUNG_TICKS", 10**9)
            tree.scan()
            assert {known.pid: known.role for known in tree.alive}[process.pid] == "other"
            go.touch()
            wait_until(lambda: b"deepspeed.launcher.launch" in Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0"))
            monkeypatch.setattr(processes, "_YOUNG_TICKS", 0)  # it has grown old meanwhile
            tree.scan()
            assert {known.pid: known.role for known in tree.alive}[process.pid] == "launcher"
        finally:
            process.kill()


def test_what_has_no_command_line_yet_is_looked_at_again_however_old_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """So is a process while its program is loaded; a shell without a name stands for it."""
    monkeypatch.setattr(processes, "_YOUNG_TICKS", 0)
    with subprocess.Popen([""], executable="/bin/sh", stdin=subprocess.PIPE) as process:
        try:
            assert process.stdin is not None
            tree = ProcessTree(frozenset({b"SO_TUI_RUN=/nowhere"}), os.getpid())
            tree.scan()
            assert {known.pid: known.role for known in tree.alive}[process.pid] == "other"
            process.stdin.write(f"exec {sys.executable} -c 'import time; time.sleep(60)' deepspeed.launcher.launch\n".encode())
            process.stdin.flush()
            wait_until(lambda: b"deepspeed.launcher.launch" in Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0"))
            tree.scan()
            assert {known.pid: known.role for known in tree.alive}[process.pid] == "launcher"
        finally:
            process.kill()


def test_an_alert_command_that_was_seen_before_its_environment_is_no_process_of_the_run(tmp_path: Path) -> None:
    """A program has none while it is loaded. It is neither waited for nor ended with the run, and nothing was lost."""
    go = tmp_path / "go"
    script = f"until test -e {go}; do sleep 0.05; done; exec env SO_TUI_ALERT_KIND=loss sleep 60"
    with subprocess.Popen(["sh", "-c", script]) as process:
        try:
            tree = ProcessTree(frozenset({b"SO_TUI_RUN=/nowhere"}), os.getpid())
            tree.scan()
            assert process.pid in {known.pid for known in tree.alive}
            go.touch()
            wait_until(lambda: b"SO_TUI_ALERT_KIND=loss" in Path(f"/proc/{process.pid}/environ").read_bytes())
            tree.scan()
            assert process.pid not in {known.pid for known in (*tree.alive, *tree.gone)}
        finally:
            process.kill()


@pytest.mark.parametrize("script", ["/lib/superoffload/worker.py", "/lib/so_tui_trainer/offload/worker.py"])
def test_the_adam_worker_is_recognised_also_in_a_run_of_an_older_version(script: str) -> None:
    assert role_of(("python", "-P", script, "3"), "rank") == "adam"
    assert role_of(("python", "-P", script, "3"), "other") == "other"


def test_the_id_tells_a_run_from_an_earlier_one_at_the_same_path(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with subprocess.Popen(["sleep", "60"], env={**os.environ, RUN_MARKER: str(tmp_path), RUN_ID_MARKER: "one"}) as process:
        try:
            wait_for_environment(process.pid)
            assert OwnProcesses().carry(markers(run)), "a run of an older version has no id"
            for known, carried in (("one", True), ("two", False)):
                write_manifest(run, msgspec.structs.replace(new_manifest(run), id=known))
                assert OwnProcesses().carry(markers(run)) == carried
                tree = ProcessTree(markers(run), supervisor_pid=-1)
                tree.scan(thorough=True)
                assert [found.pid for found in tree.alive] == [process.pid] * carried
        finally:
            process.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run processes of other users")
def test_a_process_of_another_user_is_none_of_ours_even_with_the_marker(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with subprocess.Popen(["sleep", "60"], env={**os.environ, RUN_MARKER: str(tmp_path)}, user=61_999) as process:
        try:
            wait_for_environment(process.pid)
            tree = ProcessTree(markers(run), supervisor_pid=os.getpid())  # even as our child
            tree.scan(thorough=True)
            assert process.pid not in {found.pid for found in tree.alive}
            stat = read_stat(process.pid)
            assert stat is not None
            send(Process(pid=process.pid, start_time=stat.start_time), signal.SIGKILL)
            time.sleep(0.1)
            assert process.poll() is None
            assert not OwnProcesses().carry(markers(run))
        finally:
            process.kill()


def test_a_signal_that_the_kernel_refuses_is_reported_after_the_others_got_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A security module may refuse it; nothing else does for processes of one user."""
    run = RunDirectory(tmp_path)
    environ = {**os.environ, RUN_MARKER: str(tmp_path)}
    with subprocess.Popen(["sleep", "60"], env=environ) as first, subprocess.Popen(["sleep", "60"], env=environ) as second:
        kill = os.kill

        def refuse(pid: int, signum: int) -> None:
            if pid == first.pid:
                raise PermissionError(errno.EPERM, "Operation not permitted")
            kill(pid, signum)

        try:
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
        finally:
            first.kill()
            second.kill()


class Lost:
    """A tree of which one scan found all ranks gone, with these exit codes by rank."""

    alive: tuple[Process, ...] = ()

    def __init__(self, codes: dict[int, int | None]) -> None:
        self.gone = tuple(Process(pid=100 + rank, start_time=1, role="rank", rank=rank) for rank in codes)
        self._codes = {100 + rank: code for rank, code in codes.items()}

    def exit_code(self, process: Process) -> int | None:
        return self._codes[process.pid]


@pytest.mark.parametrize(
    ("codes", "cause"),
    [
        ({0: -signal.SIGTERM, 1: 1}, 1),  # the launcher ends the others once a rank has failed
        ({0: 128 + signal.SIGTERM, 1: 1}, 1),
        ({0: -signal.SIGTERM, 1: -signal.SIGSEGV}, 1),
        ({0: 1, 1: -signal.SIGKILL}, 1),  # the others fail because they wait for it
        ({0: -signal.SIGTERM, 1: None}, 1),
        ({0: None, 1: 128 + signal.SIGTERM}, 0),
    ],
)
def test_of_ranks_that_one_scan_found_gone_the_cause_is_not_one_that_the_launcher_ended(codes: dict[int, int | None], cause: int) -> None:
    first = FirstLoss(cast(ProcessTree, Lost(codes)))
    first.update({100, 101}, ending=False)
    assert first.process is not None
    assert first.process.rank == cause
