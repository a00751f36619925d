"""A model's files on the hub, and which of them are in the local cache."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import urlsplit

from so_tui.spec import InputError, ModelSpec, first_line
from so_tui.spec.errors import reject
from so_tui_trainer.foreign import check_cached

WANTED = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.py")
"""Files that loading may need; weights in other formats stay on the hub."""
_PARTIAL = "*.incomplete"
"""How the hub's client names files that it has not downloaded completely."""
_PROGRESS_S = 1.0
_CONNECT_S = 3.0
"""Seconds within which the hub must accept a connection."""
UNWANTED = ("original/*", "metal/*", "onnx/*")
"""Folders with copies of the weights in other formats."""


def stay_offline_when_cut_off() -> None:
    """Use only the local cache if the hub cannot be reached: otherwise every lookup would retry for
    half a minute.

    Call it before anything imports huggingface_hub, which reads its settings once.
    """
    if any(
        os.environ.get(name)
        for name in ("HF_HUB_OFFLINE", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
    ):
        return
    address = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    if not _answers(address.hostname or "", address.port or 443):
        os.environ["HF_HUB_OFFLINE"] = "1"


def _answers(host: str, port: int) -> bool:
    """Return whether a host accepts connections, within ``_CONNECT_S``.

    Connects in a thread: name resolution has no timeout, and takes up to half a minute without a
    name server.
    """
    answered = threading.Event()

    def connect() -> None:
        with suppress(OSError):
            socket.create_connection((host, port), timeout=_CONNECT_S).close()
            answered.set()

    thread = threading.Thread(target=connect, name="is-the-hub-there", daemon=True)
    thread.start()
    thread.join(_CONNECT_S)
    return answered.is_set()


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the errors that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@contextmanager
def _refusals_explained(model: ModelSpec) -> Iterator[None]:
    """Turn what the hub refuses into problems.

    Raises:
        InputError: No such model or revision, or no access.
    """
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except GatedRepoError as error:
        raise model_problem(
            "hub-access-denied",
            model,
            "is gated, and this user has no access",
            "Accept its terms on its page on the hub, then log in with `hf auth login` (or "
            "set HF_TOKEN).",
        ) from error
    except RevisionNotFoundError as error:
        raise reject(
            "hub-revision-missing",
            "model.revision",
            model.revision,
            "is not on the hub",
            "Name a branch, tag or commit.",
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise model_problem(
            "hub-model-missing",
            model,
            "is not on the hub, or private",
            "Check the spelling; if it is private, log in with `hf auth login` (or set "
            "HF_TOKEN); or name a folder.",
        ) from error


def remote_files(model: ModelSpec) -> dict[str, int]:
    """Return the model's wanted files on the hub with their bytes; nothing if the hub cannot be
    reached but the model is in the local cache.

    Raises:
        InputError: No such model, no access, or neither hub nor cache available.
    """
    from huggingface_hub import HfApi

    # HTTPError is httpx's own, of whichever httpx it uses.
    from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled  # type: ignore[attr-defined]

    try:
        with _refusals_explained(model):
            info = HfApi().model_info(model.id, revision=model.revision, files_metadata=True)
    except (OfflineModeIsEnabled, HTTPError, OSError) as error:
        if _cached(model, "config.json"):
            return {}
        raise model_problem(
            "hub-unreachable",
            model,
            "is not in the local cache, and the hub cannot be reached",
            "Connect to the network, or run `so-tui fetch` on a machine with a network and "
            "the same cache folder.",
        ) from error
    return {
        file.rfilename: file.size or 0
        for file in info.siblings or ()
        if any(fnmatch(file.rfilename, pattern) for pattern in WANTED)
        and not any(fnmatch(file.rfilename, pattern) for pattern in UNWANTED)
    }


def download(model: ModelSpec, name: str) -> Iterator[int]:
    """Download a file of a model.

    Yields:
        Once a second, the bytes that are there so far.

    Raises:
        InputError: The hub refuses it, or the connection was lost more often than the client tries
            again (``download-failed``).
    """
    from huggingface_hub import hf_hub_download

    # HTTPError is httpx's own, of whichever httpx it uses.
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    partial = check_cached("model", model.id, "model.id") / "blobs"
    others = set(partial.glob(_PARTIAL))  # of a download that was killed, or of another process
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(hf_hub_download, model.id, name, revision=model.revision)
        while not wait([done], timeout=_PROGRESS_S).done:
            yield sum(map(_size, set(partial.glob(_PARTIAL)) - others))
        try:
            with _refusals_explained(model):
                done.result()
        except (HTTPError, OSError) as error:
            raise model_problem(
                "download-failed",
                model,
                f"cannot be downloaded: {name} ({first_line(error)})",
                "Check network and disk, and run it again: files that are complete are kept.",
            ) from error


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # complete, and renamed
        return 0


def missing_files(model: ModelSpec) -> dict[str, int]:
    """Return the files of a model that the local cache lacks, with their sizes. Raises
    InputError as ``remote_files``.
    """
    files = remote_files(model)
    return {name: size for name, size in files.items() if not _cached(model, name)}


def _cached(model: ModelSpec, name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(model.id, name, revision=model.revision), str)


def model_problem(code: str, model: ModelSpec, message: str, remedy: str) -> InputError:
    """Return the error of a model that cannot be used."""
    return reject(
        code,
        "model.id",
        model.id,
        message,
        remedy,
    )
