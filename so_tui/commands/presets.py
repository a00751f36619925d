"""``presets``: list, print and add presets."""

from __future__ import annotations

from argparse import Namespace

from msgspec import Struct

from so_tui.commands.common import (
    chosen_changes,
    chosen_spec,
    note_problems,
    plain_table,
    print_json,
    print_note,
    print_rich,
)
from so_tui.spec import (
    InputError,
    Problem,
    check_user_name,
    create_preset,
    delete_preset,
    load_catalog,
    spec_tree,
)
from so_tui.spec.check import path_fault
from so_tui.spec.errors import reject, shown
from so_tui.spec.presets import Origin
from so_tui.trust.text import printable_line, printable_source, so_tui_command
from so_tui.units import count, thousands


class ListedPreset(Struct, frozen=True):
    """A preset of ``presets --json``."""

    name: str
    title: str
    gpus: int
    model: str
    origin: Origin
    path: str


class Presets(Struct, frozen=True):
    """What ``presets --json`` prints."""

    presets: tuple[ListedPreset, ...]
    problems: tuple[str, ...]


class AddedPreset(Struct, frozen=True, kw_only=True):
    """What ``presets add --json`` prints."""

    name: str
    path: str
    parameters: int
    leaf_modules: tuple[str, ...]
    gpus: int
    sequence_length: int
    notes: tuple[str, ...]


def presets(arguments: Namespace) -> int:
    """Print the catalog or one preset as TOML, or add one. Invalid ones of the user are left out,
    and named on stderr.
    """
    import tomli_w

    if arguments.preset == "add":
        return _add(arguments)
    if arguments.preset == "delete":
        if not arguments.model:
            raise reject(
                "missing",
                "PRESET",
                "",
                "is missing",
                "Name one of your own: so-tui presets delete NAME.",
            )
        print(printable_line(f"deleted {delete_preset(arguments.model)}"))
        return 0
    _refuse_unused(arguments)
    if arguments.preset:
        tree = spec_tree(chosen_spec(arguments))
        if arguments.json:
            print_json(tree)
        else:
            print(printable_source(tomli_w.dumps(tree)), end="")
        return 0
    catalog = load_catalog()
    if arguments.json:
        listed = (
            ListedPreset(
                name,
                preset.spec.title or name,
                preset.spec.ranks,
                preset.spec.model.id,
                preset.origin,
                preset.path,
            )
            for name, preset in catalog.presets.items()
        )
        print_json(Presets(tuple(listed), tuple(map(str, catalog.problems))))
    else:
        table = plain_table("name", "model", "GPUs", "tokens", "from", right=("GPUs", "tokens"))
        for name, preset in catalog.presets.items():
            spec = preset.spec
            table.add_row(
                printable_line(name),
                spec.label,
                str(spec.ranks),
                thousands(spec.data.sequence_length),
                preset.origin,
            )
        print_rich(table)
        note_problems(catalog.problems)
    return 0


def _refuse_unused(arguments: Namespace) -> None:
    """Refuse options that only ``add`` uses (code ``unused-option``), and changes without a preset
    (code ``preset-needed``).
    """
    of_add = "unused-option", "has an effect only with `add`", "Write so-tui presets add MODEL."
    of_one = "preset-needed", "needs a preset", "Name one: so-tui presets PRESET."
    given = [
        ("MODEL", arguments.model, of_add),
        ("--name", arguments.name, of_add),
        ("--revision", "" if arguments.revision == "main" else arguments.revision, of_add),
        ("--trust-remote-code", arguments.trust_remote_code, of_add),
        ("--set", "" if arguments.preset else " ".join(arguments.set), of_one),
        ("--gpus", "" if arguments.preset else arguments.gpus, of_one),
    ]
    problems = [
        Problem(code, field, "" if value is True else shown(value), message, remedy)
        for field, value, (code, message, remedy) in given
        if value
    ]
    if problems:
        raise InputError(problems)


def _add(arguments: Namespace) -> int:
    """Make a preset from a model and save it."""
    from so_tui.launch.helper_jobs import describe_model

    if not arguments.model:
        raise reject(
            "missing",
            "MODEL",
            "",
            "is missing",
            "Give a hub id such as Qwen/Qwen3-14B, or a folder: so-tui presets add MODEL.",
        )
    if fault := path_fault(arguments.model):
        raise reject(
            "invalid-path",
            "MODEL",
            shown(arguments.model),
            fault,
            "Give a hub id such as Qwen/Qwen3-14B, or a folder.",
        )
    if arguments.name:
        check_user_name(arguments.name, load_catalog().presets)
    spec, notes = describe_model(
        arguments.model,
        name=arguments.name,
        revision=arguments.revision,
        trust_remote_code=arguments.trust_remote_code,
        changes=chosen_changes(arguments),
    )
    path, model = create_preset(spec), spec.model
    if arguments.json:
        print_json(
            AddedPreset(
                name=spec.name,
                path=str(path),
                parameters=model.parameter_count,
                leaf_modules=tuple(model.leaf_modules),
                gpus=spec.ranks,
                sequence_length=spec.data.sequence_length,
                notes=notes,
            )
        )
        return 0
    experts = f", experts in {', '.join(model.leaf_modules)}" if model.leaf_modules else ""
    print(f"{spec.name}: {spec.label}, {count(model.parameter_count)} parameters{experts}")
    print(printable_line(f"saved as {path}"))
    for text in notes:
        print_note(f"note: {text}")
    print_note(f"next: {so_tui_command('plan', spec.name)}    what it needs here")
    print_note(
        f"      {so_tui_command('run', spec.name, '--set', 'data.source=FILE')}    train it on "
        "your data",
    )
    return 0
