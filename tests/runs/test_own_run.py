"""A run is acted upon in the folder that was judged, with everything in it that is read."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path

import pytest

from so_tui.folders import default_runs_dir, state_home
from so_tui.runs import RunDirectory, create_run, delete_run, listing, new_attempt, read_state
from so_tui.runs.directory import exchanged, known_id, own_run, write_run_json
from so_tui.runs.listing import RunNotes, write_notes
from so_tui.runs.records import RunState
from so_tui.runs.state import write_spec, write_state
from tests.support.launching import tiny
from tests.support.problems import refused, rejected

OTHERS = 61_000
"""The id of a user and of a group."""
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def made_of(folder: Path, **changes: str) -> RunDirectory:
    """A run with something of everything that is read."""
    run = create_run(tiny(**changes), folder)
    new_attempt(run)
    for name in ("attempts/001/launch.json", "metrics/000001.jsonl", "control/stop"):
        (run.path / name).touch(mode=0o600)
    return run


def with_checkpoint(folder: Path) -> None:
    (folder / "step-000003" / "optimizer").mkdir(parents=True, mode=0o700)
    for name in ("checkpoint.json", "optimizer/rank_00000.states"):
        (folder / "step-000003" / name).touch(mode=0o600)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = made_of(tmp_path)
    with_checkpoint(made.checkpoints_dir)
    made.supervisor_lock_path.touch(mode=0o600)
    return made


PARTS = [
    *("state.json", "spec.json", "run.json", "supervisor.lock", "attempts", "attempts/001"),
    *("attempts/001/launch.json", "metrics", "metrics/000001.jsonl", "control", "control/stop"),
    *("checkpoints", "checkpoints/step-000003", "checkpoints/step-000003/checkpoint.json"),
    "checkpoints/step-000003/optimizer/rank_00000.states",
]


@pytest.mark.parametrize("part", ["", *PARTS])
def test_every_part_that_is_read_is_ones_own(run: RunDirectory, part: str) -> None:
    with own_run(run):
        pass
    path = run.path / part
    mode = path.stat().st_mode
    path.chmod(mode | 0o002)
    with refused("others-can-write"), own_run(run):
        pass
    path.chmod(mode)
    if os.geteuid() == 0:
        os.chown(path, OTHERS, -1)
        with refused("not-your-run"), own_run(run):
            pass
        os.chown(path, 0, -1)
    if "step" not in part:  # there a link is damage, and what was saved before is used
        path.rename(run.path.parent / "moved")
        path.symlink_to(run.path.parent / "moved")
        with refused("wrong-kind"), own_run(run):
            pass


def test_checkpoints_elsewhere_are_ones_own(tmp_path: Path) -> None:
    run = made_of(tmp_path / "runs", checkpoint__folder=str(tmp_path / "saved"))
    with own_run(run):
        pass
    with_checkpoint(folder := tmp_path / "saved" / run.name)
    with own_run(run):
        pass
    (folder / "step-000003" / "optimizer").chmod(0o777)
    with refused("others-can-write") as caught, own_run(run):
        pass
    assert str(folder) in str(caught.value)


def test_a_log_that_slurm_made_with_an_open_umask_is_none_of_them(run: RunDirectory) -> None:
    (run.attempt_dir(1) / "slurm.7.log").touch()
    (run.attempt_dir(1) / "slurm.7.log").chmod(0o666)
    with own_run(run):
        pass


@as_root
def test_a_group_that_could_write_no_longer_can(
    run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    """As an earlier version left it. Any other part that it could write is refused."""
    os.chown(run.path, -1, OTHERS)
    run.path.chmod(0o2775)
    with own_run(run):
        pass
    assert oct(run.path.stat().st_mode & 0o7777) == "0o2755"
    assert str(run.path) in caplog.text
    os.chown(run.attempts_dir, -1, OTHERS)
    run.attempts_dir.chmod(0o770)
    with refused("others-can-write"), own_run(run):
        pass


def test_what_is_done_is_done_in_the_folder_that_was_judged(run: RunDirectory) -> None:
    other = made_of(run.path.parent)
    known, before = known_id(run), read_state(other)
    with own_run(run) as own:
        assert not exchanged(own, known)
        moved = RunDirectory(run.path.rename(run.path.with_name("moved")))
        assert not exchanged(own, known), "it may come back, as a file system may"
        other.path.rename(run.path)
        assert exchanged(own, known), "it is a different run, although it has the same owner"
        state = read_state(own)
        write_state(own, state)
        assert own.attempts() == (1,)
        write_spec(own, tiny(train__steps="77"))
        shutil.rmtree(run.path)
        run.path.symlink_to(moved.path)
        assert not exchanged(own, known), "the name leads to it again"
        run.path.unlink()
        run.path.symlink_to(moved.path.parent)
        assert exchanged(own, known)
    assert '"steps": 77' in moved.spec_path.read_text()
    assert before.name == other.name


def test_a_folder_with_new_numbers_is_opened_anew(run: RunDirectory) -> None:
    """As a file server shows it that has failed over."""
    known = known_id(run)
    with own_run(run) as own:
        again = run.path.with_name("again")
        shutil.copytree(run.path, again)
        shutil.rmtree(run.path)
        again.rename(run.path)
        assert not exchanged(own, known)
        assert read_state(own) == read_state(run)


@as_root
def test_folders_of_runs_are_private_whatever_the_umask_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = os.umask(0)
    try:
        run = create_run(tiny(), tmp_path / "a" / "b")
        folders = (run.path, run.path.parent, run.path.parent.parent)
        assert {oct(folder.stat().st_mode & 0o777) for folder in folders} == {"0o700"}
        monkeypatch.setenv("SO_TUI_SHARE", "group")
        create_run(tiny(), tmp_path / "c" / "d")
        assert oct((tmp_path / "c" / "d").stat().st_mode & 0o777) == "0o750"
        # As an earlier version made them, where the group is a project.
        default_runs_dir().mkdir(parents=True, exist_ok=True)
        for folder in (state_home(), default_runs_dir()):
            os.chown(folder, -1, OTHERS)
            folder.chmod(0o775)
        create_run(tiny())
    finally:
        os.umask(before)
    assert {oct(f.stat().st_mode & 0o777) for f in (state_home(), default_runs_dir())} == {"0o755"}
    assert str(default_runs_dir()) in caplog.text


def test_a_list_of_access_ends_at_a_run(tmp_path: Path) -> None:
    """It would let others write files, whatever the umask is."""
    # Version 2: rwx for the owner, a user, the group, the mask and others.
    entries = ((1, 7, -1), (2, 7, OTHERS), (4, 7, -1), (16, 7, -1), (32, 7, -1))
    content = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    try:
        os.setxattr(tmp_path, "system.posix_acl_default", content)
    except OSError:
        pytest.skip("this file system has no access control lists")
    run = made_of(tmp_path)
    (run.metrics_dir / "made").touch()
    assert oct((run.metrics_dir / "made").stat().st_mode & 0o022) == "0o0"
    with own_run(run):
        pass


def test_a_run_exchanged_while_it_is_deleted_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever can rename the folders of two runs would otherwise choose which one goes."""
    named, other = (create_run(tiny(), tmp_path) for _ in range(2))
    (other.path / "precious").write_text("")
    ended, aside = listing._ended, tmp_path / "aside"

    def exchanging(run: RunDirectory, assume_dead: bool) -> RunState:
        state = ended(run, assume_dead)
        if run.supervisor_lock_path.exists() and not aside.exists():
            named.path.rename(aside)
            other.path.rename(named.path)
        return state

    monkeypatch.setattr(listing, "_ended", exchanging)
    with rejected("not-deletable"):
        delete_run(named)
    assert (named.path / "precious").exists()
    assert (aside / "spec.json").exists()


def test_a_note_is_not_written_into_a_folder_put_in_the_place_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, other = (create_run(tiny(), tmp_path) for _ in range(2))

    def exchanging(run: RunDirectory, path: Path, value: object) -> None:
        named.path.rename(tmp_path / "aside")
        other.path.rename(named.path)
        write_run_json(run, path, value)

    monkeypatch.setattr(listing, "write_run_json", exchanging)
    write_notes(named, RunNotes(note="hello"))
    assert not named.notes_path.exists()
    assert (tmp_path / "aside" / "notes.json").exists()
