"""Which processes of a host are a run's, and what each is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from so_tui.launch import processes
from so_tui.launch.processes import ProcessTree, role_of


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
            while Path(f"/proc/{process.pid}/comm").read_text().strip() == "sh":
                time.sleep(0.02)
            monkeypatch.setattr(processes, "_YOUNG_TICKS", 0)  # it has grown old meanwhile
            tree.scan()
            assert {known.pid: known.role for known in tree.alive}[process.pid] == "launcher"
        finally:
            process.kill()


@pytest.mark.parametrize("script", ["/lib/superoffload/worker.py", "/lib/so_tui_trainer/offload/worker.py"])
def test_the_adam_worker_is_recognised_also_in_a_run_of_an_older_version(script: str) -> None:
    assert role_of(("python", "-P", script, "3"), "rank") == "adam"
    assert role_of(("python", "-P", script, "3"), "other") == "other"
