"""Loads states that any number of ranks saved into the shards of this run's ranks. Parameters are
matched by name, never by position.

The state of AdamW (master weights, both moments, the step) is the same in every offload mode. How
many ranks saved it, with which ratio and sub-groups, only determines in which files the shards of a
parameter are, and where.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from so_tui.model.sharding import MOMENT_BLOCK, partition_numel
from superoffload.checkpoint import Manifest, manifests, open_states, read_into, tensors_of
from superoffload.errors import Mismatch, StateMismatchError
from superoffload.gpu_states import SubGroupState

_MASTER_WEIGHTS = 0
"""Position of the master weights among the tensors of a sub-group; the moments follow."""


class _Overlap(NamedTuple):
    """The elements that a saved shard and a shard of this run have in common."""

    saved_rank: int
    saved_offset: int
    """First common element, in the saved shard."""
    offset: int
    """First common element, in this rank's shard."""
    numel: int


class Rounded(NamedTuple):
    """What a rank does not load as it was saved.

    Compact moments are rounded in two cases, though a run with the same format saved them. All
    moments begin anew where some were not saved, or cannot be set: DeepSpeed's own SuperOffload
    keeps them in a process out of reach.
    """

    blocks: int
    """Blocks of 8-bit moments that saved shards had cut: ``_cut_blocks`` of all parameters."""
    numel: int
    """Parameters whose moments were on a GPU, in fp32."""
    restarted: int = 0
    """Parameters of this rank, padding included, whose moments begin anew; all or none."""


def read(folder: Path, expected: Manifest, states: Iterable[SubGroupState]) -> Rounded:
    """Read this rank's shards of a saved state into ``states``, in place.

    Args:
        folder: Folder with the files of all ranks that saved.
        expected: This rank's manifest, as it would be saved now.
        states: This rank's states, in the order of ``expected.sub_groups``.

    Returns:
        What is not as it was saved; the rounding, if the moments are compact.

    Raises:
        StateMismatchError: If the state belongs to another model. Nothing was changed.
        OffloadError: If a file is missing or cut short.
    """
    saved = manifests(folder)
    if found := tuple(_mismatches(saved, expected)):
        raise StateMismatchError(folder, found)
    locations = _locations(saved[0])
    restarts, restarted = not _have_moments(saved[0], expected), 0
    with ExitStack() as stack:
        files = [stack.enter_context(open_states(folder, manifest)) for manifest in saved]
        for state, group in zip(states, expected.sub_groups, strict=True):
            tensors = tuple(tensors_of(state))
            targets = [
                tensor
                if tensor.device.type == "cpu"
                else torch.empty(tensor.shape, dtype=tensor.dtype)
                for tensor in tensors
            ]
            for kind, target in enumerate(targets):
                if restarts and kind != _MASTER_WEIGHTS:
                    target.zero_()
                    continue
                offset = 0
                for name, numel in zip(group.names, group.numels, strict=True):
                    shard = target[offset : offset + partition_numel(numel, expected.ranks)]
                    _read_shard(
                        files, locations[name], kind, numel, expected.rank, expected.ranks, shard
                    )
                    offset += len(shard)
            if targets[_MASTER_WEIGHTS] is not tensors[_MASTER_WEIGHTS]:
                tensors[_MASTER_WEIGHTS].copy_(targets[_MASTER_WEIGHTS])
            if state.moments is not None:
                state.set_moments(*targets[_MASTER_WEIGHTS + 1 :])
            state.set_step(0 if restarts else saved[0].sub_groups[0].step)
            restarted += group.numel if restarts else 0
    return Rounded(0, 0, restarted) if restarts else _rounded(saved, expected)


def saved_master_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the fp32 weights, flat, of every parameter of a saved state, joined from
    all ranks' files one at a time.

    Raises:
        OffloadError: If a file is missing or cut short.
    """
    for name, kinds in saved_states(Path(folder), moments=False):
        yield name, kinds[_MASTER_WEIGHTS]


def saved_states(folder: Path, *, moments: bool = True) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """Yield the name and the flat states of every parameter of a saved state: master weights, and
    both moments if all ranks saved them.

    Args:
        folder: Folder with the files of all ranks that saved.
        moments: Whether to read the moments.

    Raises:
        OffloadError: If a file is missing or cut short.
    """
    saved = manifests(folder)
    locations = _locations(saved[0])
    kinds = range(3 if moments and _have_moments(*saved) else 1)
    with ExitStack() as stack:
        files = [stack.enter_context(open_states(folder, manifest)) for manifest in saved]
        for group in saved[0].sub_groups:
            for name, numel in zip(group.names, group.numels, strict=True):
                wholes = tuple(torch.empty(numel, dtype=torch.float32) for _ in kinds)
                for kind, whole in zip(kinds, wholes, strict=True):
                    _read_shard(files, locations[name], kind, numel, 0, 1, whole)
                yield name, wholes


def _overlaps(numel: int, saved_ranks: int, rank: int, ranks: int) -> Iterator[_Overlap]:
    """Yield where a shard of ``rank`` lies in the saved shards, for a parameter of ``numel``
    elements; padding is left out.
    """
    saved_shard, shard = partition_numel(numel, saved_ranks), partition_numel(numel, ranks)
    begin, end = min(rank * shard, numel), min((rank + 1) * shard, numel)
    position = begin
    while position < end:
        saved_rank = position // saved_shard
        stop = min(end, (saved_rank + 1) * saved_shard)
        yield _Overlap(
            saved_rank, position - saved_rank * saved_shard, position - begin, stop - position
        )
        position = stop


def _cut_blocks(numel: int, saved_ranks: int, rank: int, ranks: int) -> int:
    """Return how many blocks of 8-bit moments in a shard of ``rank`` lie in several saved shards.

    Their parts had exponents of their own, so they are rounded once more. All other blocks keep
    their values.
    """
    begin = min(rank * partition_numel(numel, ranks), numel)
    starts = [begin + overlap.offset for overlap in _overlaps(numel, saved_ranks, rank, ranks)]
    return len({start // MOMENT_BLOCK for start in starts[1:] if start % MOMENT_BLOCK})


def _rounded(saved: Sequence[Manifest], expected: Manifest) -> Rounded:
    """Return what is rounded when the rank of ``expected`` loads a saved state. Only moments in
    host memory are compact.
    """
    were_on_gpu = {
        name for group in saved[0].sub_groups if group.device != "cpu" for name in group.names
    }
    blocks = loaded = 0
    for group in expected.sub_groups:
        if group.device != "cpu":
            continue
        for name, numel in zip(group.names, group.numels, strict=True):
            if name in were_on_gpu:
                loaded += sum(
                    overlap.numel
                    for overlap in _overlaps(numel, len(saved), expected.rank, expected.ranks)
                )
            else:
                blocks += _cut_blocks(numel, len(saved), expected.rank, expected.ranks)
    return Rounded(blocks, loaded)


def _mismatches(saved: Sequence[Manifest], expected: Manifest) -> Iterator[Mismatch]:
    """Yield every reason why saved states cannot be loaded by a rank that would save
    ``expected``.
    """
    for code, name in (("schema", "schema"), ("byte-order", "byteorder")):
        found, here = getattr(saved[0], name), getattr(expected, name)
        if found != here:
            yield Mismatch(code, f"{name}: saved with {found}, this run has {here}")
    steps = {group.step for manifest in saved for group in manifest.sub_groups}
    if len(steps) > 1 and _have_moments(
        *saved, expected
    ):  # DeepSpeed's own SuperOffload counts those on the GPU only
        yield Mismatch(
            "different-steps",
            f"its sub-groups are from different steps: {', '.join(map(str, sorted(steps)))}",
        )
    yield from _parameter_mismatches(_parameters(saved[0]), _parameters(expected))


def _have_moments(*manifests: Manifest) -> bool:
    return all(group.moments for manifest in manifests for group in manifest.sub_groups)


def _parameter_mismatches(saved: dict[str, int], here: dict[str, int]) -> Iterator[Mismatch]:
    only = (
        ("only-saved", "the checkpoint", saved.keys() - here.keys()),
        ("only-here", "this run", here.keys() - saved.keys()),
    )
    for code, where, names in only:
        if names:
            found = tuple(sorted(names))
            shown = f"{', '.join(found[:3])}{' ...' if len(found) > 3 else ''}"
            yield Mismatch(code, f"{len(found)} parameters are only in {where}: {shown}", found)
    for name in sorted(saved.keys() & here.keys()):
        if saved[name] != here[name]:
            yield Mismatch(
                "size", f"{name}: saved {saved[name]} elements, this run has {here[name]}", (name,)
            )


def _parameters(manifest: Manifest) -> dict[str, int]:
    return {
        name: numel
        for group in manifest.sub_groups
        for name, numel in zip(group.names, group.numels, strict=True)
    }


class _Location(NamedTuple):
    """Where a rank's shard of a parameter is in its file, in elements."""

    first: int
    """First element of its master weights."""
    distance: int
    """From its master weights to its first moment, and from there to its second."""


def _locations(manifest: Manifest) -> dict[str, _Location]:
    found: dict[str, _Location] = {}
    start = 0
    for group in manifest.sub_groups:
        offset = start
        for name, numel in zip(group.names, group.numels, strict=True):
            found[name] = _Location(offset, group.numel)
            offset += partition_numel(numel, manifest.ranks)
        start += group.numel * (3 if group.moments else 1)
    return found


def _read_shard(
    files: Sequence[FileIO],
    location: _Location,
    kind: int,
    numel: int,
    rank: int,
    ranks: int,
    shard: Tensor,
) -> None:
    """Fill ``shard``, one rank's shard of a parameter with its padding, from all files that hold a
    part of it.
    """
    filled = 0
    for overlap in _overlaps(numel, len(files), rank, ranks):
        element = location.first + kind * location.distance + overlap.saved_offset
        read_into(
            files[overlap.saved_rank],
            4 * element,
            shard[overlap.offset : overlap.offset + overlap.numel],
        )
        filled += overlap.numel
    shard[filled:].zero_()
