"""Index the tensors in a model's safetensors files, and read any range of their elements without
mapping or holding more.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from so_tui.spec import InputError
from so_tui.spec.errors import reject
from so_tui.trust.decoding import LARGEST_FILE_BYTES
from so_tui.trust.files import open_descriptor, read_bounded
from so_tui.units import disk_size
from so_tui_trainer.foreign import is_own
from so_tui_trainer.pointers import refuse_pointers

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""Element types by safetensors' names."""


class Stored(NamedTuple):
    """A tensor in a file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Offset of its bytes in the file."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def read(self) -> Tensor:
        """Read the whole tensor.

        Raises:
            OSError: The file cannot be read, or ends too early.
        """
        return self.elements(0, self.numel).view(self.shape)

    def part(self, index: int) -> Tensor:
        """Read one part of the first dimension. Raises as ``read``."""
        shape = self.shape[1:]
        return self.elements(index * prod(shape), (index + 1) * prod(shape)).view(shape)

    def elements(self, start: int, stop: int) -> Tensor:
        """Read elements ``start`` to ``stop`` (exclusive) of the flattened tensor.

        Raises:
            OSError: The file cannot be read, or ends too early.
        """
        flat = torch.empty(stop - start, dtype=self.dtype)
        buffer = flat.view(torch.uint8).numpy().data
        with os.fdopen(open_descriptor(self.path), "rb", buffering=0) as file:
            file.seek(self.start + start * self.dtype.itemsize)
            done = 0
            while done < len(buffer):
                count = file.readinto(buffer[done:])
                if not count:
                    raise OSError(
                        f"{self.path} is truncated; it was not copied or downloaded completely"
                    )
                done += count
        return flat


def read_index(folder: Path) -> dict[str, Stored]:
    """Return every tensor in the folder's weight files by name. If there are several copies of the
    weights, the folder's index decides.

    Raises:
        InputError: There are no weight files, files of the index are missing, or a file is damaged
            or truncated.
    """
    names = shards(folder)
    refuse_pointers((folder / name for name in names), "model.id", str(folder))
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise _problem(
            "weights-incomplete",
            folder,
            f"lacks {absent[0]}" + (f" and {len(absent) - 1} more files" if absent[1:] else ""),
        )
    if not names:
        raise reject(
            "weights-missing",
            "model.id",
            str(folder),
            "has no weights in safetensors",
            "Download it again with `so-tui fetch`, name a folder with the complete model, or "
            "start with `model.weights = random`. Load weights in other formats with "
            "transformers, and save them again with `save_pretrained`.",
        )
    found: dict[str, Stored] = {}
    for name in names:
        found |= _of_safetensors(folder / name)
    return found


def shards(folder: Path) -> list[str]:
    """Return the names of the weight files: the single file, else those of the index, else any.
    Raises InputError if one is elsewhere (``weights-elsewhere``).
    """
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    pattern = whole.name if whole.is_file() else "*.safetensors"
    names = sorted(path.name for path in folder.glob(pattern))
    if index.is_file() and not whole.is_file():
        refuse_pointers((index,), "model.id", str(folder))
        names = sorted(set(json.loads(read_bounded(index, _INDEX_BYTES))["weight_map"].values()))
    if elsewhere := [name for name in names if _is_elsewhere(folder, name)]:
        raise reject(
            "weights-elsewhere",
            "model.id",
            str(folder),
            f"names a file outside the folder ({elsewhere[0]}), by its index or by a link of "
            "another user's",
            "Do not use this model, or copy its files into a folder of your own.",
        )
    return names


def _is_elsewhere(folder: Path, name: str) -> bool:
    """Return whether a name leads out of a folder, or, where others can write, a link leads to what
    is not theirs.
    """
    # The hub's cache has the content of a snapshot's files elsewhere in the repository's folder.
    root = (folder.parents[1] if folder.parent.name == "snapshots" else folder).resolve()
    path = (folder / name).resolve()
    of_another = path.exists() and path.stat().st_uid != root.stat().st_uid
    return (
        name.startswith("/")
        or ".." in name
        or (of_another and not path.is_relative_to(root) and not is_own(folder))
    )


def _of_safetensors(path: Path) -> dict[str, Stored]:
    size = path.stat().st_size
    try:
        with os.fdopen(open_descriptor(path), "rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if header_bytes > size:
                raise ValueError("its header is truncated")
            header = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        begin = 8 + header_bytes
        found = {
            name: Stored(
                path,
                DTYPES[entry["dtype"]],
                tuple(entry["shape"]),
                begin + entry["data_offsets"][0],
            )
            for name, entry in header.items()
        }
    except (ValueError, KeyError) as error:
        raise _problem(
            "weights-damaged", path, f"is not a readable safetensors file ({error})"
        ) from error
    if any(stored.start + stored.bytes > size for stored in found.values()):
        raise _problem("weights-truncated", path, "is shorter than its tensors")
    return found


def _problem(code: str, path: Path, message: str) -> InputError:
    return reject(
        code,
        "model.id",
        str(path),
        message,
        "Download it again with `so-tui fetch`, name a folder with the complete model, or start "
        "with `model.weights = random`.",
    )


# Convert MXFP4 weights (gpt-oss) to bf16 once: a folder as ``save_pretrained`` would write it,
# made one expert at a time.
#
# MXFP4 stores 32 values as one shared power of two and 32 values of 4 bits. ``NAME_scales``
# [experts, rows, blocks] has the exponent plus 127, and ``NAME_blocks`` [experts, rows, blocks,
# 16] has two values a byte, the lower half first. The model has the experts' matrices transposed:
# [experts, blocks * 32, rows]. Every value fits bf16 exactly.


VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the lower three bits; the fourth is the sign."""
_BLOCKS, _SCALES = "_blocks", "_scales"
_INDEX_BYTES = 256 << 20
"""Limit of a folder's index. That of a thousand layers of experts has some 50 MB."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HEADER_ALIGNMENT = 64


class _Output(NamedTuple):
    """A tensor of the new folder."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[Tensor]]
    """Yields the tensor's elements in pieces."""

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def _dequantised(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantise the matrix of one expert.

    Args:
        blocks: [rows, blocks, 16] uint8
        scales: [rows, blocks] uint8

    Returns:
        [blocks * 32, rows] bf16
    """
    both = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=torch.bfloat16)
    byte = torch.arange(256)
    pairs = torch.stack((both[byte & 15], both[byte >> 4]), dim=-1).view(torch.int32).flatten()
    values = (
        pairs.index_select(0, blocks.flatten().to(torch.int32))
        .view(torch.bfloat16)
        .view(*scales.shape, 32)
    )
    powers = torch.ldexp(torch.ones(256), torch.arange(256) - 127).to(torch.bfloat16)
    return (values * powers[scales.to(torch.int64)][..., None]).flatten(1).t().contiguous()


def missing_bytes(source: Path, target: Path) -> int:
    """Return the bytes that the bf16 folder of an MXFP4 checkpoint still needs on disk; 0 if it is
    complete.
    """
    if target.is_dir():
        return 0
    partial, files = _partial(target), _outputs(read_index(source))
    return sum(
        output.bytes
        for name, tensors in files.items()
        if not (partial / name).is_file()
        for output in tensors.values()
    )


def convert(source: Path, target: Path) -> Iterator[str]:
    """Write the bf16 folder of an MXFP4 checkpoint. It gets its name when it is complete.

    Files that an interrupted conversion finished are not written again.

    Yields:
        A line of progress before each file.

    Raises:
        InputError: The disk has too little space.
        OSError: The disk cannot be written.
    """
    if target.is_dir():
        return
    partial, files = _partial(target), _outputs(read_index(source))
    partial.mkdir(parents=True, exist_ok=True)
    check_room(partial, missing_bytes(source, target))
    todo = [name for name in files if not (partial / name).is_file()]
    for number, name in enumerate(todo, start=1):
        yield (
            f"MXFP4 to bf16: {name} ({number} of {len(todo)}, "
            f"{disk_size(sum(output.bytes for output in files[name].values()))})"
        )
        _write_file(partial / name, files[name])
    _write_rest(source, partial, files)
    partial.rename(target)


def check_room(folder: Path, needed_bytes: int) -> None:
    """Refuse a folder whose disk has too little space.

    Raises:
        InputError: Less than ``needed_bytes`` is free.
    """
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise reject(
            "disk-full",
            "XDG_CACHE_HOME",
            str(folder),
            f"has {disk_size(free)} free, but the weights in bf16 need {disk_size(needed_bytes)}",
            "Free some space, or set XDG_CACHE_HOME.",
        )


def _partial(target: Path) -> Path:
    return target.with_name(target.name + ".partial")


def _outputs(index: Mapping[str, Stored]) -> dict[str, dict[str, _Output]]:
    """Return the tensors of every new file. A file is named after the one that has the blocks, or
    the tensor itself.
    """
    files: dict[str, dict[str, _Output]] = {}
    for name, stored in index.items():
        file = files.setdefault(stored.path.name, {})
        if name.endswith(_BLOCKS) and (scales := index.get(name.removesuffix(_BLOCKS) + _SCALES)):
            experts, rows, blocks, _ = stored.shape
            shape = (experts, blocks * 32, rows)
            file[name.removesuffix(_BLOCKS)] = _Output(
                torch.bfloat16, shape, partial(_experts, stored, scales)
            )
        elif not (name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS in index):
            file[name] = _Output(stored.dtype, stored.shape, partial(map, Stored.read, (stored,)))
    return {name: tensors for name, tensors in files.items() if tensors}


def _experts(blocks: Stored, scales: Stored) -> Iterator[Tensor]:
    """Yield the experts' matrices."""
    for expert in range(blocks.shape[0]):
        yield _dequantised(blocks.part(expert), scales.part(expert))


def _write_file(path: Path, tensors: Mapping[str, _Output]) -> None:
    """Write a safetensors file, under a temporary name until it is complete."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, output in tensors.items():
        header[name] = {
            "dtype": _NAMES[output.dtype],
            "shape": output.shape,
            "data_offsets": (offset, offset + output.bytes),
        }
        offset += output.bytes
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % _HEADER_ALIGNMENT)
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for output in tensors.values():
            for piece in output.pieces():
                file.write(piece.flatten().view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)


def _write_rest(source: Path, partial: Path, files: Mapping[str, Mapping[str, _Output]]) -> None:
    """Copy all other files, remove the quantisation from the configuration, and write an index of
    the new files.
    """
    for path in source.iterdir():
        if (
            path.is_file()
            and path.suffix in (".json", ".jinja", ".txt", ".model")
            and not path.name.endswith(".index.json")
        ):
            shutil.copyfile(path, partial / path.name)
    config = json.loads(read_bounded(source / "config.json", LARGEST_FILE_BYTES))
    config.pop("quantization_config", None)
    (partial / "config.json").write_text(json.dumps(config, indent=2))
    index = {
        "metadata": {
            "total_size": sum(
                output.bytes for tensors in files.values() for output in tensors.values()
            )
        },
        "weight_map": {tensor: name for name, tensors in files.items() for tensor in tensors},
    }
    (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
