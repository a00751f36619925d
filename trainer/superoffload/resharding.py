"""From the states that some ranks saved to those that other ranks need: found by parameter name, never by position.

The state of AdamW (masters, both moments, the step) is the same thing in every offload mode. How many ranks saved it, with which ratio and
sub-groups, only says in which files, and where in them, the shares of a parameter lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch

from so_tui.model.sharding import partition_numel
from superoffload.checkpoint import Manifest, manifests, open_states, read_into, tensors_of
from superoffload.deepspeed_adapter.engine import SubGroupState
from superoffload.errors import StateMismatchError


class Part(NamedTuple):
    """A stretch of a parameter that one saved share and one share of this run have in common; in elements."""

    owner: int
    """Saved rank."""
    there: int
    """Where it begins in the saved share."""
    here: int
    """Where it begins in this rank's share."""
    length: int


def read(folder: Path, expected: Manifest, states: Iterable[SubGroupState]) -> None:
    """Reads this rank's share of the saved state into ``states``, in place. Nothing is changed when it does not fit.

    Raises StateMismatchError when it belongs to another model, OffloadError when it is torn.
    """
    saved = manifests(folder)
    if problems := tuple(differences(saved, expected)):
        raise StateMismatchError(f"The optimizer state in {folder} does not fit this run:\n  " + "\n  ".join(problems))
    homes = _homes(saved[0])
    with ExitStack() as stack:
        files = [stack.enter_context(open_states(folder, manifest)) for manifest in saved]
        for state, group in zip(states, expected.sub_groups, strict=True):
            for kind, tensor in enumerate(tensors_of(state)):
                target = tensor if tensor.device.type == "cpu" else torch.empty(tensor.shape, dtype=tensor.dtype)
                offset = 0
                for name, numel in zip(group.names, group.numels, strict=True):
                    share = target[offset : offset + partition_numel(numel, expected.ranks)]
                    _read_share(files, homes[name], kind, numel, expected.rank, expected.ranks, share)
                    offset += len(share)
                if target is not tensor:
                    tensor.copy_(target)
            state.set_step(saved[0].sub_groups[0].step)


def saved_master_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and fp32 weights, flat, of every parameter of a saved state, put together from all ranks' files; a tensor at a time.

    Raises OffloadError when it is torn.
    """
    saved = manifests(folder)
    homes = _homes(saved[0])
    with ExitStack() as stack:
        files = [stack.enter_context(open_states(folder, manifest)) for manifest in saved]
        for group in saved[0].sub_groups:
            for name, numel in zip(group.names, group.numels, strict=True):
                whole = torch.empty(numel, dtype=torch.float32)
                _read_share(files, homes[name], 0, numel, 0, 1, whole)
                yield name, whole


def parts(numel: int, saved_ranks: int, rank: int, ranks: int) -> Iterator[Part]:
    """Where the share of ``rank`` in a parameter of ``numel`` elements lies in the shares of the ranks that saved it; padding left out."""
    saved_share, share = partition_numel(numel, saved_ranks), partition_numel(numel, ranks)
    begin, end = min(rank * share, numel), min((rank + 1) * share, numel)
    position = begin
    while position < end:
        owner = position // saved_share
        stop = min(end, (owner + 1) * saved_share)
        yield Part(owner, position - owner * saved_share, position - begin, stop - position)
        position = stop


def differences(saved: Sequence[Manifest], expected: Manifest) -> Iterator[str]:
    """What keeps the saved states from being loaded where ``expected`` is, in words."""
    for name in ("schema", "byteorder"):
        there, here = getattr(saved[0], name), getattr(expected, name)
        if there != here:
            yield f"{name}: saved with {there}, this run has {here}"
    if not all(group.moments for manifest in (saved[0], expected) for group in manifest.sub_groups):
        yield (
            "DeepSpeed's own SuperOffload engine keeps Adam's moments out of reach, so a run with it cannot be resumed exactly; train with "
            'offload.engine = "so-tui"'
        )
    if len(steps := {group.step for manifest in saved for group in manifest.sub_groups}) > 1:
        yield f"its sub-groups are from different steps: {', '.join(map(str, sorted(steps)))}"
    if any(_parameters(manifest) != _parameters(saved[0]) or manifest.ranks != len(saved) for manifest in saved):
        yield "its ranks saved different parameters"
    yield from _different_parameters(_parameters(saved[0]), _parameters(expected))


def _different_parameters(saved: dict[str, int], here: dict[str, int]) -> Iterator[str]:
    for what, names in (("only in the checkpoint", saved.keys() - here.keys()), ("only in this run", here.keys() - saved.keys())):
        if names:
            yield f"{len(names)} parameters are {what}: {', '.join(sorted(names)[:3])}{' ...' if len(names) > 3 else ''}"
    for name in sorted(saved.keys() & here.keys()):
        if saved[name] != here[name]:
            yield f"{name}: saved {saved[name]} elements, this run has {here[name]}"


def _parameters(manifest: Manifest) -> dict[str, int]:
    return {name: numel for group in manifest.sub_groups for name, numel in zip(group.names, group.numels, strict=True)}


class _Home(NamedTuple):
    """Where a rank's share of a parameter begins in its file, in elements: one place for each of masters and both moments."""

    first: int
    distance: int


def _homes(manifest: Manifest) -> dict[str, _Home]:
    found: dict[str, _Home] = {}
    start = 0
    for group in manifest.sub_groups:
        offset = start
        for name, numel in zip(group.names, group.numels, strict=True):
            found[name] = _Home(offset, group.numel)
            offset += partition_numel(numel, manifest.ranks)
        start += group.numel * (3 if group.moments else 1)
    return found


def _read_share(files: Sequence[BinaryIO], home: _Home, kind: int, numel: int, rank: int, ranks: int, share: torch.Tensor) -> None:
    """Fills ``share``, a rank's part of one parameter with its padding, from all files that hold something of it."""
    filled = 0
    for part in parts(numel, len(files), rank, ranks):
        place = home.first + kind * home.distance + part.there
        read_into(files[part.owner], 4 * place, share[part.here : part.here + part.length])
        filled += part.length
    share[filled:].zero_()
