"""One preset file, as parsed. Anybody may have written it: only regular files of bounded size and depth are read."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Literal

from msgspec import Struct

from so_tui.spec.errors import InputError, Problem
from so_tui.spec.tree import Tree
from so_tui.spec.types import RunSpec
from so_tui.spec.wording import shown, some
from so_tui.trust.decoding import TooDeepError, decode_toml
from so_tui.trust.reading import Unfit, UnfitFileError, read_bounded
from so_tui.units import thousands

Origin = Literal["built-in", "user", "file"]


LARGEST_BYTES = 1 << 20
"""Limit of a preset file. The parameter tables of the built-in ones have a few kilobytes."""
_KEYS = frozenset((*RunSpec.__struct_fields__, "extends"))
"""Top-level keys of a preset."""


class Source(Struct, frozen=True):
    """A preset file as parsed, before any check."""

    name: str
    path: str
    origin: Origin
    tree: Tree


def preset_files(folder: Path) -> tuple[list[Path], list[Problem]]:
    """Return the preset files of a folder, sorted, and the problem if it cannot be read. A folder that does not exist has none."""
    try:
        return sorted(path for path in folder.iterdir() if path.name.endswith(".toml")), []
    except (FileNotFoundError, NotADirectoryError):
        return [], []
    except OSError as error:
        message = f"cannot be read ({error.strerror}), so your own presets are left out"
        remedy = "Check its rights and those of the folders above it."
        return [], [
            Problem(
                code="unreadable",
                field="presets",
                value="",
                message=message,
                remedy=remedy,
                file=str(folder),
            )
        ]


def read_source(path: Path, origin: Origin) -> Source:
    """Return a preset file as parsed. Raises InputError with the codes of ``catalog``."""
    try:
        tree = decode_toml(read_bounded(path, LARGEST_BYTES))
    except FileNotFoundError:
        raise _unreadable(
            "file-not-found",
            path,
            "there is no such file",
            "`so-tui presets` lists the presets by name.",
        ) from None
    except UnfitFileError as error:
        if path.is_dir():
            raise InputError([no_preset(path, "is a folder, not a preset")]) from None
        remedy = f"A preset is a regular file of at most {thousands(LARGEST_BYTES)} bytes."
        message = (
            "is a pipe or a device"
            if error.unfit is Unfit.NOT_A_FILE
            else f"is larger than {thousands(LARGEST_BYTES)} bytes"
        )
        raise _unreadable(error.unfit.value, path, message, remedy) from None
    except TooDeepError as error:
        raise _unreadable(
            "too-deep",
            path,
            f"is not a preset: {error}",
            "Write each section at the top level: [model], [data].",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        remedy = "Check the path, and that the file is UTF-8 text with read permission."
        raise _unreadable("unreadable", path, f"cannot be read ({error})", remedy) from None
    except tomllib.TOMLDecodeError as error:
        if path.suffix != ".toml":
            raise InputError([no_preset(path, "is a file, not a preset")]) from None
        remedy = "Correct that line: text needs quotes, and each key may appear once."
        raise _unreadable("invalid-toml", path, f"is not TOML: {error}", remedy) from None
    if tree and not tree.keys() & _KEYS:
        raise InputError([no_preset(path, f"is TOML, but not a preset: it holds {some(tree)}")])
    tree.setdefault("name", path.stem)
    return Source(name=str(tree["name"]), path=str(path), origin=origin, tree=tree)


def _unreadable(code: str, path: Path, message: str, remedy: str) -> InputError:
    return InputError(
        [
            Problem(
                code=code, field="preset", value="", message=message, remedy=remedy, file=str(path)
            )
        ]
    )


def no_preset(path: Path, message: str) -> Problem:
    """Return the problem of a file or folder that exists but is not a preset."""
    remedy = "A preset is a TOML file with a [model], or one that `extends` another; `so-tui presets` lists them by name."
    if path.is_dir():
        remedy += " To make one from a folder with a model: `so-tui presets add FOLDER`."
    return Problem(
        code="not-a-preset", field="preset", value=shown(str(path)), message=message, remedy=remedy
    )
