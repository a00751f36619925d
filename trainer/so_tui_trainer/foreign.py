"""Read what others can write: folders of models and data, and caches that a site shares.

A link there may lead to a private file of this user, and what is read ends up in an export. What
others prepared may be anything.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatch
from pathlib import Path

from msgspec.structs import replace

from so_tui.folders import cache_home
from so_tui.spec import InputError, ModelSpec, first_line, resolve_source
from so_tui.spec.errors import reject
from so_tui.trust.files import (
    Distrust,
    NotOwnError,
    UnfitFileError,
    distrust_of_folder,
    others_can_write,
)
from so_tui.trust.folders import (
    Folder,
    close_to_group,
    is_own_place,
    open_folder,
    private_folder,
)
from so_tui_trainer.hub import UNWANTED, WANTED

_SMALL = tuple(pattern for pattern in WANTED if pattern != "*.safetensors")


@contextmanager
def without_links(model: ModelSpec) -> Iterator[ModelSpec]:
    """Yield the model with private copies in place of folders, of its own or of its tokenizer, that
    others can write. They have no weights.

    A model whose own code runs is copied where that code is checked.

    Raises:
        InputError: A file there is a link that leads out of the folder, or a file of somebody else
            (``file-not-of-folder``), or the hub refuses the files (``model-config-unreadable``).
    """
    sources = {"id": model.revision if model.weights == "pretrained" else None, "tokenizer": "main"}
    with ExitStack() as stack:
        for field, revision in sources.items():
            name = getattr(model, field)
            if not name or revision is None or model.trust_remote_code:
                continue
            folder = _folder(resolve_source(name), revision, f"model.{field}")
            if folder is None:
                continue
            copy = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="so-tui-model-")))
            copy_files(folder, _small_files(folder), copy, f"model.{field}")
            model = replace(model, **{field: str(copy)})
        yield model


def _folder(source: str, revision: str, field: str) -> Path | None:
    """Return the folder of a source if others can write it: of the hub's cache, for a hub id."""
    from huggingface_hub import constants, snapshot_download

    folder = Path(source).expanduser()
    if folder.is_dir():
        folder = folder.resolve()
        return None if is_own(folder) else folder
    if is_own(Path(constants.HF_HUB_CACHE)) or source.startswith(("/", ".", "~")):
        return None
    try:
        return Path(
            snapshot_download(
                source,
                revision=revision,
                allow_patterns=list(_SMALL),
                ignore_patterns=list(UNWANTED),
            )
        ).resolve()
    except Exception as error:  # whatever the hub's client and its HTTP client raise
        raise reject(
            "model-config-unreadable",
            field,
            source,
            f"cannot be read ({first_line(error)})",
            "Check the name and the network, log in with `hf auth login` if it is gated, or "
            "download it first with `so-tui fetch`.",
        ) from error


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


def _small_files(source: Path) -> Iterator[str]:
    """Yield the names of the files that configurations and tokenizers are read from."""
    for at, _, names in os.walk(source):
        for name in sorted(names):
            if any(fnmatch(name, pattern) for pattern in _SMALL):
                yield os.path.relpath(Path(at) / name, source)


def copy_files(source: Path, names: Iterable[str], to: Path, field: str) -> None:
    """Copy files of a folder that others can write.

    Args:
        source: The folder, without links in its path.
        names: Paths of the files below it.
        to: The folder for the copies.
        field: What names the folder.

    Raises:
        InputError: One is a link that leads out of the folder, or a file of somebody else
            (``file-not-of-folder``).
    """
    # The hub's cache has the content of a snapshot's files elsewhere in the repository's folder.
    root = source.parents[1] if source.parent.name == "snapshots" else source
    with open_folder(root) as folder:
        for name in names:
            target = to / name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                descriptor = open_within(folder, str((source / name).relative_to(root)))
            except (OSError, ValueError) as error:
                raise reject(
                    "file-not-of-folder",
                    field,
                    str(source / name),
                    "is no file of its folder, which others can write: a link that leads out of "
                    "it, or a file that is elsewhere, too",
                    "Copy the folder to one of your own, look at what is in it, and name the copy.",
                ) from error
            with os.fdopen(descriptor, "rb") as file, target.open("wb") as copy:
                shutil.copyfileobj(file, copy)


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
    if found.st_uid not in (folder.owner, 0) and found.st_nlink > 1:
        os.close(descriptor)
        raise UnfitFileError(folder.path / name, "not-a-file", 0)
    return descriptor


def seen_in(source: Path) -> set[tuple[Path, int, int, int, int]]:
    """Return what changes whenever somebody exchanges a file or folder of a source of data: its
    own, those in it, and those above it that belong to others.

    Raises:
        InputError: By a link there another user leads this one to files of somebody else
            (``data-link-leads-out``).
        OSError: Something went meanwhile, or cannot be entered.
    """
    source, trusted = source.absolute(), (os.geteuid(), 0)
    left, folders, seen = [*source.parents, source], set[tuple[int, int]](), set()
    while left:
        path = left.pop()
        link, inside = path.lstat(), path.is_relative_to(source)
        try:
            found = path.stat()
        except OSError:  # it leads nowhere
            continue
        is_theirs = link.st_uid not in trusted
        if stat.S_ISLNK(link.st_mode) and is_theirs and found.st_uid != link.st_uid:
            raise reject(
                "data-link-leads-out",
                "data.source",
                str(source),
                f"{path} is another user's link to somebody else's files",
                "Copy what you want to train on into a folder of your own.",
            )
        if inside or is_theirs:
            seen.add((path, link.st_ino, link.st_ctime_ns, found.st_ino, found.st_ctime_ns))
        place = (found.st_dev, found.st_ino)
        if inside and stat.S_ISDIR(found.st_mode) and place not in folders:
            folders.add(place)
            left += path.iterdir()
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
