"""What the campaign sees of a fault's processes, locks and shared memory, and of commands that are
refused.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import processes
from tests.faults.scene import Scene


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path / "fault", None)
    yield made
    made.close()


def test_processes_are_found_by_their_mark_also_as_orphans_and_ended(scene: Scene) -> None:
    code = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; "
        "time.sleep(60)'])"
    )
    subprocess.run([sys.executable, "-c", code], env=scene.environment(), check=True)
    (orphan,) = processes.marked(scene.mark)
    assert processes.wait_for_end_of(scene.mark, 0.2).keys() == {orphan}
    processes.end(scene.mark)
    assert processes.marked(scene.mark) == {}


def test_locks_that_are_held_are_named(tmp_path: Path) -> None:
    with (tmp_path / "gpu.lock").open("w") as held, (tmp_path / "port.lock").open("w"):
        fcntl.flock(held, fcntl.LOCK_EX)
        assert processes.held_locks(tmp_path) == ("gpu.lock",)
    assert processes.held_locks(tmp_path) == ()


def test_shared_memory_that_a_process_has_left_is_named_and_removed() -> None:
    name = f"so_tui_test_{os.getpid()}_1"
    Path("/dev/shm", name).touch()
    assert processes.shared_memory_of({os.getpid()}) == (name,)
    assert processes.shared_memory_of({os.getpid()}) == ()


def test_a_command_that_is_refused_tells_the_codes(scene: Scene) -> None:
    done = scene.so_tui("watch", "no-such-run", "--runs-dir", str(scene.runs_dir))
    assert (done.exit_code, done.codes) == (2, ("no-runs",))
    assert scene.so_tui("runs", "--json", "--runs-dir", str(scene.runs_dir)).codes == ()
    assert scene.reported() == {}


def test_a_scene_has_folders_of_its_own_and_no_gpu(scene: Scene) -> None:
    environment = scene.environment()
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert all(
        Path(environment[f"XDG_{name}_HOME"]).is_relative_to(scene.folder)
        for name in ("CONFIG", "STATE", "DATA")
    )
