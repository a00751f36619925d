"""Whose checkpoints a folder holds, and what else may be in it."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

import superoffload.checkpoint
from so_tui.runs import RunDirectory, create_run
from so_tui.runs.directory import checkpoint_folders, checkpoints_folder, run_id
from so_tui.spec import RunSpec
from so_tui_trainer import checkpoint_folder
from so_tui_trainer.checkpoint_folder import _verify, claim, newest, read_manifest, set_all_aside
from so_tui_trainer.failures import TrainingError
from tests.support.checkpoints import written
from tests.support.launching import tiny
from tests.support.problems import coded


def spec_in(folder: Path, keep: int = 2) -> RunSpec:
    return tiny(checkpoint__folder=str(folder), checkpoint__keep=str(keep))


def claimed(folder: Path, spec: RunSpec) -> tuple[Path, str]:
    """Return the checkpoint folder of a new run, and the run's identity."""
    run = create_run(spec, folder / "runs")
    return claim(run, spec), run_id(run)


@pytest.fixture
def states(tmp_path: Path) -> Path:
    """The states of a checkpoint."""
    (tmp_path / "checkpoints").mkdir()
    return written(tmp_path / "checkpoints", 3, "", spec_in(tmp_path)) / "optimizer"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_later_attempts_find_the_checkpoint_folder(tmp_path: Path) -> None:
    spec = spec_in(tmp_path / "scratch" / "deep")
    run = create_run(spec, tmp_path / "runs")
    folder = claim(run, spec)
    assert folder == checkpoints_folder(run, spec) == tmp_path / "scratch" / "deep" / run.name
    assert run_id(RunDirectory(folder)) == run_id(run) != ""
    assert claim(run, spec) == folder
    assert names(folder.parent) == [run.name]


def test_a_run_never_gets_the_checkpoints_of_another(tmp_path: Path) -> None:
    spec = spec_in(tmp_path / "scratch")
    first = create_run(spec, tmp_path / "runs", "same")
    second = create_run(spec, tmp_path / "others", "same")
    folder = claim(first, spec)
    written(folder, 11, run_id(first), spec)
    (folder / "step-000012.partial").mkdir()
    before = names(folder)
    with pytest.raises(TrainingError) as caught:
        claim(second, spec)
    assert caught.value.code == "checkpoint-folder-taken"
    assert caught.value.reason.startswith(f"checkpoint.folder: {folder} ")
    assert names(folder) == before
    with coded(TrainingError, "checkpoints-unreadable"):
        newest(folder, run_id(second))


def test_a_folder_without_identity_is_of_a_run_without_one(tmp_path: Path) -> None:
    spec = spec_in(tmp_path / "scratch")
    old, new = (
        create_run(spec, tmp_path / "runs", "same"),
        create_run(spec, tmp_path / "others", "same"),
    )
    old.manifest_path.unlink()
    folder = claim(old, spec)
    written(folder, 5, "", spec)
    assert names(folder) == ["step-000005"]
    assert claim(old, spec) == folder
    found = newest(folder, run_id(old))
    assert found is not None
    assert found.manifest.step == 5
    with coded(TrainingError, "checkpoint-folder-taken"):
        claim(new, spec)


def test_a_folder_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    spec = spec_in(tmp_path)
    run = create_run(spec, tmp_path / "runs")
    folder = claim(run, spec)
    folder.chmod(0o777)
    with coded(TrainingError, "checkpoint-folder-taken"):
        claim(run, spec)


def test_foreign_checkpoints_are_not_used_or_counted(tmp_path: Path) -> None:
    spec = tiny(checkpoint__keep="2")
    folder, own = claimed(tmp_path, spec)
    written(folder, 3, own, spec)
    shutil.copytree(written(folder, 4, own, spec), folder / "step-000098")
    shutil.copytree(written(tmp_path, 7, "another", spec), folder / "step-000097")
    (folder / "step-000099").write_text("a plain file")
    (folder / f"step-{'9' * 30}").mkdir()
    (folder / "step-000096").symlink_to(tmp_path / "step-000007")
    found = newest(folder, own)
    assert found is not None
    assert (found.path.name, [damage.code for damage in found.damaged]) == (
        "step-000004",
        ["misnamed", "other-run"],
    )
    written(folder, 5, own, spec)
    assert [path.name for path in checkpoint_folders(folder)] == [
        "step-000004",
        "step-000005",
        "step-000097",
        "step-000098",
    ]
    written(folder, 99, own, spec)
    assert (folder / "step-000099.superseded").read_text() == "a plain file"


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


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "a/../../b", "a\0b"])
def test_a_manifest_names_no_file_outside_its_checkpoint(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, 3, "", tiny())
    (tmp_path / "outside").write_text("x")
    manifest = replace(read_manifest(path), files={name: 1})
    (path / "checkpoint.json").write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(superoffload.OffloadError, match="not inside"):
        _verify(path)


def test_what_a_manifest_says_does_not_fill_the_message(tmp_path: Path) -> None:
    path = written(tmp_path, 3, "", tiny())
    manifest = replace(read_manifest(path), files={"n" * 1_000_000: 1})
    (path / "checkpoint.json").write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(TrainingError) as caught:
        newest(tmp_path)
    assert len(str(caught.value)) < 5_000


def test_a_manifest_that_is_a_pipe_or_nested_deep_is_damage(tmp_path: Path) -> None:
    good = written(tmp_path, 3, "", tiny())
    for step, make in (
        (4, lambda path: os.mkfifo(path)),
        (5, lambda path: path.write_text('{"spec":' * 100_000)),
    ):
        path = shutil.copytree(good, tmp_path / f"step-{step:06d}") / "checkpoint.json"
        path.unlink()
        make(path)
    found = newest(tmp_path)
    assert found is not None
    assert (found.path, [damage.code for damage in found.damaged]) == (
        good,
        ["unreadable", "unreadable"],
    )


@pytest.mark.parametrize(
    "hostile",
    [
        {"numel": 0, "names": ["w"], "numels": [1 << 50]},
        {"numel": 0, "names": ["w"], "numels": [-4]},
        {"numel": -1, "names": [], "numels": []},
        {"numel": 0, "names": ["w"], "numels": []},
    ],
)
def test_impossible_sizes_are_refused(hostile: dict[str, object], tmp_path: Path) -> None:
    folder = checkpoint_folder.optimizer_folder(written(tmp_path, 3, "", tiny()))
    path = folder / "rank_00000.json"
    group = {"device": "cpu", "step": 1, "moments": False} | hostile
    path.write_bytes(
        msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | {"sub_groups": [group]})
    )
    with coded(
        superoffload.OffloadError, "unreadable", match=r"sizes are impossible|Expected `int` >= 0"
    ):
        list(superoffload.saved_master_weights(folder))


@pytest.mark.parametrize(
    "name",
    ["optimizer", "optimizer/rank_00000.states", "optimizer/rank_00000.json", "checkpoint.json"],
)
def test_a_link_in_a_checkpoint_is_damage(name: str, states: Path, tmp_path: Path) -> None:
    folder = states.parents[1]
    path = states.parent / name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises((superoffload.OffloadError, OSError)):
        _verify(folder / "step-000003")
    with (
        pytest.raises(superoffload.OffloadError) if name.startswith("optimizer") else nullcontext()
    ):
        superoffload.verify_state(folder / "step-000003" / "optimizer")
    with coded(TrainingError, "checkpoints-unreadable"):
        newest(folder)


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
    folder.mkdir()
    target.mkdir()
    (target / "precious").write_bytes(b"x")
    (folder / "step-000001.partial").symlink_to(target)
    (folder / "step-000002.partial").write_bytes(b"x")
    (folder / "step-000003.partial").symlink_to(tmp_path / "nothing")
    checkpoint_folder.make_room(folder, 0, "checkpoint.folder")
    assert names(folder) == []
    assert names(target) == ["precious"]


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

    def held(path: Path) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", held)
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
    found: list[int] = []
    ended = False
    while not ended:
        folder = tmp_path / str(len(found))
        shutil.copytree(tmp_path / "step-000003", folder / "step-000003")
        ended = ended_by_itself(partial(written, folder, 4, "", spec), len(found))
        left = newest(folder)
        assert left is not None
        assert not left.damaged
        found.append(left.manifest.step)
        checkpoint_folder.make_room(folder, 0, "checkpoint.folder")
        assert not list(folder.glob("*.partial"))
    assert len(found) > 10
    assert found == sorted(found)
    assert set(found) == {3, 4}
