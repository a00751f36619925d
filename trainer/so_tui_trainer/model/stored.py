"""Tensors in safetensors files: which there are, and any run of their elements, read without mapping or holding more than asked for."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from so_tui.spec import InputError, Problem

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
"""safetensors' names of the element types."""


class Stored(NamedTuple):
    """A tensor in a file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Where its bytes begin in the file."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def read(self) -> Tensor:
        return self.elements(0, self.numel).view(self.shape)

    def elements(self, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of the flattened tensor. Raises OSError, also when the file ends before them."""
        flat = torch.empty(stop - start, dtype=self.dtype)
        buffer = flat.view(torch.uint8).numpy().data
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start + start * self.dtype.itemsize)
            done = 0
            while done < len(buffer):
                count = file.readinto(buffer[done:])
                if not count:
                    raise OSError(f"{self.path} ends before its tensors do; it was not copied or downloaded whole")
                done += count
        return flat


def read_index(folder: Path) -> dict[str, Stored]:
    """Every tensor in the folder's safetensors files, by name; of several copies of the weights, those that the folder's index names.

    Raises InputError: no such files, files that the index names and that are not there, damaged or cut files.
    """
    names = _shards(folder)
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise _problem(folder, f"lacks {absent[0]}" + (f" and {len(absent) - 1} more files" if absent[1:] else ""))
    if not names:
        raise _problem(folder, "has no *.safetensors files")
    return {name: stored for file in names for name, stored in _tensors(folder / file).items()}


def _shards(folder: Path) -> list[str]:
    """As transformers looks for them: the one file, else those of the index, else (neither is there) any."""
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    return sorted(path.name for path in folder.glob("*.safetensors"))


def _tensors(path: Path) -> dict[str, Stored]:
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if header_bytes > size:
                raise ValueError("its header is cut")
            header = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        begin = 8 + header_bytes
        found = {
            name: Stored(path, DTYPES[entry["dtype"]], tuple(entry["shape"]), begin + entry["data_offsets"][0])
            for name, entry in header.items()
        }
    except (ValueError, KeyError) as error:
        raise _problem(path, f"is no readable safetensors file ({error})") from error
    if any(stored.start + stored.bytes > size for stored in found.values()):
        raise _problem(path, "is shorter than the tensors it should hold")
    return found


def _problem(path: Path, message: str) -> InputError:
    remedy = "Fetch it again with `so-tui fetch`, or name a folder with the whole model in safetensors files."
    return InputError([Problem(field="model.id", value=str(path), message=message, remedy=remedy)])
