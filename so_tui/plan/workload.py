"""What is known of a run's data before it runs. Whoever tokenises data (a preview, an earlier run)
leaves it here, and plans read it.

One small JSON file per data and tokenizer in the XDG state folder. Without a file plans assume the
most that data can cost.
"""

from __future__ import annotations

import hashlib
import logging
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from so_tui.folders import state_home
from so_tui.spec.check import exists, write_atomic
from so_tui.spec.data_notes import Found
from so_tui.spec.run_spec import RunSpec
from so_tui.trust.decoding import prepare, read_json
from so_tui.trust.folders import make_folders

# Small JSON files in the state folder that planning reads: each is decoded once for as long as it
# does not change.


_LOG = logging.getLogger(__name__)

T = TypeVar("T", bound=Struct)


def read_state_file(path: Path, kind: type[T]) -> T | None:
    """Return the file's content; None where there is no such file, or it cannot be read."""
    try:
        stamp = path.stat()
    except OSError:
        return None
    return _read(path, kind, stamp.st_mtime_ns, stamp.st_size)


def write_state_file(path: Path, value: Struct) -> Path:
    """Replace the file and return its path. Raises OSError."""
    make_folders(path.parent)
    write_atomic(path, msgspec.json.format(msgspec.json.encode(value), indent=1))
    return path


@lru_cache(maxsize=256)
def _read(path: Path, kind: type[T], modified_ns: int, size: int) -> T | None:
    # Keyed by time and size, so that a plan costs a stat and not a decoding.
    try:
        found = read_json(path, kind)
    except (OSError, msgspec.DecodeError) as error:
        _LOG.info("%s is not used: %s", path, error)
        return None
    _LOG.info("%s is used", path)
    return found


SCHEMA = 1
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
"""Those that plans try."""


class Workload(Struct, frozen=True, kw_only=True):
    """Properties of the data that decide how long a step takes; the defaults are the most that data
    can cost.
    """

    attended_tokens: float = 0.0
    """Sum of squared document lengths over the sum of lengths, which attention's cost follows; 0:
    whole sequences.
    """
    trained_share: float = 1.0
    """Tokens that carry loss, of all positions."""
    useful_share: float = 1.0
    """Tokens that are not padding, of all positions."""
    row_shares: tuple[tuple[int, float], ...] = ()
    """(micro-batch, positions that are computed of all) where each document is a row, as wide as
    the longest of its micro-batch.
    """

    def row_share(self, micro_batch: int) -> float:
        """Return the share of ``row_shares`` for a micro-batch, or for the next larger one; 1 where
        it is not known.
        """
        return next((share for size, share in self.row_shares if size >= micro_batch), 1.0)


class Seen(Struct, frozen=True, kw_only=True):
    schema: int = SCHEMA
    fingerprint: str
    """Of the tokenised data: it differs for other rows under the same name."""
    workload: Workload
    kinds: dict[str, Found] = {}
    """What is not trained as the rows have it."""


prepare(Seen)


def _path_of(spec: RunSpec) -> Path:
    """Return the file for the spec's data, whether it exists or not. Its name depends on whatever
    changes the tokenised data.
    """
    data, model = spec.data, spec.model
    sources = [
        (_absolute(part.source), part.weight, part.subset, part.split, part.format)
        for part in data.sources
    ]
    tokenizer = _absolute(model.tokenizer or model.id)
    decisive = [
        *(sources, data.loss, data.split_turns, data.sequence_length, data.packing),
        *(tokenizer, model.revision),
    ]
    return (
        state_home()
        / "data"
        / f"{hashlib.sha256(msgspec.json.encode(decisive)).hexdigest()[:24]}.json"
    )


def seen(spec: RunSpec) -> Seen | None:
    """Return what is known of the spec's data; None when nothing is. An unreadable file counts as
    none.
    """
    return read_state_file(_path_of(spec), Seen)


def remember(spec: RunSpec, found: Seen) -> Path:
    """Store what was found, for plans of this data. Raises OSError."""
    return write_state_file(_path_of(spec), found)


def _absolute(name: str) -> str:
    """Return a file or folder by its absolute path, which does not depend on the working directory;
    other names unchanged.
    """
    path = Path(name).expanduser()
    return str(path.absolute()) if exists(path) else name
