"""What is known of a run's data before it runs: left by whoever tokenised it (a look at the data, an earlier run), read by plans.

One small JSON file per data and tokenizer in the XDG state folder. Plans only read; without a file they reckon with the most it can be.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
from msgspec import Struct

from so_tui.plan import kept
from so_tui.plan.types import Workload
from so_tui.spec.folders import state_home
from so_tui.spec.types import RunSpec
from so_tui.structs import prepare

SCHEMA = 1


class Seen(Struct, frozen=True, kw_only=True):
    schema: int = SCHEMA
    fingerprint: str
    """Of the tokenised data: other rows under the same name have another."""
    workload: Workload


prepare(Seen)


def path_of(spec: RunSpec) -> Path:
    """The file for the spec's data, whether it exists or not: by what decides how it is tokenised and cut."""
    data, model = spec.data, spec.model
    sources = [(_place(part.source), part.weight, part.subset, part.split, part.format) for part in data.sources]
    tokenizer = _place(model.tokenizer or model.id)
    decisive = [sources, data.loss, data.sequence_length, data.packing, tokenizer, model.revision]
    return state_home() / "data" / f"{hashlib.sha256(msgspec.json.encode(decisive)).hexdigest()[:24]}.json"


def seen(spec: RunSpec) -> Seen | None:
    """What is known of the spec's data; None when nothing is. An unreadable file counts as none."""
    return kept.read(path_of(spec), Seen)


def remember(spec: RunSpec, found: Seen) -> Path:
    """For the plans of this data from now on. Raises OSError."""
    return kept.write(path_of(spec), found)


def _place(name: str) -> str:
    """Files and folders by their whole path, so that they are the same from everywhere."""
    path = Path(name).expanduser()
    return str(path.absolute()) if path.exists() else name
