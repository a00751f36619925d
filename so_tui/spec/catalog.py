"""Presets on disk: the built-in ones, the user's, and single files."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from so_tui.spec.check import check_tree, nearest, shown
from so_tui.spec.errors import InputError, Problem
from so_tui.spec.files import path_fault
from so_tui.spec.table import table_text
from so_tui.spec.tree import Tree, complete_tree, differences, merged, spec_tree
from so_tui.spec.types import Preset, RunSpec

BUILTIN = "builtin:"
"""Prefix of models, tokenizers and data that come with the program: ``builtin:tiny/rows.jsonl``."""

Origin = Literal["built-in", "user", "file"]

_DATA_SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".csv", ".tsv")
_KEYS = frozenset((*RunSpec.__struct_fields__, "extends"))
"""The outermost keys of a preset."""
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


class Catalog(Struct, frozen=True):
    """The presets by name, in the order to show them (``tiny`` last), and what is wrong with those that could not be read."""

    presets: dict[str, Preset]
    problems: tuple[Problem, ...] = ()


def builtin_folder() -> Path:
    """Folder of the built-in presets: ``so_tui/presets`` in an installed wheel, ``presets`` beside the package in a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "presets"
    return installed if installed.is_dir() else package.parent / "presets"


def user_folder() -> Path:
    """Folder of the user's presets, by the XDG rules."""
    config = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(config) if config.startswith("/") else Path.home() / ".config") / "so-tui" / "presets"


def resolve_source(text: str) -> str:
    """A ``builtin:`` name as the path it stands for; every other text as it is. Raises InputError when there is no such built-in."""
    if not text.startswith(BUILTIN):
        return text
    folder = builtin_folder()
    path = (folder / text.removeprefix(BUILTIN)).resolve()
    if not path.is_relative_to(folder.resolve()) or not path.exists():
        names = ", ".join(sorted(f"{BUILTIN}{child.name}" for child in folder.iterdir() if child.is_dir()))
        raise InputError([Problem(field="source", value=shown(text), message="is not a built-in", remedy=f"Built-in: {names}.")])
    return str(path)


def load_catalog(user_dir: Path | None = None) -> Catalog:
    """All presets. A user preset that is wrong is reported in ``problems`` and never stops the others."""
    trees: dict[str, _Source] = {}
    problems: list[Problem] = []
    folders: tuple[tuple[Path, Origin], ...] = ((builtin_folder(), "built-in"), (user_dir or user_folder(), "user"))
    for folder, origin in folders:
        for path in sorted(folder.glob("*.toml")):
            try:
                source = _read(path, origin)
                if source.name in trees:
                    raise InputError([_taken(source, trees[source.name])])
                trees[source.name] = source
            except InputError as error:
                problems += error.problems
    presets: dict[str, Preset] = {}
    for source in trees.values():
        try:
            presets[source.name] = _preset(source, trees)
        except InputError as error:
            problems += error.problems
    return Catalog(presets=dict(sorted(presets.items(), key=lambda item: _order(item[1]))), problems=tuple(problems))


def find_preset(name_or_path: str, catalog: Catalog | None = None, *, table: bool = True) -> Preset:
    """A preset by name, or a file by path (anything with a ``/`` or ending in ``.toml``; a file that is there is no name).

    ``table=False`` leaves out a file's own parameter table, for whoever makes it anew. Raises InputError: unknown name (with the nearest
    one), file missing, malformed or no preset, or what is wrong with that preset.
    """
    fault = path_fault(name_or_path)
    if Path(name_or_path).suffix.lower() in _DATA_SUFFIXES:
        remedy = f"To train on your own rows name a preset too: tiny --set data.source={name_or_path}"
        raise InputError([Problem(field="preset", value=shown(name_or_path), message="names data, not a preset", remedy=remedy)])
    if "/" in name_or_path or name_or_path.endswith(".toml"):
        if fault:
            remedy = "`so-tui presets` lists the presets by name."
            raise InputError([Problem(field="preset", value=shown(name_or_path), message=fault, remedy=remedy)])
        source = _read(Path(name_or_path).expanduser(), "file")
        if not table and isinstance(source.tree.get("model"), dict):
            source.tree["model"].pop("parameters", None)
        known = (catalog or load_catalog()).presets if "extends" in source.tree else {}
        return _preset(
            source, {name: _Source(name, preset.path, preset.origin, complete_tree(preset.spec)) for name, preset in known.items()}
        )
    catalog = catalog or load_catalog()
    if name_or_path in catalog.presets:
        return catalog.presets[name_or_path]
    broken = [problem for problem in catalog.problems if Path(problem.file).stem == name_or_path]
    if broken:
        raise InputError(broken)
    if not fault and Path(name_or_path).exists():
        raise InputError([_no_preset(Path(name_or_path), f"is a {'folder' if Path(name_or_path).is_dir() else 'file'}, not a preset")])
    raise InputError([_unknown_preset("preset", name_or_path, tuple(catalog.presets))])


def save_preset(spec: RunSpec, name: str, *, base: str | None, user_dir: Path | None = None) -> Path:
    """Write a user preset that holds only what differs from ``base``, and return its path. An older one of that name is replaced.

    Raises InputError for a bad name, the name of a built-in preset, an unknown base or a folder that cannot be written.
    """
    folder = user_dir or user_folder()
    presets = load_catalog(folder).presets
    check_user_name(name, presets, folder)
    older = presets.get(name)
    path = Path(older.path) if older else folder / f"{name}.toml"
    if older and base == name:
        base = _read(path, "user").tree.get("extends")
    return _write(path, _toml(_preset_tree(msgspec.structs.replace(spec, name=name), base, presets)))


def check_user_name(name: str, presets: Mapping[str, Preset], folder: Path | None = None) -> None:
    """Whether a user's preset may have this name, if need be in the place of another one of theirs. Raises InputError."""
    if not _NAME.fullmatch(name):
        remedy = "Use up to 64 small letters, digits, '.', '_' and '-', starting with a letter or digit."
        raise InputError([Problem(field="name", value=shown(name), message="is not a valid name", remedy=remedy)])
    older = presets.get(name)
    if older and older.origin == "built-in":
        raise InputError([Problem(field="name", value=shown(name), message="is a built-in preset", remedy="Choose another name.")])
    path = (folder or user_folder()) / f"{name}.toml"
    if older is None and path.exists():  # it could not be read: what was typed there is not lost
        raise InputError(
            [Problem(field="name", value=shown(name), message=f"is taken by {path}", remedy="Mend that file or choose another name.")]
        )


def create_preset(spec: RunSpec, *, user_dir: Path | None = None) -> Path:
    """Write a new user preset, whole, with its parameter table in the form of the built-in ones, and return its path.

    Raises InputError when a preset or file of that name is there already (nothing is ever replaced), or the folder cannot be written.
    """
    folder = user_dir or user_folder()
    path = folder / f"{spec.name}.toml"
    older = load_catalog(folder).presets.get(spec.name)
    taken = older.path if older else str(path) if path.exists() else ""
    if taken:
        raise InputError([_name_taken(spec.name, taken)])
    own = spec_tree(msgspec.structs.replace(spec, model=msgspec.structs.replace(spec.model, parameters=())))
    return _write(path, f"{_toml(own)}\n{table_text(spec.model.parameters)}", replace=False)


def _name_taken(name: str, path: str) -> Problem:
    return Problem(field="name", value=shown(name), message=f"is taken by {path}", remedy="Choose another name.")


def _toml(tree: Tree) -> str:
    import tomli_w

    return tomli_w.dumps(tree)


def _preset_tree(spec: RunSpec, base: str | None, presets: Mapping[str, Preset]) -> Tree:
    """What to write for a spec: only what differs from its base, or all of it without one. Raises InputError for an unknown base."""
    if base is None:
        return spec_tree(spec)
    if base not in presets:
        raise InputError([_unknown_preset("extends", base, tuple(presets))])
    above = presets[base].spec
    if spec.title == above.title:
        spec = msgspec.structs.replace(spec, title="")
    below = complete_tree(msgspec.structs.replace(above, title=""))
    changes = differences(complete_tree(spec), below)
    if check_tree(merged(below, changes)) != spec:  # a key of the shape was taken away, which a difference cannot say
        return spec_tree(spec)
    return {"extends": base, **changes}


class _Source(Struct, frozen=True):
    """A preset file as read: not yet checked."""

    name: str
    path: str
    origin: Origin
    tree: Tree


def _read(path: Path, origin: Origin) -> _Source:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _unreadable(path, "there is no such file", "`so-tui presets` lists the presets by name.") from None
    except IsADirectoryError:
        raise InputError([_no_preset(path, "is a folder, not a preset")]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, f"cannot be read ({error})", "Check the path, and that the file is UTF-8 text you may read.") from None
    except tomllib.TOMLDecodeError as error:
        if path.suffix != ".toml":
            raise InputError([_no_preset(path, "is a file, not a preset")]) from None
        raise _unreadable(path, f"is not TOML: {error}", "Mend that line; text needs quotes, and a key stands once.") from None
    if tree and not tree.keys() & _KEYS:
        raise InputError([_no_preset(path, f"is TOML, but not a preset: it holds {', '.join(tree)}")])
    tree.setdefault("name", path.stem)
    return _Source(name=str(tree["name"]), path=str(path), origin=origin, tree=tree)


def _unreadable(path: Path, message: str, remedy: str) -> InputError:
    return InputError([Problem(field="preset", value="", message=message, remedy=remedy, file=str(path))])


def _preset(source: _Source, sources: Mapping[str, _Source]) -> Preset:
    spec = check_tree(_extended(source, sources, (source.name,)), source.path)
    return Preset(spec=spec, origin=source.origin, path=source.path)


def _extended(source: _Source, sources: Mapping[str, _Source], seen: tuple[str, ...]) -> Tree:
    """The file's tree over that of the preset it extends, and so on down; name and title are its own, or the two could not be told apart.

    Raises InputError for an unknown base or a circle.
    """
    tree = {key: value for key, value in source.tree.items() if key != "extends"}
    if "extends" not in source.tree:
        return tree
    base = str(source.tree["extends"])
    if base not in sources:
        raise InputError([_unknown_preset("extends", base, tuple(sources), source.path)])
    if base in seen:
        chain = " -> ".join((*seen, base))
        remedy = "Extend a preset that does not itself extend this one."
        raise InputError(
            [Problem(field="extends", value=shown(base), message=f"goes in a circle ({chain})", remedy=remedy, file=source.path)]
        )
    below = _extended(sources[base], sources, (*seen, base))
    return merged({key: value for key, value in below.items() if key != "title"}, tree)


def _order(preset: Preset) -> tuple[object, ...]:
    """Built-in models by size, then the user's, then shapes for benchmarks; ``tiny`` last."""
    spec = preset.spec
    return (
        spec.name == "tiny",
        spec.model.weights == "random",
        preset.origin != "built-in",
        spec.ranks,
        spec.model.parameter_count,
        spec.name,
    )


def _unknown_preset(field: str, name: str, known: tuple[str, ...], file: str = "") -> Problem:
    remedy = f"{nearest(name, known)}Presets: {', '.join(known)}."
    return Problem(field=field, value=shown(name), message="there is no such preset", remedy=remedy, file=file)


def _no_preset(path: Path, message: str) -> Problem:
    """Said of what is there and was named as a preset, but is none."""
    remedy = "A preset is a TOML file with a [model], or one that `extends` another; `so-tui presets` lists them by name."
    if path.is_dir():
        remedy += " Of a folder that holds a model `so-tui presets add FOLDER` makes one."
    return Problem(field="preset", value=shown(str(path)), message=message, remedy=remedy)


def _taken(source: _Source, other: _Source) -> Problem:
    return Problem(
        field="name",
        value=shown(source.name),
        message=f"is already the name of {other.path}",
        remedy="Give this preset another name.",
        file=source.path,
    )


def _write(path: Path, text: str, *, replace: bool = True) -> Path:
    """Write a preset so that a reader sees the old file or the new one, never half of it. Raises InputError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        if replace:
            partial.replace(path)
        else:
            os.link(partial, path)  # fails where the name is taken, at this very moment too
            partial.unlink()
    except FileExistsError:
        partial.unlink()
        raise InputError([_name_taken(path.stem, str(path))]) from None
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        remedy = "Free space, or set XDG_CONFIG_HOME to a folder you may write to."
        raise InputError(
            [Problem(field="preset", value=str(path), message=f"cannot be written: {error.strerror}", remedy=remedy)]
        ) from None
    return path
