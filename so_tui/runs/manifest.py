"""``run.json``: what a run is. Written once when the run is created, and never changed.

Runs of versions before this file have none, and so no identity.
"""

from __future__ import annotations

import time
import uuid

import msgspec
from msgspec import Struct

import so_tui
from so_tui.runs.directory import RunDirectory
from so_tui.runs.files import write_run_file
from so_tui.structs import prepare
from so_tui.trust.decoding import decode_json
from so_tui.trust.reading import read_bounded

_LARGEST_BYTES = 1 << 16


class RunManifest(Struct, frozen=True, kw_only=True):
    """Content of ``run.json``."""

    v: int = 1
    id: str
    """UUID. Every checkpoint of the run carries it: a name can be used twice."""
    name: str
    created: float
    version: str
    """Version of so-tui that created the run."""


prepare(RunManifest)


def new_manifest(run: RunDirectory) -> RunManifest:
    """Return the manifest of a run that is being created, with a new identity."""
    return RunManifest(
        id=str(uuid.uuid4()), name=run.name, created=time.time(), version=so_tui.__version__
    )


def write_manifest(run: RunDirectory, manifest: RunManifest) -> None:
    """Write ``run.json``. Raises OSError."""
    write_run_file(
        run, run.manifest_path, msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    )


def run_id(run: RunDirectory) -> str:
    """Return the identity of a run; empty for a run of an older version.

    Raises:
        OSError: ``run.json`` is there and cannot be read.
        msgspec.DecodeError: It is damaged.
    """
    try:
        return decode_json(read_bounded(run.manifest_path, _LARGEST_BYTES), RunManifest).id
    except FileNotFoundError:
        return ""
