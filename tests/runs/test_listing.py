"""Creating runs and finding them again."""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from so_tui.folders import consents_file, default_runs_dir, probes_dir, state_home
from so_tui.runs import (
    RunDirectory,
    create_run,
    delete_run,
    find_run,
    list_runs,
    read_spec,
    read_state,
    write_state,
)
from so_tui.runs.listing import LONGEST_NAME
from so_tui.runs.liveness import identify
from so_tui.spec.consents import Code, allow, consents, is_allowed
from so_tui.spec.errors import InputError
from so_tui.spec.run_spec import RunSpec
from so_tui.trust.folders import is_shared
from tests.support.hostile_files import full_disk
from tests.support.problems import raising, refusal, rejected
from tests.support.python_path import not_emulated
from tests.support.records import change_state, named_run


@not_emulated
def test_folders_of_so_tui_may_be_links_of_ones_own(spec: RunSpec, tmp_path: Path) -> None:
    for number, link in enumerate((state_home(), consents_file().parent)):
        target = tmp_path / f"target{number}"
        if link.is_dir():
            link.rename(target)
        else:
            target.mkdir()
            link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
    run = create_run(spec)
    assert run in list_runs()
    code = Code(source="someone/model", hash="0", files=("a.py",), folder="")
    allow(code)
    assert is_allowed(code)
    assert len(consents()) == 1


@pytest.mark.parametrize("failure", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_unreadable_run_hides_no_other(
    spec: RunSpec, failure: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = create_run(spec), create_run(spec)

    def failing(plain: Any, path: Any, *arguments: Any, **options: Any) -> Any:
        if str(path).startswith(str(bad.path)):
            raise OSError(failure, os.strerror(failure), str(path))
        return plain(path, *arguments, **options)

    for name in ("stat", "open"):
        monkeypatch.setattr(os, name, partial(failing, getattr(os, name)))
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
    files = "attempts control metrics run.json spec.json state.json"
    assert sorted(path.name for path in run.path.iterdir()) == files.split()


@pytest.mark.parametrize(("value", "shared"), [("group", True), ("", False), ("world", False)])
def test_only_one_value_shares_a_run(
    value: str, shared: bool, spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SO_TUI_SHARE", value)
    run = create_run(spec)
    assert [is_shared(part) for part in (run.path, run.metrics_dir)] == [shared, shared]


HOSTILE = ["..", "../up", "/tmp/x", "a/b", "-x", ".hidden", "a b", "a\n", "\x1b[2J", "$(id)", "ü"]


def test_what_the_user_calls_a_run_begins_its_name(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for called in ("Mine_2.0", "x" * LONGEST_NAME):
        run = create_run(spec, tmp_path / "runs", called=called)
        assert re.fullmatch(rf"{re.escape(called)}-\d{{4}}-[0-9a-f]{{6}}", run.name)
    monkeypatch.setattr(os, "urandom", bytes)  # two names that are alike
    create_run(spec, tmp_path / "runs")
    before = sorted(tmp_path.rglob("*"))
    with rejected("name-taken"):
        create_run(spec, tmp_path / "runs")
    for text in (*HOSTILE, "a\0", "x" * (LONGEST_NAME + 1)):
        with rejected("invalid-run-name") as caught:
            create_run(spec, tmp_path / "runs", called=text)
        assert "\x1b" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_runs_are_listed_newest_first(spec: RunSpec, tmp_path: Path) -> None:
    with rejected("no-runs"):
        find_run("latest")
    scratch = tmp_path / "scratch"
    runs = [create_run(spec, at) for at in (None, scratch, None, scratch, tmp_path / "project")]
    for age, run in enumerate(reversed(runs)):
        os.utime(run.spec_path, (1e9 - age, 1e9 - age))
    probe = create_run(spec, probes_dir())
    shutil.rmtree(create_run(spec, tmp_path / "gone").path.parent)
    (default_runs_dir() / "not-a-run").mkdir()
    (default_runs_dir() / "a-file").touch()
    assert list(list_runs()) == runs[::-1]
    assert list(list_runs(scratch)) == [runs[3], runs[1]]
    assert find_run("latest") == runs[4]
    assert find_run(runs[1].name) == runs[1]
    assert find_run(str(runs[3].path)) == runs[3]
    assert find_run(str(probe.path)) == probe


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
        named_run(spec, None, name)
    problem = refusal(lambda: find_run(asked))
    assert problem.code == code
    assert remedy in problem.remedy
    assert remedy or "alpaca" not in problem.remedy, "a name that is near to none gets no guess"


def test_the_same_name_in_two_folders_asks_for_the_path(spec: RunSpec, tmp_path: Path) -> None:
    twins = [named_run(spec, folder, "twin") for folder in (None, tmp_path / "scratch")]
    with rejected("ambiguous-run") as caught:
        find_run("twin")
    assert all(str(run.path) in str(caught.value) for run in twins)


def test_an_ended_run_can_be_deleted_and_a_live_one_cannot(spec: RunSpec) -> None:
    other, ended, living = (named_run(spec, None, name) for name in ("other", "ended", "living"))
    change_state(ended, state="finished")
    me = identify(os.getpid(), "supervisor")
    change_state(living, state="training", host=socket.gethostname(), supervisor=me)
    delete_run(ended)
    with rejected("run-is-live"):
        delete_run(living)
    change_state(living, state="queued")  # its job waits
    for assume_dead in (False, True):
        with rejected("run-is-live"):
            delete_run(living, assume_dead=assume_dead)
    assert sorted(path.name for path in other.path.parent.iterdir()) == ["living", "other"]
    with pytest.raises(InputError):
        delete_run(ended)


def test_what_a_deletion_leaves_is_named(spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only this says where the checkpoints of an unlisted run still take up space."""
    run, held = create_run(spec), OSError(errno.EBUSY, os.strerror(errno.EBUSY), "states")
    monkeypatch.setattr("shutil.rmtree", raising(held))
    with rejected("not-deletable") as caught:
        delete_run(run)
    assert Path(caught.value.problems[0].value).is_dir()
    assert list_runs() == ()


def test_full_disk_leaves_nothing_half_written(spec: RunSpec, tmp_path: Path) -> None:
    with full_disk(100), rejected("runs-dir-not-writable"):
        create_run(spec, tmp_path / "runs")
    assert list((tmp_path / "runs").iterdir()) == []


def test_state_is_replaced_as_a_whole_while_others_read(run: RunDirectory) -> None:
    done = threading.Event()
    seen: list[int] = []

    def read() -> None:
        while not done.is_set():
            seen.append(read_state(run).heartbeat)

    reader = threading.Thread(target=read)
    reader.start()
    state = msgspec.structs.replace(read_state(run), detail="x" * 5000)
    for beat in range(100):
        write_state(run, msgspec.structs.replace(state, heartbeat=beat))
    done.set()
    reader.join()
    assert seen == sorted(seen)
    assert not list(run.path.glob(".*"))
