"""The form behind Configure, without widgets: its fields in order, and the edits over a preset. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from so_tui.spec import (
    OF_A_SOURCE,
    FieldInfo,
    Problem,
    RunSpec,
    complete_tree,
    differences,
    field_index,
    parse_value,
)

LENGTH = "train.length"
"""Stands for the three keys of LENGTH_KEYS, one of which is set."""
LENGTH_KEYS = ("train.steps", "train.epochs", "train.tokens")
SLURM = "Slurm"
"""The group that only a host with Slurm shows."""

GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Where", ("gpus", "slurm.partition")),
    (
        SLURM,
        (
            "nodes",
            "slurm.account",
            "slurm.time_limit",
            "slurm.qos",
            "slurm.constraint",
            "slurm.site",
            "slurm.continues",
        ),
    ),
    (
        "Offload",
        (
            "offload.mode",
            "offload.ratio",
            "offload.cpu_adam_cores_fraction",
            "offload.states",
            "offload.engine",
        ),
    ),
    (
        "Batch",
        (
            "train.micro_batch",
            "train.gradient_accumulation",
            "train.tokens_per_step",
            "data.sequence_length",
            "data.packing",
        ),
    ),
    ("Data", ("data.source", "data.subset", "data.split", "data.format", "data.loss")),
    ("Length", (LENGTH,)),
    (
        "Optimizer",
        (
            "train.learning_rate",
            "train.schedule",
            "train.warmup_ratio",
            "train.decay_ratio",
            "train.min_learning_rate_ratio",
            "train.weight_decay",
            "train.gradient_clipping",
        ),
    ),
    (
        "Checkpoints",
        (
            "checkpoint.every_steps",
            "checkpoint.every_minutes",
            "checkpoint.at_end",
            "checkpoint.keep",
            "checkpoint.folder",
            "checkpoint.export",
        ),
    ),
    (
        "Evaluation",
        ("data.held_out", "data.evaluation", "data.evaluation_split", "train.evaluate_every_steps"),
    ),
    ("Logging", ("train.log_interval", "train.log_level", "train.seed", "train.deterministic")),
)

LABELS = {
    "gpus": "GPUs",
    "slurm.partition": "Slurm partition",
    "slurm.qos": "QOS",
    "slurm.site": "site profile",
    "slurm.continues": "continue in a job",
    LENGTH: "train for",
    "data.loss": "loss on",
    "offload.ratio": "offload ratio",
    "offload.cpu_adam_cores_fraction": "CPU-Adam cores",
    "offload.states": "Adam moments",
    "train.gradient_accumulation": "accumulation",
    "train.tokens_per_step": "tokens a step",
    "train.warmup_ratio": "warm-up share",
    "train.decay_ratio": "decay share",
    "train.min_learning_rate_ratio": "minimum LR ratio",
    "train.gradient_clipping": "clipping",
    "checkpoint.every_steps": "save every, steps",
    "checkpoint.every_minutes": "save every, minutes",
    "data.evaluation": "other data",
    "data.evaluation_split": "other split",
    "train.evaluate_every_steps": "evaluate every",
    "checkpoint.at_end": "save at the end",
    "checkpoint.export": "export at the end",
}

HINTS = {
    "train.tokens_per_step": "0: accumulation",
    "offload.states": "on the host",
    "slurm.partition": "empty: here",
    "slurm.time_limit": "HH:MM:SS",
    "slurm.site": "empty: auto",
    "data.held_out": "a share, or a count",
    "data.evaluation": "id, file or folder",
    "train.evaluate_every_steps": "steps; 0: at the end",
    "checkpoint.every_steps": "0: not by steps",
    "checkpoint.every_minutes": "0: not by time",
}
"""Hints where the range would not explain what a number means."""

# They identify a preset and configure nothing.
_NOT_IN_FORM = ("name", "title")


def label(path: str) -> str:
    """Return the form's label of a field."""
    return LABELS.get(path) or path.rpartition(".")[2].replace("_", " ")


def problem_text(problem: Problem) -> str:
    """Return what is wrong with which field, and how to correct it, in whole sentences."""
    where = " ".join(filter(None, (label(problem.field), problem.value)))
    clause = problem.message
    joined = f"{where}: {clause}" if clause.startswith(("the ", "there ")) else f"{where} {clause}"
    return f"{joined}. {problem.advice}"


def advanced_paths() -> tuple[str, ...]:
    """Return the fields outside all groups, in the order of the types."""
    named = {path for _, paths in GROUPS for path in paths} | set(LENGTH_KEYS) | set(_NOT_IN_FORM)
    return tuple(
        path
        for path, info in field_index().items()
        if path not in named and info.type_name not in ("table", "list")
    )


def hint(info: FieldInfo) -> str:
    """Return a hint short enough to stand beside the field: the range, else the unit. The tooltip has the full text."""
    if info.path in HINTS:
        return HINTS[info.path]
    return ", ".join(info.range_parts) or info.unit


def text_of(value: object) -> str:
    """Return a value as it is typed into a field, for ``parse_value`` to read."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, list | tuple):
        if all(isinstance(item, int) for item in value) and value:
            return ",".join(map(str, value)) if len(value) > 1 else f"[{value[0]}]"
        return "[" + ", ".join(_inline(item) for item in value) + "]"
    return str(value)


def _inline(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_inline(item)}" for key, item in value.items()) + " }"
    return f'"{value}"' if isinstance(value, str) else text_of(value)


def flat(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield a tree as dotted paths. Tables that are values themselves, such as a model's shape, stay whole."""
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and path not in field_index():
            yield from flat(value, f"{path}.")
        else:
            yield path, value


def values_of(spec: RunSpec) -> dict[str, str]:
    """Return every field of the form as text."""
    known = field_index()
    return {path: text_of(value) for path, value in flat(complete_tree(spec)) if path in known}


def edits_between(base: RunSpec, wanted: RunSpec) -> dict[str, str]:
    """Return the edits that turn ``base`` into ``wanted``."""
    known = field_index()
    changes = differences(complete_tree(wanted), complete_tree(base))
    return {
        path: text_of(value)
        for path, value in flat(changes)
        if path in known and path not in _NOT_IN_FORM
    }


def length_of(values: Mapping[str, str]) -> tuple[str, str]:
    """Return key and text of the length: the one of the three that is not 0."""
    for path in LENGTH_KEYS:
        if values.get(path, "0") not in ("0", "0.0", ""):
            return path, values[path]
    return LENGTH_KEYS[0], values.get(LENGTH_KEYS[0], "0")


def same_value(path: str, one: str, other: str) -> bool:
    """Return whether two texts mean the same value of a field: ``4,096`` and ``4096`` do."""
    if one == other:
        return True
    info = field_index().get(path)
    return (
        info is not None
        and info.type_name in ("integer", "number")
        and parse_value(one, info) == parse_value(other, info)
    )


def with_edit(
    edits: Mapping[str, str], base: Mapping[str, str], path: str, text: str
) -> dict[str, str]:
    """Return ``edits`` after ``text`` was typed into ``path``.

    A value equal to the preset's is no edit. One length replaces the others, and another data source what describes the preset's.
    """
    changed = {key: value for key, value in edits.items() if key != path}
    if path in LENGTH_KEYS:
        changed = {key: value for key, value in changed.items() if key not in LENGTH_KEYS}
    if path == "data.source":
        plain = {
            f"data.{key}": text_of(field_index()[f"data.{key}"].default) for key in OF_A_SOURCE
        }
        if path in edits:  # what was filled in for the source before
            changed = {key: value for key, value in changed.items() if plain.get(key) != value}
        if text != base.get(path, ""):
            changed = {
                key: value for key, value in plain.items() if base.get(key, value) != value
            } | changed
    if not same_value(path, text, base.get(path, "")):
        changed[path] = text
    return changed


def typed_over(edits: Mapping[str, str], recommended: Mapping[str, str]) -> list[str]:
    """Return the fields that the user changed: those in which the edits differ from what a recommendation filled in."""
    fields = dict.fromkeys((*edits, *recommended))
    # A field of one of them only differs: the other has the preset's value.
    return [
        path
        for path in fields
        if not (
            path in edits
            and path in recommended
            and same_value(path, edits[path], recommended[path])
        )
    ]
