"""Whose checkpoints a folder holds, and what else may be in it."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

import superoffload.checkpoint
from so_tui.runs import RunDirectory, create_run
from so_tui.runs.directory import checkpoint_folders, checkpoints_folder, run_id
from so_tui.spec import RunSpec
from so_tui_trainer import checkpoint_folder
from so_tui_trainer.checkpoint_folder import _verify, claim, newest, set_all_aside
from so_tui_trainer.failures import TrainingError
from tests.support.checkpoints import written
from tests.support.launching import tiny
from tests.support.problems import coded, raising
from tests.support.records import named_run


def spec_in(folder: Path, keep: int = 2) -> RunSpec:
    return tiny(checkpoint__folder=str(folder), checkpoint__keep=str(keep))


def claimed(folder: Path, spec: RunSpec) -> tuple[Path, str]:
    """Return the checkpoint folder of a new run, and the run's identity."""
    run = create_run(spec, folder / "runs")
    return claim(run, spec), run_id(run)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of step 3 in a folder of its own."""
    (tmp_path / "checkpoints").mkdir()
    return written(tmp_path / "checkpoints", 3, "", spec_in(tmp_path))


@pytest.fixture
def states(saved: Path) -> Path:
    return saved / "optimizer"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def found_in(folder: Path, run: str = "") -> tuple[str, list[str]]:
    """Return the name of the newest readable checkpoint, and the codes of damaged ones."""
    found = newest(folder, run)
    assert found is not None
    return found.path.name, [damaged.code for damaged in found.damaged]


def test_later_attempts_find_the_checkpoint_folder(tmp_path: Path) -> None:
    spec = spec_in(tmp_path / "scratch" / "deep")
    run = create_run(spec, tmp_path / "runs")
    folder = claim(run, spec)
    assert folder == checkpoints_folder(run, spec) == tmp_path / "scratch" / "deep" / run.name
    assert run_id(RunDirectory(folder)) == run_id(run) != ""
    assert claim(run, spec) == folder
    assert names(folder.parent) == [run.name]
    folder.chmod(0o777)  # others can write
    with coded(TrainingError, "checkpoint-folder-taken"):
        claim(run, spec)


def test_a_run_never_gets_the_checkpoints_of_another(tmp_path: Path) -> None:
    spec = spec_in(tmp_path / "scratch")
    first = named_run(spec, tmp_path / "runs", "same")
    second = named_run(spec, tmp_path / "others", "same")
    folder = claim(first, spec)
    written(folder, 11, run_id(first), spec)
    (folder / "step-000012.partial").mkdir()
    before = names(folder)
    with coded(TrainingError, "checkpoint-folder-taken", f"checkpoint.folder: {folder} "):
        claim(second, spec)
    assert names(folder) == before
    with coded(TrainingError, "checkpoints-unreadable"):
        newest(folder, run_id(second))


def test_a_folder_without_identity_is_of_a_run_without_one(tmp_path: Path) -> None:
    spec = spec_in(tmp_path / "scratch")
    old = named_run(spec, tmp_path / "runs", "same")
    new = named_run(spec, tmp_path / "others", "same")
    old.manifest_path.unlink()
    folder = claim(old, spec)
    written(folder, 5, "", spec)
    assert names(folder) == ["step-000005"]
    assert claim(old, spec) == folder
    assert found_in(folder, run_id(old)) == ("step-000005", [])
    with coded(TrainingError, "checkpoint-folder-taken"):
        claim(new, spec)


def test_foreign_checkpoints_are_not_used_or_counted(tmp_path: Path) -> None:
    spec = tiny(checkpoint__keep="2")
    folder, own = claimed(tmp_path, spec)
    written(folder, 3, own, spec)
    shutil.copytree(written(folder, 4, own, spec), folder / "step-000098")
    shutil.copytree(written(tmp_path, 7, "another", spec), folder / "step-000097")
    (folder / "step-000099").write_text("a plain file")
    (folder / f"step-{'9' * 30}").mkdir()
    (folder / "step-000096").symlink_to(tmp_path / "step-000007")
    assert found_in(folder, own) == ("step-000004", ["misnamed", "other-run"])
    written(folder, 5, own, spec)
    kept = [path.name for path in checkpoint_folders(folder)]
    assert kept == ["step-000004", "step-000005", "step-000097", "step-000098"]
    written(folder, 99, own, spec)
    assert (folder / "step-000099.superseded").read_text() == "a plain file"


def test_an_only_checkpoint_that_is_replaced_all_the_time_is_seen(tmp_path: Path) -> None:
    (tmp_path / "step-000001").mkdir()
    over = threading.Event()

    def replace_it() -> None:
        for step in itertools.count(2):
            (tmp_path / f"step-{step:06d}").mkdir()
            (tmp_path / f"step-{step - 1:06d}").rmdir()
            if over.wait(0.001):
                return

    run = threading.Thread(target=replace_it)
    run.start()
    try:
        seen = [bool(checkpoint_folders(tmp_path)) for _ in range(4_000)]
    finally:
        over.set()
        run.join()
    assert all(seen)


def test_starting_over_renames_checkpoints_and_deletes_none(tmp_path: Path) -> None:
    spec = tiny()
    folder, own = claimed(tmp_path, spec)
    for step in (3, 6):
        written(folder, step, own, spec)
    copied = written(folder, 9, "of another run", spec)
    set_all_aside(folder, own)
    assert copied.exists()
    shutil.rmtree(copied)
    assert newest(folder, own) is None
    assert names(folder) == ["run.json", "step-000003.superseded", "step-000006.superseded"]
    written(folder, 3, own, spec)
    set_all_aside(folder, own)
    assert "step-000003.superseded.2" in names(folder)


def damage(path: Path, **values: Any) -> None:
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | values))


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "a/../../b", "a\0b"])
def test_a_manifest_names_no_file_outside_its_checkpoint(name: str, saved: Path) -> None:
    (saved.parent / "outside").write_text("x")
    damage(saved / "checkpoint.json", files={name: 1})
    with pytest.raises(superoffload.OffloadError, match="not inside"):
        _verify(saved)


def test_what_a_manifest_says_does_not_fill_the_message(saved: Path) -> None:
    damage(saved / "checkpoint.json", files={"n" * 1_000_000: 1})
    with pytest.raises(TrainingError) as caught:
        newest(saved.parent)
    assert len(str(caught.value)) < 5_000


def test_a_manifest_that_is_a_pipe_or_nested_deep_is_damage(saved: Path) -> None:
    pipe, deep = (
        shutil.copytree(saved, saved.with_name(f"step-00000{step}")) / "checkpoint.json"
        for step in (4, 5)
    )
    pipe.unlink()
    os.mkfifo(pipe)
    deep.write_text('{"spec":' * 100_000)
    assert found_in(saved.parent) == (saved.name, ["unreadable"] * 2)


@pytest.mark.parametrize(
    "hostile",
    [
        {"numel": 0, "names": ["w"], "numels": [1 << 50]},
        {"numel": 0, "names": ["w"], "numels": [-4]},
        {"numel": -1, "names": [], "numels": []},
        {"numel": 0, "names": ["w"], "numels": []},
    ],
)
def test_impossible_sizes_are_refused(hostile: dict[str, object], states: Path) -> None:
    group = {"device": "cpu", "step": 1, "moments": False} | hostile
    damage(states / "rank_00000.json", sub_groups=[group])
    with coded(
        superoffload.OffloadError, "unreadable", match=r"sizes are impossible|Expected `int` >= 0"
    ):
        list(superoffload.saved_master_weights(states))


@pytest.mark.parametrize(
    "name",
    ["optimizer", "optimizer/rank_00000.states", "optimizer/rank_00000.json", "checkpoint.json"],
)
def test_a_link_in_a_checkpoint_is_damage(name: str, saved: Path, tmp_path: Path) -> None:
    path = saved / name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises((superoffload.OffloadError, OSError)):
        _verify(saved)
    if name.startswith("optimizer"):
        with pytest.raises(superoffload.OffloadError):
            superoffload.verify_state(saved / "optimizer")
    with coded(TrainingError, "checkpoints-unreadable"):
        newest(saved.parent)


@pytest.mark.parametrize("name", ["rank_00000.states", "rank_00000.json"])
def test_a_pipe_as_a_state_does_not_block(name: str, states: Path) -> None:
    (states / name).unlink()
    os.mkfifo(states / name)
    with coded(superoffload.OffloadError, "unreadable"):
        superoffload.verify_state(states)


def test_a_states_description_of_more_than_its_limit_is_not_read(states: Path) -> None:
    os.truncate(states / "rank_00000.json", 65 << 20)
    with coded(superoffload.OffloadError, "unreadable", match="more than"):
        superoffload.verify_state(states)


def test_leftover_links_go_and_their_targets_stay(tmp_path: Path) -> None:
    folder, target = tmp_path / "checkpoints", tmp_path / "target"
    for path in (folder, target):
        path.mkdir()
    (target / "precious").write_bytes(b"x")
    (folder / "step-000001.partial").symlink_to(target)
    (folder / "step-000002.partial").write_bytes(b"x")
    (folder / "step-000003.partial").symlink_to(tmp_path / "nothing")
    checkpoint_folder.make_room(folder, 0, "checkpoint.folder")
    assert (names(folder), names(target)) == ([], ["precious"])


def test_large_removed_files_are_freed_by_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gib = 1 << 30
    states = tmp_path / "old" / "optimizer"
    states.mkdir(parents=True)
    for name, size in (("large", 3 * gib + 5), ("small", 10), ("kept", 2 * gib)):
        (states / name).touch()
        os.truncate(states / name, size)  # no bytes on the disk
    (tmp_path / "kept").hardlink_to(states / "kept")
    (tmp_path / "target").write_bytes(b"x")
    (states / "link").symlink_to(tmp_path / "target")
    sizes, cut = [], os.ftruncate

    def noting(descriptor: int, size: int) -> None:
        sizes.append(size)
        cut(descriptor, size)

    monkeypatch.setattr(os, "ftruncate", noting)
    checkpoint_folder._remove(tmp_path / "old")
    assert sizes == [2 * gib + 5, gib + 5, 5]
    assert not (tmp_path / "old").exists()
    assert (tmp_path / "kept").stat().st_size == 2 * gib
    assert (tmp_path / "target").read_bytes() == b"x"


def test_an_unremovable_checkpoint_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system keeps a folder while somebody, such as an export, reads in it."""
    spec = tiny(checkpoint__keep="1")
    folder, own = claimed(tmp_path, spec)
    written(folder, 3, own, spec)
    held = OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", raising(held))
        assert written(folder, 4, own, spec).name == "step-000004"
        checkpoint_folder.make_room(folder, 0, "checkpoint.folder")
    assert [path.name for path in checkpoint_folders(folder)] == ["step-000004"]
    assert "step-000003.partial" in names(folder)
    checkpoint_folder.make_room(folder, 0, "checkpoint.folder")
    assert "step-000003.partial" not in names(folder)


MODIFYING = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")


def ended_by_itself(act: Callable[[], object], most: int) -> bool:
    """Act in a process that is killed before it changes more than ``most`` files; say if not."""
    child = os.fork()
    if not child:
        changes = itertools.count()

        def count(event: str, arguments: tuple[object, ...]) -> None:
            writes = event == "open" and bool(int(str(arguments[2])) & (os.O_WRONLY | os.O_RDWR))
            if (writes or event in MODIFYING) and next(changes) >= most:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        act()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_save_killed_at_any_point_leaves_a_valid_checkpoint(tmp_path: Path) -> None:
    spec = tiny(checkpoint__keep="1")
    written(tmp_path, 3, "", spec)
    found: list[str] = []
    ended = False
    while not ended:
        folder = tmp_path / str(len(found))
        shutil.copytree(tmp_path / "step-000003", folder / "step-000003")
        ended = ended_by_itself(partial(written, folder, 4, "", spec), len(found))
        name, damaged = found_in(folder)
        assert not damaged
        found.append(name)
        checkpoint_folder.make_room(folder, 0, "checkpoint.folder")
        assert not list(folder.glob("*.partial"))
    assert len(found) > 10
    assert found == sorted(found)
    assert set(found) == {"step-000003", "step-000004"}
