"""Folders that are opened once: whose they are, who else can write in them or exchange them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from so_tui.trust.files import Distrust, NotOwnError, UnfitFileError
from so_tui.trust.folders import (
    close_to_group,
    is_shared,
    make_run_folder,
    open_folder,
    private_folder,
    umask_of,
)

STRANGER = 61_000
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")


def test_a_private_folder_is_made_and_an_open_one_closed(tmp_path: Path) -> None:
    made = private_folder(tmp_path / "a" / "b")
    assert [path.stat().st_mode & 0o777 for path in (made, made.parent)] == [0o700, 0o700]
    made.chmod(0o755)
    assert private_folder(made).stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    (tmp_path / "circle").symlink_to("circle")
    made.chmod(0o777)
    for path, distrust in (
        (made, Distrust.OTHERS_CAN_WRITE),
        (tmp_path / "file", Distrust.WRONG_KIND),
        (tmp_path / "circle", Distrust.WRONG_KIND),
    ):
        with pytest.raises(NotOwnError) as error:
            private_folder(path)
        assert error.value.distrust is distrust


def test_a_folder_of_so_tui_may_be_a_link_of_ones_own(tmp_path: Path) -> None:
    """Homes are small, and sites have people move caches and runs to scratch. Configurations are
    often links into a repository.
    """
    target, link = tmp_path / "scratch", tmp_path / "so-tui"
    target.mkdir(mode=0o755)
    link.symlink_to(target)
    assert private_folder(link) == link
    assert target.stat().st_mode & 0o777 == 0o700
    target.chmod(0o770)
    os.chown(target, -1, STRANGER) if os.geteuid() == 0 else None
    close_to_group(link)
    assert not target.stat().st_mode & stat.S_IWGRP or os.geteuid()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_mode_of_a_run_ignores_the_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        for shared, mode, of_files in ((False, 0o700, 0o077), (True, 0o750, 0o027)):
            run = tmp_path / str(shared)
            make_run_folder(run, shared=shared)
            assert run.stat().st_mode & 0o777 == mode
            assert (is_shared(run), umask_of(run)) == (shared, of_files)
    finally:
        os.umask(before)


def test_a_shared_run_keeps_the_group_of_its_project(tmp_path: Path) -> None:
    tmp_path.chmod(0o2770)
    make_run_folder(tmp_path / "run", shared=True)
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o2750
    assert is_shared(tmp_path / "run")


def exchangeable_in(path: Path) -> Path | None:
    with open_folder(path) as folder:
        return folder.exchangeable_in


@as_root
@pytest.mark.parametrize(
    ("mode", "owner", "child_owner", "exchangeable"),
    [
        (0o755, 0, 0, False),
        (0o775, 0, 0, False),  # root's group has no other member
        (0o777, 0, 0, True),
        (0o1777, 0, 0, False),
        (0o1777, 0, STRANGER, True),
        (0o755, STRANGER, 0, True),
        (0o1755, STRANGER, 0, True),
    ],
)
def test_who_can_exchange_a_folder(
    mode: int, owner: int, child_owner: int, exchangeable: bool, tmp_path: Path
) -> None:
    above, folder = tmp_path / "above", tmp_path / "above" / "a" / "b"
    folder.mkdir(parents=True)
    os.chown(above, owner, 0)
    os.chown(above / "a", child_owner, 0)
    above.chmod(mode)
    found = exchangeable_in(folder)
    assert (found is not None) is exchangeable
    if found is not None:  # the nearest one: a stranger also rules its own folder
        assert found == (above / "a" if child_owner == STRANGER else above)


@as_root
def test_a_group_with_other_members_is_not_the_user(tmp_path: Path) -> None:
    os.chown(tmp_path, 0, STRANGER)
    tmp_path.chmod(0o775)
    (tmp_path / "folder").mkdir()
    assert exchangeable_in(tmp_path / "folder") == tmp_path
    with open_folder(tmp_path) as folder:
        assert folder.distrust is Distrust.OTHERS_CAN_WRITE


@as_root
def test_links_of_others_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    link = tmp_path / "link"
    link.symlink_to("target")
    with open_folder(link) as folder:
        assert folder.names() == []
        assert folder.path == link
    os.chown(link, STRANGER, 0, follow_symlinks=False)
    with pytest.raises(NotOwnError):
        open_folder(link)
    with pytest.raises(NotOwnError) as error:
        private_folder(link)
    assert error.value.distrust is Distrust.WRONG_KIND


def test_an_exchanged_folder_is_not_read(tmp_path: Path) -> None:
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    with open_folder(tmp_path / "mine") as folder:
        (tmp_path / "mine").rename(tmp_path / "away")
        (tmp_path / "theirs").rename(tmp_path / "mine")
        with os.fdopen(folder.open("file")) as file:
            assert file.read() == "mine"


def test_nothing_in_a_folder_is_reached_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "file").write_text("x")
    (tmp_path / "link").symlink_to("below")
    (tmp_path / "file").symlink_to("below/file")
    os.mkfifo(tmp_path / "pipe")
    with open_folder(tmp_path) as folder:
        os.close(folder.open("below/file"))
        assert folder.names("below") == ["file"]
        for name, kind, distrust in (
            ("below/file", stat.S_IFREG, []),
            ("below", stat.S_IFDIR, []),
            ("file", stat.S_IFREG, [Distrust.WRONG_KIND]),
            ("none", stat.S_IFREG, [Distrust.MISSING]),
        ):
            assert [part.distrust for part in folder.foreign(name, kind)] == distrust
        with pytest.raises(NotADirectoryError):
            next(folder.foreign("link/file", stat.S_IFREG))
        for name in ("link/file", "file"):
            with pytest.raises(OSError, match=r"link|directory"):
                folder.open(name)
        for name in ("pipe", "below"):
            with pytest.raises(UnfitFileError):
                folder.open(name)
        with pytest.raises(ValueError, match="leads out"):
            folder.open("../file")


@as_root
def test_a_group_of_ones_own_counts_as_the_user_unless_a_list_names_others(tmp_path: Path) -> None:
    tmp_path.chmod(0o775)
    with open_folder(tmp_path) as folder:
        assert folder.distrust is None
        # version 2; owner rwx, user STRANGER rwx, group r-x, mask rwx, others r-x
        entries = (
            (1, 7, 2**32 - 1),
            (2, 7, STRANGER),
            (4, 5, 2**32 - 1),
            (16, 7, 2**32 - 1),
            (32, 5, 2**32 - 1),
        )
        listed = b"\2\0\0\0" + b"".join(
            tag.to_bytes(2, "little") + rights.to_bytes(2, "little") + user.to_bytes(4, "little")
            for tag, rights, user in entries
        )
        try:
            os.setxattr(tmp_path, "system.posix_acl_access", listed)
        except OSError as error:
            pytest.skip(f"this file system has no access control lists: {error}")
        assert folder.distrust is Distrust.OTHERS_CAN_WRITE
