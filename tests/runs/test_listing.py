"""Creating runs and finding them again."""

from __future__ import annotations

import errno
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from so_tui.folders import default_runs_dir, probes_dir
from so_tui.runs import (
    RunDirectory,
    create_run,
    delete_run,
    find_run,
    list_runs,
    new_attempt,
    read_spec,
    read_state,
    write_state,
)
from so_tui.runs.listing import LONGEST_NAME
from so_tui.runs.liveness import identify
from so_tui.spec.check import write_atomic
from so_tui.spec.errors import InputError
from so_tui.spec.run_spec import RunSpec
from tests.support.problems import refusal, rejected


@pytest.mark.parametrize("failure", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_unreadable_run_hides_no_other(
    spec: RunSpec, failure: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = create_run(spec), create_run(spec)
    plain_stat, plain_open = os.stat, os.open

    def fails(path: object) -> None:
        if str(path).startswith(str(bad.path)):
            raise OSError(failure, os.strerror(failure), str(path))

    def stat(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        fails(path)
        return plain_stat(path, *arguments, **options)

    def open_(path: Any, *arguments: Any, **options: Any) -> int:
        fails(path)
        return plain_open(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(os, "open", open_)
    listed = list_runs()
    assert listed[0] == good
    assert (bad in listed) == (failure != errno.EACCES)
    assert find_run(good.name) == find_run("latest") == good
    assert refusal(lambda: read_state(bad)).code == "unreadable-state"
    assert refusal(lambda: find_run(str(bad.path))).code == "run-not-readable"


def test_a_new_run_is_created_and_holds_its_spec(spec: RunSpec) -> None:
    days = [time.strftime("%m%d")]
    run = create_run(spec)
    days.append(time.strftime("%m%d"))  # it may be midnight
    assert run.path.parent == default_runs_dir()
    assert run.name.startswith(tuple(f"tiny-{day}-" for day in days))
    assert read_spec(run) == spec
    state = read_state(run)
    assert (state.state, state.name) == ("created", run.name)
    assert sorted(path.name for path in run.path.iterdir()) == [
        "attempts",
        "control",
        "metrics",
        "run.json",
        "spec.json",
        "state.json",
    ]


def test_creators_at_the_same_time_get_runs_of_their_own(spec: RunSpec) -> None:
    made: list[RunDirectory] = []
    threads = [
        threading.Thread(target=lambda: made.extend(create_run(spec) for _ in range(25)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({run.path for run in made}) == 100
    assert {run.path for run in list_runs()} == {run.path for run in made}


def test_a_name_that_is_taken_is_refused(spec: RunSpec) -> None:
    create_run(spec, name="mine")
    with rejected("name-taken"):
        create_run(spec, name="mine")


HOSTILE = ["..", "../up", "/tmp/x", "a/b", "-x", ".hidden", "a b", "a\n", "\x1b[2J", "$(id)", "ü"]


def test_what_the_user_calls_a_run_begins_its_name(spec: RunSpec, tmp_path: Path) -> None:
    for called in ("Mine_2.0", "x" * LONGEST_NAME):
        run = create_run(spec, tmp_path / "runs", called=called)
        assert re.fullmatch(rf"{re.escape(called)}-\d{{4}}-[0-9a-f]{{6}}", run.name)
        assert read_spec(run) == spec
    before = sorted(tmp_path.rglob("*"))
    for text in (*HOSTILE, "a\0", "x" * (LONGEST_NAME + 1)):
        with rejected("invalid-run-name") as caught:
            create_run(spec, tmp_path / "runs", called=text)
        assert "\x1b" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_attempts_are_numbered(run: RunDirectory) -> None:
    assert [new_attempt(run), new_attempt(run)] == [1, 2]
    assert run.attempts() == (1, 2)
    assert run.attempt_dir(2).is_dir()
    run.log_path(2, "node-1.site").touch()
    assert run.logs(2) == {"node-1.site": run.attempt_dir(2) / "output.node-1.site.log"}


def test_runs_are_listed_newest_first(spec: RunSpec, tmp_path: Path) -> None:
    runs = [
        create_run(spec, folder)
        for folder in (None, tmp_path / "scratch", None, tmp_path / "scratch", tmp_path / "project")
    ]
    for age, run in enumerate(reversed(runs)):
        os.utime(run.spec_path, (1e9 - age, 1e9 - age))
    assert list(list_runs()) == runs[::-1]
    assert list(list_runs(tmp_path / "scratch")) == [runs[3], runs[1]]
    assert find_run("latest") == runs[4]
    assert find_run(runs[1].name) == runs[1]
    assert find_run(str(runs[3].path)) == runs[3]


def test_a_probe_is_never_latest_and_found_by_its_path(spec: RunSpec) -> None:
    mine, probe = create_run(spec), create_run(spec, probes_dir())
    assert list_runs() == (mine,)
    assert find_run("latest") == mine
    assert find_run(str(probe.path)) == probe


def test_missing_folders_are_skipped(spec: RunSpec, tmp_path: Path) -> None:
    run = create_run(spec)
    gone = create_run(spec, tmp_path / "scratch")
    subprocess.run(["rm", "-r", gone.path.parent], check=True)
    (default_runs_dir() / "not-a-run").mkdir()
    (default_runs_dir() / "a-file").touch()
    assert list_runs() == (run,)


def test_environment_may_name_the_folder(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SO_TUI_RUNS_DIR", str(tmp_path / "elsewhere"))
    assert create_run(spec).path.parent == tmp_path / "elsewhere"


@pytest.mark.parametrize(
    ("asked", "code", "remedy"),
    [
        ("tny-one", "unknown-run", "Did you mean tiny-one"),
        ("alpaca", "unknown-run", "alpaca-wsd-1125-a3f09c"),
        ("/nowhere/at/all", "not-a-run", "spec.json"),
        ("/\0", "invalid-path", "name"),
        ("nosuch", "unknown-run", ""),
    ],
)
def test_unknown_run_gets_the_nearest(spec: RunSpec, asked: str, code: str, remedy: str) -> None:
    for name in ("tiny-one", "alpaca-wsd-1125-a3f09c"):
        create_run(spec, name=name)
    with rejected(code) as caught:
        find_run(asked)
    (problem,) = caught.value.problems
    assert remedy in problem.remedy
    assert remedy or "alpaca" not in problem.remedy, "a name that is near to none gets no guess"
    assert caught.value.exit_code == 2


def test_without_any_run_it_says_how_to_start_one() -> None:
    with rejected("no-runs") as caught:
        find_run("latest")
    assert "so-tui run PRESET" in str(caught.value)


def test_the_same_name_in_two_folders_asks_for_the_path(spec: RunSpec, tmp_path: Path) -> None:
    twins = [create_run(spec, folder, name="twin") for folder in (None, tmp_path / "scratch")]
    with rejected("ambiguous-run") as caught:
        find_run("twin")
    assert all(str(run.path) in str(caught.value) for run in twins)


def test_a_folder_that_cannot_hold_runs_is_reported(spec: RunSpec, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with rejected("runs-dir-not-writable") as caught:
        create_run(spec, tmp_path / "file" / "runs")
    assert str(tmp_path / "file" / "runs") in str(caught.value)
    assert caught.value.exit_code == 2


def test_an_ended_run_can_be_deleted_and_a_live_one_cannot(spec: RunSpec) -> None:
    other, ended, living = (create_run(spec, name=name) for name in ("other", "ended", "living"))
    write_state(ended, msgspec.structs.replace(read_state(ended), state="finished"))
    mine = {"host": socket.gethostname(), "supervisor": identify(os.getpid(), "supervisor")}
    write_state(living, msgspec.structs.replace(read_state(living), state="training", **mine))
    delete_run(ended)
    with rejected("run-is-live"):
        delete_run(living)
    write_state(living, msgspec.structs.replace(read_state(living), state="queued"))
    for assume_dead in (False, True):  # its job waits
        with rejected("run-is-live"):
            delete_run(living, assume_dead=assume_dead)
    assert {run.name for run in list_runs()} == {"living", "other"}
    assert sorted(path.name for path in other.path.parent.iterdir()) == ["living", "other"]
    with pytest.raises(InputError):
        delete_run(ended)


def test_what_a_deletion_leaves_is_named(spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is gone from every list, and only this says where its checkpoints still take up
    space.
    """
    run = create_run(spec)

    def held(path: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), "states")

    monkeypatch.setattr("shutil.rmtree", held)
    with rejected("not-deletable") as caught:
        delete_run(run)
    assert Path(caught.value.problems[0].value).is_dir()
    assert list_runs() == ()


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from so_tui.runs import create_run
from so_tui.spec.errors import InputError
from so_tui.spec.run_spec import DataSpec, ModelSpec, RunSpec
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    create_run(RunSpec(name="tiny", model=ModelSpec(id="m"), data=DataSpec(source="d")), Path(sys.argv[1]))
except InputError as error:
    print(*(problem.code for problem in error.problems))
"""  # noqa: E501


def test_a_disk_that_takes_no_more_leaves_nothing_half_written(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, tmp_path / "runs"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["runs-dir-not-writable"]
    assert list((tmp_path / "runs").iterdir()) == []


def test_state_is_replaced_as_a_whole_while_others_read(run: RunDirectory) -> None:
    done = threading.Event()
    seen: list[int] = []

    def read() -> None:
        while not done.is_set():
            seen.append(read_state(run).heartbeat)

    reader = threading.Thread(target=read)
    reader.start()
    for beat in range(100):
        write_state(
            run, msgspec.structs.replace(read_state(run), heartbeat=beat, detail="x" * 5000)
        )
    done.set()
    reader.join()
    assert seen == sorted(seen)
    assert not list(run.path.glob(".*"))


def test_a_write_that_fails_keeps_the_old_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"Not a directory|No such file"):
        write_atomic(tmp_path / "missing" / "file", b"")
    assert list(tmp_path.glob("missing*")) == []
