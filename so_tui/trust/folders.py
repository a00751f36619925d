"""Open a folder once and judge what was opened: whose it is, who else can write in it, and who can
exchange it for another one.

A path says nothing for long: whoever can rename a folder above can put another one there between a
check and a use. What a run executes is therefore read through a descriptor that was judged, or
compared with a hash of what was read before.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from so_tui.trust.files import (
    Distrust,
    NotOwnError,
    UnfitFileError,
    distrust_of,
    distrust_of_folder,
    others_can_write,
)
from so_tui.trust.text import printable_line

_LOG = logging.getLogger(__name__)
_MOST_LINKS = 40
"""As many as Linux follows in one path."""
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class Folder:
    """An open folder. What is in it is opened relative to it, and never through a link.

    Close it, or use it in a ``with`` statement.
    """

    path: Path
    """Its name, for messages."""
    descriptor: int
    exchangeable_in: Path | None
    """The nearest folder above in which other users can rename what the path names, and so
    exchange this folder for another one; None if nobody can.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    @property
    def at(self) -> Path:
        """A path that leads here in this process alone, whatever has the folder's name by now."""
        return Path(f"/proc/self/fd/{self.descriptor}")

    @property
    def distrust(self) -> Distrust | None:
        """Why it is not this user's own; None if it is. Others may be able to read it."""
        return distrust_of(self.descriptor, stat.S_IFDIR)

    def foreign(self, name: str = ".", kind: int | None = None) -> Iterator[NotOwnError]:
        """Judge a file or folder in this one and, below a folder, everything in it; yield each that
        is not this user's own.

        Args:
            name: Its path below this folder. If nothing is there, that is yielded as missing; what
                vanishes from below it while this reads is left out.
            kind: ``stat.S_IFREG`` or ``stat.S_IFDIR``, if it must be that.

        Raises:
            OSError: Something cannot be opened.
        """
        try:
            descriptor = self._opened(name, os.O_PATH)
        except FileNotFoundError:
            yield NotOwnError(self.path / name, Distrust.MISSING)
            return
        try:
            found = stat.S_IFMT(os.fstat(descriptor).st_mode)
            usual = stat.S_IFDIR if found == stat.S_IFDIR else stat.S_IFREG
            distrust = distrust_of(descriptor, kind or usual)
        finally:
            os.close(descriptor)
        if distrust is not None:
            yield NotOwnError(self.path / name, distrust)
        elif found == stat.S_IFDIR:
            with suppress(FileNotFoundError):
                for below in self.names(name):
                    parts = self.foreign(f"{name}/{below}")
                    yield from (part for part in parts if part.distrust is not Distrust.MISSING)

    def open(self, name: str) -> int:
        """Open a regular file in it for reading, and return the descriptor.

        Raises:
            UnfitFileError: It is a link, a folder, a pipe, a socket or a device.
            OSError: It cannot be opened.
        """
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        descriptor = self._opened(name, os.O_RDONLY | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise UnfitFileError(self.path / name)
        return descriptor

    def names(self, name: str = ".") -> list[str]:
        """Return the names in it, or in a folder below it, in order. Raises OSError."""
        descriptor = self._opened(name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return sorted(os.listdir(descriptor))  # noqa: PTH208 - a Path cannot name it
        finally:
            os.close(descriptor)

    def _opened(self, name: str, flags: int) -> int:
        """Open what is at a path below this folder; a link on the way, or at its end, is not
        followed.
        """
        first, _, rest = name.partition("/")
        if first in ("", ".."):
            raise ValueError(f"{name} leads out of the folder")
        if rest:
            with Folder(self.path / first, self._opened(first, _FOLDER), None) as below:
                return below._opened(rest, flags)
        return os.open(first, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.descriptor)


def open_named(path: Path) -> Folder:
    """Open the folder that has this name now, wherever links above it lead. Nothing above it is
    judged, so the caller must know the folder by its owner and by what is in it.

    Raises:
        OSError: There is no such folder, it cannot be entered, or its last name is a link
            (``ENOTDIR``).
    """
    return Folder(path, os.open(path, _FOLDER), path.parent)


def open_folder(path: Path) -> Folder:
    """Open a folder, and judge every folder above it on the way.

    Links of this user and of root are followed, and the folders to which they lead are judged.

    Raises:
        NotOwnError: A link on the way belongs to another user.
        OSError: There is no such folder, or it cannot be entered.
    """
    left = list(reversed(path.absolute().parts))
    at, here, links = os.open("/", _FOLDER), Path("/"), 0
    exchangeable_in: Path | None = None
    try:
        while left:
            part = left.pop()
            if part == "/":
                os.close(at)
                at, here = os.open("/", _FOLDER), Path("/")
                continue
            found = os.stat(part, dir_fd=at, follow_symlinks=False)
            if _others_can_rename(at, found.st_uid):
                exchangeable_in = here
            if stat.S_ISLNK(found.st_mode):
                links += 1
                if found.st_uid not in (os.geteuid(), 0) or links > _MOST_LINKS:
                    raise NotOwnError(here / part, Distrust.OTHER_OWNER)
                left += reversed(Path(os.readlink(part, dir_fd=at)).parts)
                continue
            below = os.open(part, _FOLDER, dir_fd=at)
            os.close(at)
            at, here = below, here / part
    except BaseException:
        os.close(at)
        raise
    return Folder(path, at, exchangeable_in)


def _others_can_rename(descriptor: int, owner: int) -> bool:
    """Return whether another user than this one and root can rename what a user owns in an open
    folder. The owner of a sticky folder can, too.
    """
    trusted, folder = (os.geteuid(), 0), os.fstat(descriptor)
    return folder.st_uid not in trusted or (
        others_can_write(folder, descriptor)
        and not (folder.st_mode & stat.S_ISVTX and owner in trusted)
    )


# Folders that so-tui makes. Nobody else can open them, whatever the umask is, unless the user
# shares runs. Each may be a link of this user to another place.


def _followed(path: Path) -> Path:
    """Return where a link of this user or root leads; any other path as it is."""
    is_link = path.is_symlink() and path.lstat().st_uid in (os.geteuid(), 0)
    return Path(os.path.realpath(path)) if is_link else path


def private_folder(path: Path) -> Path:
    """Make a folder that only this user can open, or check that an existing one belongs to this
    user, and return it.

    Others lose their rights to read an existing folder of this user. Missing parents are made
    private, too.

    Raises:
        NotOwnError: Something else has the name: a file, another user's link or folder, or one
            that others can write.
        OSError: It cannot be made.
    """
    make_folders(path)
    try:
        folder = open_named(_followed(path))
    except NotADirectoryError as error:
        raise NotOwnError(path, Distrust.WRONG_KIND) from error
    with folder:
        if (distrust := folder.distrust) is not None:
            raise NotOwnError(path, distrust)
        if stat.S_IMODE(os.fstat(folder.descriptor).st_mode) & 0o077:
            folder.at.chmod(0o700)
    return path


def is_own_place(path: Path) -> bool:
    """Return whether a folder, or the nearest one above it that exists, is this user's own."""
    found = Path(os.path.realpath(path))  # does not raise where a link leads to itself
    nearest = next(each for each in (found, *found.parents) if os.path.lexists(each))
    return distrust_of_folder(nearest) is None


# Folders from which code is loaded by path. Whoever can exchange one of them, or a folder above
# it, decides what a process executes.


def exchangeable_in(path: Path) -> Path | None:
    """Return the folder in which other users can exchange a folder for another one; None if nobody
    can. One that is missing is judged as if this user made it.
    """
    for found in (path, *path.parents):
        try:
            with open_folder(found) as folder:
                if found != path and _others_can_rename(folder.descriptor, os.geteuid()):
                    return found
                return folder.exchangeable_in
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return found
    return None


def code_folder(path: Path, name: str, host: Path) -> Path:
    """Make a private folder for code, and return it. Where others could exchange it, or it cannot
    be made or written, make one of this host instead, and warn.

    Args:
        path: The folder.
        name: The name of the one of this host, below ``compiled``.
        host: This user's folder for what belongs to this host alone.

    Raises:
        NotOwnError: Another user has made the host's folder.
        OSError: It cannot be made.
    """
    if not path.is_relative_to(host):
        try:
            private_folder(path)
            above = exchangeable_in(path)
            if above is None and os.access(path, os.W_OK):
                return path
            reason = f"others can rename folders in {above}" if above else "it cannot be written"
        except OSError as error:
            reason = str(error)
        path = host / "compiled" / name
        _LOG.warning("compiled code is kept in %s, on this host only: %s", path, reason)
    private_folder(host)  # whoever made it first, in /tmp, could exchange what is in it
    return private_folder(path)


# Who may read what a run writes: its owner alone, or the owner's group with
# ``SO_TUI_SHARE=group``. Only the owner may write.
#
# The mode of the run folder records the choice for later attempts and other processes.


SHARE_VARIABLE = "SO_TUI_SHARE"
WITH_GROUP = "group"
_SHARED_FOLDER = 0o750


def is_shared(folder: Path) -> bool:
    """Return whether a run folder is shared with its owner's group.

    Raises:
        OSError: There is no such folder.
    """
    return folder.stat().st_mode & 0o777 == _SHARED_FOLDER


def make_run_folder(folder: Path, *, shared: bool) -> None:
    """Create a run folder with the modes that were chosen, whatever the umask is. A shared one
    keeps the setgid bit of the folder above, so that its files belong to the project's group. The
    access control list of a folder above would let others write what is made in this one, whatever
    the umask is, so it ends here.

    Raises:
        FileExistsError: Another process was first.
        OSError: It cannot be made.
    """
    folder.mkdir(mode=0o700)
    with suppress(OSError):  # there is none, or the file system has none
        os.removexattr(folder, "system.posix_acl_default")
    if shared:
        folder.chmod(_SHARED_FOLDER | folder.stat().st_mode & stat.S_ISGID)


def make_folders(folder: Path, *, shared: bool = False) -> None:
    """Create a folder, and those above it that are missing, with the modes of a run folder. One
    that exists keeps its mode: others may keep their runs in it.

    Raises:
        OSError: It cannot be made.
    """
    if not folder.is_dir():
        make_folders(folder.parent, shared=shared)
        with suppress(FileExistsError):  # another process was first
            make_run_folder(folder, shared=shared)


def close_to_group(path: Path) -> None:
    """Take the right to write in a folder of this user from the group, which earlier versions left
    to the umask, and log that.

    Raises:
        OSError: There is no such folder, or it cannot be changed.
    """
    with open_named(_followed(path)) as folder:
        mode = os.fstat(folder.descriptor).st_mode
        if folder.distrust is Distrust.OTHERS_CAN_WRITE and not mode & stat.S_IWOTH:
            folder.at.chmod(stat.S_IMODE(mode) & ~stat.S_IWGRP)
            name = printable_line(str(path))
            _LOG.warning("so-tui: took from the group the right to write in %s", name)


def umask_of(folder: Path) -> int:
    """Return the umask of the processes that write into a run folder.

    Raises:
        OSError: There is no such folder.
    """
    return 0o027 if is_shared(folder) else 0o077
