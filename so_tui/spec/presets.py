"""Presets on disk: built-in, user and single files.

Problem codes:
    unknown-builtin: A ``builtin:`` source does not exist.
    unknown-preset: There is no preset of this name.
    not-a-preset: The file or folder exists, but is not a preset.
    data-not-preset, model-not-preset: A data file, or a model on the hub, was named in place of a
    preset.
    invalid-path, file-not-found, unreadable, invalid-toml: The file cannot exist, does not exist,
    cannot be read, or is not TOML. not-a-file, too-large, too-deep: It is a pipe or a device,
    larger than 1 MiB, or nested too deeply.
    circular-extends: A preset extends itself through others, or too many others.
    invalid-name, builtin-name, name-taken: The name has invalid characters, or a built-in preset or
    a file has it. not-writable, not-deletable: The preset cannot be written or deleted.
    preset-in-use: Another preset of the user extends it.
    trust-not-own: Others own or can write the file, so its ``model.trust_remote_code`` counts as
    false. option-not-own: Such a file has an option of Slurm that could do more than choose a node.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from so_tui.folders import builtin_folder, user_folder
from so_tui.spec.check import check_tree, exists, is_folder, path_fault, write_atomic
from so_tui.spec.errors import (
    InputError,
    Problem,
    Problems,
    nearest,
    reject,
    shown,
    some,
)
from so_tui.spec.merge import complete_tree, differences, merged, set_over, spec_tree, value_at
from so_tui.spec.model_table import table_text
from so_tui.spec.run_spec import MACHINE_DECIDES, DataSource, Preset, RunSpec
from so_tui.trust.decoding import TooDeepError, Tree, decode_toml
from so_tui.trust.files import UnfitFileError, read_judged
from so_tui.trust.text import quoted
from so_tui.units import thousands

# The variant of a preset with the settings of DeepSpeed's SuperOffload examples: ``PRESET:as-
# published``.


AS_PUBLISHED = ":as-published"
"""Ends the name of the variant."""
EXAMPLE_SEQUENCES = 4
"""``train_batch_size`` of the examples."""


def as_published(spec: RunSpec) -> RunSpec:
    """Return a spec that trains what the script trains that DeepSpeed's SuperOffload examples have
    for its model.

    Sizes of models without a script are those of the others. The examples train 4 sequences a step
    on all GPUs together, with HF's own kernels, and never read their arguments for learning rate,
    warm-up and weight decay. Their rows are plain text, filled up to the sequence length, and all
    of that is trained. Model, source of the data, length of the run and number of GPUs stay.
    Nothing is left to the machine.

    Raises:
        InputError: The 4 sequences cannot be divided among the GPUs (code ``not-as-published``).
    """
    if EXAMPLE_SEQUENCES % spec.ranks:
        raise reject(
            "not-as-published",
            "gpus",
            str(spec.ranks),
            "does not divide the 4 sequences of a step in DeepSpeed's examples",
            "Use 1, 2 or 4 GPUs.",
        )
    large = spec.name.startswith("gpt-oss")
    attention = "eager" if large else spec.model.attention
    offload = replace(
        spec.offload,
        mode="superoffload",
        engine="deepspeed",
        config="published",
        ratio=0.8 if spec.name.startswith("llama-3.1-8b") else 0.9,
        cpu_adam_cores_fraction=0.9,
        sub_group_size=800_000_000 if large else 400_000_000,
        states="fp32",
    )
    train = replace(
        spec.train,
        micro_batch=EXAMPLE_SEQUENCES // spec.ranks,
        gradient_accumulation=1,
        tokens_per_step=0,
        learning_rate=1e-3,
        schedule="constant",
        warmup_ratio=0.0,
        weight_decay=0.0,
        beta1=0.9,
        beta2=0.999,
        epsilon=1e-8,
        router_loss_coefficient=0.0,
        sequence_parallel=1,
        seed=42,
    )
    data = replace(
        spec.data,
        format="alpaca-deepspeed",
        loss="padded",
        packing=False,
        sequence_length=8192 if large else 4096,
    )
    return replace(
        spec,
        name=f"{spec.name}-as-published",
        title=f"{spec.label}, as published",
        fixed=MACHINE_DECIDES,
        offload=offload,
        train=train,
        model=replace(
            spec.model, activation_checkpointing="full", kernels="plain", attention=attention
        ),
        data=data,
    )


# Local paths in a spec: recognised without asking the hub, made absolute, and checked.


_DATA_SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".csv", ".tsv")
_LOCAL_SUFFIXES = (*_DATA_SUFFIXES, ".txt", ".gz", ".zst", ".arrow")


def with_absolute_paths(spec: RunSpec) -> RunSpec:
    """Return the spec with relative paths made absolute: runs, resumes and saved presets begin in
    other folders.
    """
    model, data, folder = spec.model, spec.data, spec.checkpoint.folder
    if isinstance(data.source, str):
        source: str | tuple[DataSource, ...] = absolute_source(data.source)
    else:
        source = tuple(replace(part, source=absolute_source(part.source)) for part in data.source)
    if folder:
        folder = str(Path(folder).expanduser().absolute())
    return replace(
        spec,
        model=replace(
            model, id=absolute_source(model.id), tokenizer=absolute_source(model.tokenizer)
        ),
        data=replace(data, source=source, evaluation=absolute_source(data.evaluation)),
        checkpoint=replace(spec.checkpoint, folder=folder),
    )


def missing_paths(spec: RunSpec) -> Problems:
    """Yield a problem (code ``path-not-found``) for each model, tokenizer or data path of the spec
    that does not exist.
    """
    source = spec.data.source
    named = {
        "model.id": spec.model.id,
        "model.tokenizer": spec.model.tokenizer,
        "data.evaluation": spec.data.evaluation,
    }
    if isinstance(source, str):
        named["data.source"] = source
    else:
        named |= {f"data.source[{at}].source": part.source for at, part in enumerate(source)}
    for field, text in named.items():
        if _is_path(text) and not exists(Path(text).expanduser()):
            yield Problem(
                "path-not-found",
                field,
                text,
                "there is no such file or folder, or you may not see it",
                "Check the path. A name on the hub has the form owner/name.",
            )


def _is_path(text: str) -> bool:
    """Return whether a text can only be a path: it is written as one, or ends like a data file,
    which no hub name does.
    """
    return not text.startswith(BUILTIN) and (
        text.startswith(("/", "./", "../", "~"))
        or text.count("/") > 1
        or text.endswith(_LOCAL_SUFFIXES)
    )


def absolute_source(text: str) -> str:
    """Return the absolute path of a model or of data, if the text can only be a path or something
    here has that path; else the text. Raises InputError as ``resolve_source``.
    """
    if not text or text.startswith(BUILTIN):
        return text
    path = Path(resolve_source(text)).expanduser()
    return str(path.absolute()) if _is_path(text) or exists(path) else text


# One preset file, as parsed. Anybody may have written it: only regular files of bounded size and
# depth are read.


Origin = Literal["built-in", "user", "file"]


LARGEST_BYTES = 1 << 20
"""Limit of a preset file. The parameter tables of the built-in ones have a few kilobytes."""
_KEYS = frozenset((*RunSpec.__struct_fields__, "extends"))
"""Top-level keys of a preset."""


class _Source(Struct, frozen=True):
    """A preset file as parsed, before any check."""

    name: str
    path: str
    origin: Origin
    tree: Tree
    problems: tuple[Problem, ...] = ()


def _preset_files(folder: Path) -> list[Path]:
    """Return the preset files of a folder, sorted; none of one that does not exist. Raises
    InputError if it cannot be read.
    """
    try:
        return sorted(path for path in folder.iterdir() if path.name.endswith(".toml"))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise reject(
            "unreadable",
            "presets",
            "",
            f"cannot be read ({error.strerror}), so your own presets are left out",
            "Check its rights and those of the folders above it.",
            file=str(folder),
        ) from None


def _read_source(path: Path, origin: Origin) -> _Source:
    """Return a preset file as parsed. Raises InputError with the codes of ``catalog``."""
    try:
        content, distrust = read_judged(path, LARGEST_BYTES)
        tree = decode_toml(content)
    except FileNotFoundError:
        raise _unread(
            path,
            "file-not-found",
            "there is no such file",
            "`so-tui presets` lists the presets by name.",
        ) from None
    except UnfitFileError as error:
        if path.is_dir():
            raise _no_preset(path, "is a folder, not a preset") from None
        raise _unread(
            path,
            error.code,
            error.reason,
            f"A preset is a regular file of at most {thousands(LARGEST_BYTES)} bytes.",
        ) from None
    except TooDeepError as error:
        raise _unread(
            path,
            "too-deep",
            f"is not a preset: {error}",
            "Write each section at the top level: [model], [data].",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise _unread(
            path,
            "unreadable",
            f"cannot be read ({error})",
            "Check the path, and that the file is UTF-8 text with read permission.",
        ) from None
    except tomllib.TOMLDecodeError as error:
        if path.suffix != ".toml":
            raise _no_preset(path, "is a file, not a preset") from None
        raise _unread(
            path,
            "invalid-toml",
            f"is not TOML: {error}",
            "Correct that line: text needs quotes, and each key may appear once.",
        ) from None
    if tree and not tree.keys() & _KEYS:
        raise _no_preset(path, f"is TOML, but not a preset: it holds {some(tree)}")
    tree.setdefault("name", path.stem)
    # Where so-tui is installed is trusted, whoever has installed it.
    foreign = distrust is not None and origin != "built-in"
    problems = _without_others_trust(tree, path) if foreign else ()
    return _Source(str(tree["name"]), str(path), origin, tree, problems)


_NODES_AND_SHARES = """
    account begin cluster-constraint comment constraint contiguous core-spec cores-per-socket
    cpu-freq cpus-per-gpu cpus-per-task deadline distribution exclude exclusive extra-node-info
    gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint licenses
    mem mem-bind mem-per-cpu mem-per-gpu mincpus nice partition prefer priority qos reservation
    sockets-per-node spread-job switches thread-spec threads-per-core time time-min tmp
    use-min-nodes
"""
_HARMLESS_OPTIONS = frozenset(f"--{name}" for name in _NODES_AND_SHARES.split())
"""Options of Slurm that choose nodes and shares of them. Others let a job run in a container, write
files, tell others, or do what a site's plugins can.
"""


def _without_others_trust(tree: Tree, path: Path) -> tuple[Problem, ...]:
    """Take the trust in a model's code out of the tree of a file that others own or can write, and
    return that as a problem.

    Raises:
        InputError: It has an option of Slurm that could do harm (code ``option-not-own``).
    """
    slurm, model = tree.get("slurm"), tree.get("model")
    options = slurm.get("options") if isinstance(slurm, dict) else None
    for option in options if isinstance(options, list) else ():
        if str(option).partition("=")[0] not in _HARMLESS_OPTIONS:
            raise reject(
                "option-not-own",
                "slurm.options",
                shown(option),
                "cannot be set by a file that others own or can write",
                "Copy the file, read it, and use the copy.",
                file=str(path),
            )
    if not isinstance(model, dict) or not model.pop("trust_remote_code", False):
        return ()
    problem = Problem(
        "trust-not-own",
        "model.trust_remote_code",
        "true",
        "counts as false, since others own the file or can write it",
        "If you have read the model's code, give --set model.trust_remote_code=true, or use a copy "
        "of the file.",
        file=str(path),
    )
    return (problem,)


def _unread(path: Path, code: str, message: str, remedy: str) -> InputError:
    return reject(code, "preset", "", message, remedy, file=str(path))


def _no_preset(path: Path, message: str) -> InputError:
    """Return the error of a file or folder that exists but is not a preset."""
    remedy = (
        "A preset is a TOML file with a [model], or one that `extends` another; `so-tui presets` "
        "lists them by name."
    )
    if path.is_dir():
        remedy += " To make one from a folder with a model: `so-tui presets add FOLDER`."
    return reject("not-a-preset", "preset", shown(str(path)), message, remedy)


_LONGEST_CHAIN = 16
"""Presets that a preset may extend, one through the other."""
BUILTIN = "builtin:"
"""Prefix of models, tokenizers and data that come with so-tui: ``builtin:tiny/rows.jsonl``."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


class Catalog(Struct, frozen=True):
    """All presets, and the problems of those that could not be read."""

    presets: dict[str, Preset]
    """Presets by name, in display order (``tiny`` last)."""
    problems: tuple[Problem, ...] = ()


def resolve_source(text: str) -> str:
    """Return the path of a ``builtin:`` name; any other text unchanged.

    Raises:
        InputError: There is no such built-in (``unknown-builtin``), or another user has made a
            folder here that has the name (``name-of-a-folder``).
    """
    if not text.startswith(BUILTIN):
        folder = Path(text)
        ambiguous = text and not _is_path(text) and is_folder(folder)
        if ambiguous and folder.lstat().st_uid not in (os.geteuid(), 0):
            raise reject(
                "name-of-a-folder",
                "source",
                shown(text),
                f"is a folder of another user in {Path.cwd()}, and may be a name on the hub",
                f"Write ./{text} for the folder, or start so-tui in another one for the hub.",
            )
        return text
    folder = builtin_folder()
    path = (folder / text.removeprefix(BUILTIN)).resolve()
    if path.is_relative_to(folder.resolve()) and path.exists():
        return str(path)
    names = sorted(f"{BUILTIN}{child.name}" for child in folder.iterdir() if child.is_dir())
    built_in = f"Built in: {', '.join(names)}."
    raise reject("unknown-builtin", "source", shown(text), "is not built in", built_in)


def load_catalog() -> Catalog:
    """Load all presets. An invalid user preset is reported in ``problems`` and does not hide the
    others.
    """
    trees: dict[str, _Source] = {}
    presets: dict[str, Preset] = {}
    problems: list[Problem] = []
    folders: tuple[tuple[Path, Origin], ...] = (
        (builtin_folder(), "built-in"),
        (user_folder(), "user"),
    )
    for folder, origin in folders:
        try:
            paths = _preset_files(folder)
        except InputError as error:
            problems += error.problems
            continue
        for path in paths:
            try:
                source = _read_source(path, origin)
                if source.name in trees:
                    raise reject(
                        "name-taken",
                        "name",
                        shown(source.name),
                        f"is already the name of {trees[source.name].path}",
                        "Give this preset another name.",
                        file=source.path,
                    )
                trees[source.name] = source
                problems += source.problems
            except InputError as error:
                problems += error.problems
    for source in trees.values():
        try:
            presets[source.name] = _preset(source, trees)
        except InputError as error:
            problems += error.problems
    in_order = sorted(presets.values(), key=_order)
    return Catalog({preset.spec.name: preset for preset in in_order}, tuple(problems))


def find_preset(name_or_path: str, *, table: bool = True) -> Preset:
    """Return a preset by name, or from a file by path.

    Args:
        name_or_path: Name of a preset; text with a ``/`` or ending in ``.toml`` is a path. With
            ``:as-published`` at its end, the settings of DeepSpeed's SuperOffload examples replace
            those of the preset.
        table: False leaves out the file's own parameter table, for generating it again.

    Raises:
        InputError: If the name is unknown, the file is missing or not a preset, or the preset is
            invalid.
    """
    if name_or_path.endswith(AS_PUBLISHED):
        preset = find_preset(name_or_path.removesuffix(AS_PUBLISHED), table=table)
        return replace(preset, spec=as_published(preset.spec))
    fault, path = path_fault(name_or_path), Path(name_or_path)
    if path.suffix.lower() in _DATA_SUFFIXES:
        raise reject(
            "data-not-preset",
            "preset",
            shown(name_or_path),
            "is a data file, not a preset",
            "To train on your own rows, name a preset as well: tiny "
            f"{quoted('--set', f'data.source={name_or_path}')}",
        )
    if "/" in name_or_path or name_or_path.endswith(".toml"):
        if fault:
            raise reject(
                "invalid-path",
                "preset",
                shown(name_or_path),
                fault,
                "`so-tui presets` lists the presets by name.",
            )
        if _HUB_ID.fullmatch(name_or_path) and not exists(path):
            raise _no_preset_of(name_or_path)
        source = _read_source(path.expanduser(), "file")
        if not table and isinstance(source.tree.get("model"), dict):
            source.tree["model"].pop("parameters", None)
        known = load_catalog().presets if "extends" in source.tree else {}
        return _preset(
            source,
            {  # complete, and with what they fix, as built-in ones are
                name: _Source(
                    name, preset.path, "built-in", complete_tree(preset.spec), preset.problems
                )
                for name, preset in known.items()
            },
        )
    catalog = load_catalog()
    if name_or_path in catalog.presets:
        return catalog.presets[name_or_path]
    broken = [problem for problem in catalog.problems if Path(problem.file).stem == name_or_path]
    if broken:
        raise InputError(broken)
    if not fault and exists(path):
        raise _no_preset(path, f"is a {'folder' if is_folder(path) else 'file'}, not a preset")
    raise _unknown_preset("preset", name_or_path, catalog.presets)


def save_preset(spec: RunSpec, name: str, *, base: str | None) -> Path:
    """Write a user preset with the differences from ``base`` and return its path. An existing user
    preset of this name is replaced.

    Local paths are written as absolute ones, as the preset is used from any folder.

    Args:
        spec: What to save.
        name: Name of the preset.
        base: Preset to extend; None writes a complete preset.

    Raises:
        InputError: If the name is invalid or built in, the base is unknown, or the folder cannot be
            written.
    """
    presets = load_catalog().presets
    check_user_name(name, presets)
    older = presets.get(name)
    path = Path(older.path) if older else user_folder() / f"{name}.toml"
    if older and base == name:
        base = _read_source(path, "user").tree.get("extends")
    saved = replace(with_absolute_paths(spec), name=name)
    return _write(path, _toml(_preset_tree(saved, base, presets)))


def check_user_name(name: str, presets: Mapping[str, Preset]) -> None:
    """Check that a user preset may have this name, possibly replacing another user preset.

    Raises:
        InputError: If the name is invalid, built in, or taken by a file that cannot be read.
    """
    if not _NAME.fullmatch(name):
        raise reject(
            "invalid-name",
            "name",
            shown(name),
            "is not a valid name",
            "Use up to 64 lower-case letters, digits, '.', '_' and '-', starting with a letter or "
            "digit.",
        )
    older = presets.get(name)
    if older and older.origin == "built-in":
        raise reject(
            "builtin-name", "name", shown(name), "is a built-in preset", "Choose another name."
        )
    path = user_folder() / f"{name}.toml"
    if older is None and exists(path):  # a preset that cannot be read must not be overwritten
        raise _name_taken(name, str(path), "Correct that file or choose another name.")


def delete_preset(name: str) -> Path:
    """Delete a preset of the user and return the path that it had.

    Raises:
        InputError: It is built in, unknown, extended by another, or its file cannot be removed.
    """
    presets = load_catalog().presets
    own = {known: preset for known, preset in presets.items() if preset.origin == "user"}
    if name not in presets:
        raise _unknown_preset("preset", name, own)
    if name not in own:
        raise reject(
            "builtin-name",
            "preset",
            shown(name),
            "is a built-in preset",
            "Only presets of your own can be deleted.",
        )
    path = Path(own[name].path)
    if below := [
        other
        for other, known in own.items()
        if _read_source(Path(known.path), "user").tree.get("extends") == name
    ]:
        raise reject(
            "preset-in-use",
            "preset",
            shown(name),
            f"is extended by {some(below)}",
            "Delete those first, or save them as complete presets.",
        )
    try:
        path.unlink()
    except OSError as error:
        raise reject(
            "not-deletable",
            "preset",
            str(path),
            f"cannot be deleted: {error.strerror}",
            "Check the rights of its folder.",
        ) from None
    return path


def create_preset(spec: RunSpec) -> Path:
    """Write a new, complete user preset with its parameter table, and return its path. Existing
    files are never replaced.

    Raises:
        InputError: If a preset or file of this name exists, or the folder cannot be written.
    """
    path = user_folder() / f"{spec.name}.toml"
    older = load_catalog().presets.get(spec.name)
    if taken := older.path if older else str(path) if exists(path) else "":
        raise _name_taken(spec.name, taken)
    own = _whole_tree(spec.changed("model", parameters=()))
    return _write(path, f"{_toml(own)}\n{table_text(spec.model.parameters)}", overwrite=False)


def _name_taken(name: str, path: str, remedy: str = "Choose another name.") -> InputError:
    return reject("name-taken", "name", shown(name), f"is taken by {path}", remedy)


def _toml(tree: Tree) -> str:
    import tomli_w

    return tomli_w.dumps(tree)


def _preset_tree(spec: RunSpec, base: str | None, presets: Mapping[str, Preset]) -> Tree:
    """Return the tree to write: the differences from the base, or the complete spec without one.
    Raises InputError for an unknown base.
    """
    if base is None:
        return _whole_tree(spec)
    if base not in presets:
        raise _unknown_preset("extends", base, presets)
    above = presets[base].spec
    if spec.title == above.title:
        spec = replace(spec, title="")
    below = complete_tree(replace(above, title=""))
    tree = complete_tree(spec)
    changes = differences(tree, below)
    changes.pop("fixed", None)
    for key in MACHINE_DECIDES:
        if key in spec.fixed:
            _put(changes, key, value_at(tree, key))
        elif key in above.fixed:
            _put(changes, key, "auto")
    if (
        check_tree(set_over(below, changes)) != spec
    ):  # a key of the architecture was removed, which differences cannot express
        return _whole_tree(spec)
    return {"extends": base, **changes}


def _whole_tree(spec: RunSpec) -> Tree:
    """Return a complete preset: what a person set stands in it, a number of GPUs only then."""
    complete, tree = complete_tree(spec), spec_tree(spec)
    tree.pop("fixed", None)
    if "gpus" not in spec.fixed:
        tree.pop("gpus", None)
    for key in spec.fixed:
        _put(tree, key, value_at(complete, key))
    return tree


def _put(tree: Tree, path: str, value: object) -> None:
    section, _, name = path.rpartition(".")
    (tree.setdefault(section, {}) if section else tree)[name] = value


def _preset(source: _Source, sources: Mapping[str, _Source]) -> Preset:
    # A file is not among the presets by name: it may have the name of the one that it extends.
    seen = () if source.origin == "file" else (source.name,)
    spec = check_tree(_extended(source, sources, seen), source.path)
    problems, below = list(source.problems), source
    while (base := below.tree.get("extends")) is not None:
        below = sources[base]
        problems += below.problems
    return Preset(spec=spec, origin=source.origin, path=source.path, problems=tuple(problems))


def _extended(source: _Source, sources: Mapping[str, _Source], seen: tuple[str, ...]) -> Tree:
    """Return the tree of a file merged over that of the preset it extends, recursively.

    The title is not inherited, so that a preset and its base look different in lists.

    Raises:
        InputError: If a base is unknown or the chain of bases is circular.
    """
    tree = {key: value for key, value in source.tree.items() if key != "extends"}
    lay = merged if source.origin == "built-in" else set_over
    if "extends" not in source.tree:
        return lay({}, tree)
    base = str(source.tree["extends"])
    if base not in sources:
        raise _unknown_preset("extends", base, sources, source.path)
    if base in seen or len(seen) > _LONGEST_CHAIN:
        raise reject(
            "circular-extends",
            "extends",
            shown(base),
            f"is circular, or goes through more than {_LONGEST_CHAIN} presets "
            f"({' -> '.join((*seen, base))})",
            "Extend a preset that does not itself extend this one, with fewer presets below it.",
            file=source.path,
        )
    below = _extended(sources[base], sources, (*seen, base))
    return lay({key: value for key, value in below.items() if key != "title"}, tree)


def _order(preset: Preset) -> tuple[object, ...]:
    """Return the sort key of a preset: built-in models by size, then the user's, then random
    weights for benchmarks; ``tiny`` last.
    """
    spec = preset.spec
    return (
        spec.name == "tiny",
        spec.model.weights == "random",
        preset.origin != "built-in",
        spec.ranks,
        spec.model.parameter_count,
        spec.name,
    )


_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(?<!\.toml)")


def _no_preset_of(model: str) -> InputError:
    """Return the error of a model on the hub where a preset is expected."""
    known = [
        name for name, preset in load_catalog().presets.items() if preset.spec.model.id == model
    ]
    remedy = (
        f"The preset of this model is {some(known)}."
        if known
        else f"`so-tui presets add {quoted(model)}` makes one of it; no weights are downloaded."
    )
    return reject("model-not-preset", "preset", shown(model), "is a model, not a preset", remedy)


def _unknown_preset(field: str, name: str, known: Iterable[str], file: str = "") -> InputError:
    known = tuple(known)
    return reject(
        "unknown-preset",
        field,
        shown(name),
        "there is no such preset",
        f"{nearest(name, known)}Presets: {some(known)}.",
        file=file,
    )


def _write(path: Path, text: str, *, overwrite: bool = True) -> Path:
    """Write a preset atomically: readers see the old file or the new one. Raises InputError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode(), mode=0o666, overwrite=overwrite)
    except FileExistsError:
        raise _name_taken(path.stem, str(path)) from None
    except OSError as error:
        raise reject(
            "not-writable",
            "preset",
            str(path),
            f"cannot be written: {error.strerror}",
            "Free some space, or set XDG_CONFIG_HOME to a writable folder.",
        ) from None
    return path
