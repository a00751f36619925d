"""Read what others can write: folders of models and data, and caches that a site shares.

A link there may lead to a private file of this user, and what is read ends up in an export. What
others prepared may be anything.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path

from so_tui.folders import cache_home
from so_tui.machine.software import code_folders
from so_tui.spec import InputError
from so_tui.spec.errors import reject
from so_tui.trust.files import (
    Distrust,
    NotOwnError,
    UnfitFileError,
    distrust_of_folder,
    open_descriptor,
    others_can_write,
)
from so_tui.trust.folders import (
    Folder,
    close_to_group,
    is_own_place,
    open_folder,
    private_folder,
)
from so_tui.units import disk_size, thousands

_MODULES = "HF_MODULES_CACHE"
_COPIED = (
    *("*.py", "*.json", "*.jinja", "*.txt", "*.yaml", "*.yml", "*.merges"),
    *("*.model", "*.tiktoken", "*.vocab", "*.bpe", "*.spm"),
)
"""Files that configurations and tokenizers read. Weights are read where they are, as numbers."""
_LEFT_OUT = ("original", "metal", "onnx", "__pycache__")
_MOST_FILES = 1000
_LARGEST_BYTES = 256 << 20
MOST_FILES = 10_000
"""Files and folders in a folder of data."""


def is_own(path: Path) -> bool:
    """Return whether only this user and root can change what a folder has."""
    try:
        with open_folder(path) as folder:
            found = os.fstat(folder.descriptor)
            written = others_can_write(found, folder.descriptor)
            own = found.st_uid in (os.geteuid(), 0) and not written
            return own and folder.exchangeable_in is None
    except OSError:
        return False


def modules_folder() -> Path:
    """Return the folder for the code of models, which no other user can write or exchange."""
    return Path(code_folders(os.environ).get(_MODULES) or os.environ[_MODULES])


def private_copy(source: str, revision: str, field: str) -> tuple[Path, list[str]]:
    """Copy the small files of a folder, or of a repository on the hub, into a folder of this user
    that is named by their content.

    Args:
        source: The folder or the hub id.
        revision: The repository's revision.
        field: What names the source.

    Returns:
        The copy, and the names of its files.

    Raises:
        InputError: They are too many or too large (``code-too-large``), or others can write the
            folder and one is a link that leads out of it, or another user's file
            (``file-not-of-folder``).
        OSError: They cannot be downloaded or copied.
    """
    from huggingface_hub import snapshot_download

    folder = Path(source)
    if not folder.is_dir():
        check_cached("model", source, field)
        ignored = [f"{name}/*" for name in _LEFT_OUT]
        folder = Path(
            snapshot_download(
                source, revision=revision, allow_patterns=[*_COPIED], ignore_patterns=ignored
            )
        )
    folder = folder.resolve()
    names = [*islice(_small_files(folder), _MOST_FILES + 1)]
    copies = private_folder(modules_folder() / "so-tui")
    partial = Path(tempfile.mkdtemp(dir=copies))
    everything = hashlib.sha256()
    try:
        for name, content in _contents(folder, names, field):
            if len(names) > _MOST_FILES or len(content) > _LARGEST_BYTES:
                raise reject(
                    "code-too-large",
                    field,
                    source,
                    f"has more than {thousands(_MOST_FILES)} files, or one of more than "
                    f"{disk_size(_LARGEST_BYTES)}, so its code cannot be copied and checked",
                    "Name a folder with this model alone.",
                )
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            (partial / name).write_bytes(content)
            everything.update(digest_of(name, content))
        final = copies / everything.hexdigest()
        try:
            partial.rename(final)
        except OSError:  # it is there already
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final, names


def digest_of(name: str, content: bytes) -> bytes:
    """Return a hash of a file and its name."""
    return hashlib.sha256(os.fsencode(name)).digest() + hashlib.sha256(content).digest()


def _small_files(folder: Path) -> Iterator[str]:
    """Yield the names of the files to copy, in order."""
    for at, folders, names in os.walk(folder):
        folders[:] = sorted(
            name for name in folders if name not in _LEFT_OUT and not name.startswith(".")
        )
        for name in sorted(names):
            if any(fnmatch(name, pattern) for pattern in _COPIED):
                yield os.path.relpath(Path(at) / name, folder)


def _contents(folder: Path, names: Iterable[str], field: str) -> Iterator[tuple[str, bytes]]:
    """Yield the names of files below a folder, without links in its path, and what is in them, as
    far as it is not too large. Raises as ``private_copy``.
    """
    own = is_own(folder)
    # The hub's cache has the content of a snapshot's files elsewhere in the repository's folder.
    root = folder.parents[1] if folder.parent.name == "snapshots" else folder
    with open_folder(root) as opened:
        for name in names:
            path = folder / name
            try:
                descriptor = (
                    open_descriptor(path)
                    if own
                    else open_within(opened, str(path.relative_to(root)))
                )
            except (OSError, ValueError) as error:
                if own:
                    raise
                raise reject(
                    "file-not-of-folder",
                    field,
                    str(path),
                    "is no file of its folder, which others can write: a link that leads out of "
                    "it, or a file that is elsewhere, too",
                    "Copy the folder to one of your own, look at what is in it, and name the copy.",
                ) from error
            with os.fdopen(descriptor, "rb") as file:
                yield name, file.read(_LARGEST_BYTES + 1)


def open_within(folder: Folder, name: str) -> int:
    """Open a regular file in a folder that others can write, for reading. A link counts if it leads
    to a file in the same folder, as in the hub's cache.

    Args:
        folder: The folder.
        name: The file's path below it.

    Raises:
        ValueError: A link leads out of the folder.
        OSError: It cannot be opened; a file of another owner than the folder's has several names,
            one of which may be elsewhere.
    """
    try:
        descriptor = folder.open(name)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        target = os.readlink(name, dir_fd=folder.descriptor)
        descriptor = folder.open(os.path.normpath(Path(name).parent / target))
    found = os.fstat(descriptor)
    if found.st_uid not in (os.fstat(folder.descriptor).st_uid, 0) and found.st_nlink > 1:
        os.close(descriptor)
        raise UnfitFileError(folder.path / name)
    return descriptor


def check_cached(kind: str, name: str, field: str) -> Path:
    """Return the folder of a repository of the hub in the cache. Refuse one that has links with
    which another user chooses where the hub's client writes.

    Args:
        kind: ``model`` or ``dataset``.
        name: Its name on the hub.
        field: What names it.

    Raises:
        InputError: As ``seen_in``.
        OSError: A folder there cannot be entered.
    """
    from huggingface_hub import constants, file_download

    cached = Path(
        constants.HF_HUB_CACHE, file_download.repo_folder_name(repo_id=name, repo_type=kind)
    )
    for place in (cached, cached.parent / ".locks" / cached.name):
        with suppress(FileNotFoundError):  # it is not there yet, but what is above has been judged
            seen_in(place, field, most_files=math.inf)
    return cached


def seen_in(
    source: Path, field: str = "data.source", most_files: float = MOST_FILES
) -> set[tuple[Path, int, int, int, int]]:
    """Return values that change whenever a file or folder of a source of data is exchanged: the
    source, what is in it, and what belongs to others above it or where its links lead. If only this
    user can change the source, they are those of what belongs to others.

    Raises:
        InputError: A link there is another user's and leads out, to a third user's files
            (``data-link-leads-out``), or there are too many files (``data-too-many-files``).
        OSError: Something went meanwhile, or cannot be entered.
    """
    source, trusted, own = source.absolute(), (os.geteuid(), 0), is_own(source)
    home = source.parent.resolve() / source.name
    left = [(source, True), *((above, False) for above in source.parents)]
    folders, elsewhere, count = set[tuple[int, int]](), set[Path](), 0
    seen = set[tuple[Path, int, int, int, int]]()
    while left:
        path, inside = left.pop()
        count += inside
        if count > most_files:
            raise reject(
                "data-too-many-files",
                field,
                str(source),
                f"has more than {thousands(MOST_FILES)} files and folders",
                "Join its files to fewer, or name a folder in it.",
            )
        link = path.lstat()
        try:
            found = path.stat()
        except OSError:  # it leads nowhere
            continue
        is_theirs = link.st_uid not in trusted
        if stat.S_ISLNK(link.st_mode):
            if (
                is_theirs
                and found.st_uid != link.st_uid
                and not path.resolve().is_relative_to(home)
            ):
                raise reject(
                    "data-link-leads-out",
                    field,
                    str(source),
                    f"{path} is another user's link to files of a third user",
                    "Copy what you want to train on into a folder of your own; or set HF_HOME to "
                    "one, if it comes from the hub.",
                )
            target = path.parent / path.readlink()
            further = {target, *target.parents} - elsewhere
            elsewhere |= further
            left += ((part, False) for part in further)
        if is_theirs or (inside and not own):
            seen.add((path, link.st_ino, link.st_ctime_ns, found.st_ino, found.st_ctime_ns))
        place = (found.st_dev, found.st_ino)
        if inside and stat.S_ISDIR(found.st_mode) and place not in folders:
            folders.add(place)
            left += ((part, True) for part in path.iterdir())
    return seen


def datasets_cache() -> Path:
    """Return the folder in which ``datasets`` keeps the rows that it has prepared: the given one if
    nobody else can write there, else one of this user. Downloads stay where the hub's client has
    them. Raises as ``own_entry``.
    """
    import datasets

    given = Path(datasets.config.HF_DATASETS_CACHE)
    return given if is_own_place(given) else own_entry(cache_home(), "datasets")


def own_entry(root: Path, name: str) -> Path:
    """Return the path of an entry in a cache of this user, which is made private if necessary.

    Raises:
        InputError: The cache cannot be made or written, or it or the entry is not this user's own
            (``cache-unwritable``).
    """
    try:
        if root.is_dir():
            close_to_group(root)
        entry = private_folder(root) / name
        # Nobody else can reach it now, whatever its mode is.
        if (distrust := distrust_of_folder(entry)) in (Distrust.OTHER_OWNER, Distrust.WRONG_KIND):
            raise NotOwnError(entry, distrust)
    except NotOwnError as error:
        raise reject(
            "cache-unwritable",
            "XDG_CACHE_HOME",
            str(error.path),
            f"does not belong to you alone ({error.distrust}), so what is in it is not used",
            "Remove it, or set XDG_CACHE_HOME to a folder of your own.",
        ) from error
    except OSError as error:
        raise unwritable(root, error) from error
    return entry


def unwritable(folder: Path, error: OSError) -> InputError:
    """Return the error of a cache that cannot be written."""
    return reject(
        "cache-unwritable",
        "XDG_CACHE_HOME",
        str(folder),
        f"cannot be written ({error.strerror})",
        "Free some space there, or set XDG_CACHE_HOME to a folder with more space.",
    )
