"""Index the tensors in a model's files, and read any range of their elements without mapping or holding more.

Reads safetensors files, or the files of ``torch.save`` (``pytorch_model.bin``) if a folder has no others.
"""

from __future__ import annotations

import json
import pickle
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from so_tui.spec import InputError, Problem, first_line

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


_TORCH_SAVED = "pytorch_model.bin"


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

    def elements(self, start: int, stop: int) -> Tensor:
        """Read elements ``start`` to ``stop`` (exclusive) of the flattened tensor.

        Raises:
            OSError: The file cannot be read, or ends too early.
        """
        flat = torch.empty(stop - start, dtype=self.dtype)
        buffer = flat.view(torch.uint8).numpy().data
        with self.path.open("rb", buffering=0) as file:
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
    """Return every tensor in the folder's weight files by name. If there are several copies of the weights, the folder's index decides.

    Raises:
        InputError: There are no weight files, files of the index are missing, or a file is damaged or truncated.
    """
    names = shards(folder)
    if absent := [name for name in names if not (folder / name).is_file()]:
        message = f"lacks {absent[0]}" + (
            f" and {len(absent) - 1} more files" if absent[1:] else ""
        )
        raise _problem("weights-incomplete", folder, message)
    if not names:
        raise _problem(
            "weights-missing", folder, "has no weights (*.safetensors, or pytorch_model*.bin)"
        )
    return {name: stored for file in names for name, stored in _tensors(folder / file).items()}


def shards(folder: Path) -> list[str]:
    """Return the names of the weight files: the single file, else those of the index, else any. safetensors come before torch.save's."""
    return (
        _named(folder, "model.safetensors")
        or sorted(path.name for path in folder.glob("*.safetensors"))
        or _named(folder, _TORCH_SAVED)
    )


def _named(folder: Path, file: str) -> list[str]:
    if (folder / file).is_file():
        return [file]
    index = folder / f"{file}.index.json"
    return (
        sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else []
    )


def _tensors(path: Path) -> dict[str, Stored]:
    return _of_safetensors(path) if path.suffix == ".safetensors" else _of_torch_save(path)


def _of_torch_save(path: Path) -> dict[str, Stored]:
    """Index a file of ``torch.save``.

    With fake tensors, torch.load reads no weights but records their offsets. It runs no code of the file.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with FakeTensorMode():
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise _unreadable(path, first_line(error)) from error
    if not isinstance(loaded, dict) or not all(
        isinstance(tensor, Tensor) for tensor in loaded.values()
    ):
        raise _unreadable(path, "it is not a dictionary of tensors")
    found = {}
    for name, tensor in loaded.items():
        begin = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
        if begin is None:
            raise _unreadable(
                path, "it is of a format older than torch 1.6, or torch is older than 2.7 here"
            )
        if not tensor.is_contiguous():
            raise _unreadable(path, f"{name} is not contiguous")
        found[name] = Stored(
            path,
            tensor.dtype,
            tuple(tensor.shape),
            begin + int(tensor.storage_offset()) * tensor.itemsize,
        )
    return found


def _of_safetensors(path: Path) -> dict[str, Stored]:
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
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


def _unreadable(path: Path, reason: str) -> InputError:
    message = f"cannot be read ({reason})"
    remedy = "Load it with transformers and save it again with `save_pretrained`, or download the model again if the file is truncated."
    return InputError(
        [
            Problem(
                code="weights-unreadable",
                field="model.id",
                value=str(path),
                message=message,
                remedy=remedy,
            )
        ]
    )


def _problem(code: str, path: Path, message: str) -> InputError:
    remedy = "Download it again with `so-tui fetch`, name a folder with the complete model, or start with `model.weights = random`."
    return InputError(
        [Problem(code=code, field="model.id", value=str(path), message=message, remedy=remedy)]
    )
