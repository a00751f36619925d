"""The form behind Configure, without widgets: its fields in order, and the edits over a preset.
Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from msgspec import Struct, toml

from so_tui.spec import (
    FieldInfo,
    InputError,
    Problem,
    RunSpec,
    SoTuiError,
    complete_tree,
    field_index,
    of_a_source,
    parse_value,
    with_values,
)
from so_tui.spec.run_spec import MACHINE_DECIDES, SPLIT
from so_tui.trust.text import quoted

if TYPE_CHECKING:
    from so_tui.machine.types import Machine
    from so_tui.plan.plan import Launch, Plan


Texts = dict[str, str]
"""Texts of fields by path, as they are typed."""
LENGTH = "train.length"
"""Stands for the three keys of LENGTH_KEYS, one of which is set."""
LENGTH_KEYS = ("train.steps", "train.epochs", "train.tokens")
AUTO = "auto"
"""What is typed to leave a field to the machine."""
SLURM = "Slurm"
"""The group that only a host with Slurm shows."""


class _Fields(Struct):
    """What ``form.toml`` says of the fields, by path; groups have a list of paths each."""

    groups: dict[str, tuple[str, ...]]
    labels: Texts
    hints: Texts
    steps: dict[str, float | Literal["powers of two", "1-2-5"]]
    first: dict[str, float]


_FIELDS = toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=_Fields)
GROUPS = tuple(_FIELDS.groups.items())
HINTS = _FIELDS.hints
_NOT_IN_FORM = ("name", "title", "fixed")
"""They identify a preset, or follow from what is edited."""


def label(path: str) -> str:
    """Return the form's label of a field."""
    return _FIELDS.labels.get(path) or path.rpartition(".")[2].replace("_", " ")


def problem_text(problem: Problem) -> str:
    """Return what is wrong with which field, and how to correct it, in whole sentences."""
    where = " ".join(filter(None, (label(problem.field), problem.value)))
    clause = problem.message
    joined = f"{where}: {clause}" if clause.startswith(("the ", "there ")) else f"{where} {clause}"
    return f"{joined}. {problem.advice}"


def problem_texts(error: SoTuiError) -> str:
    """Return the problems of an error, a line each."""
    if isinstance(error, InputError):
        return "\n".join(map(problem_text, error.problems))
    return str(error)


def advanced_paths() -> tuple[str, ...]:
    """Return the fields outside all groups, in the order of the types."""
    named = {path for _, paths in GROUPS for path in paths} | set(LENGTH_KEYS) | set(_NOT_IN_FORM)
    return tuple(
        path
        for path, info in field_index().items()
        if path not in named and info.type_name not in ("table", "list")
    )


def hint(info: FieldInfo) -> str:
    """Return a hint short enough to stand beside the field: the range, else the unit. The lines
    below the form have the full text.
    """
    return HINTS.get(info.path) or ", ".join(info.range_parts) or info.unit


def text_of(value: object) -> str:
    """Return a value as it is typed into a field, for ``parse_value`` to read."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, list | tuple):
        if len(value) > 1 and all(isinstance(item, int) for item in value):
            return ",".join(map(str, value))
        return f"[{', '.join(map(_inline, value))}]"
    return str(value)


def _inline(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_inline(item)}" for key, item in value.items()) + " }"
    return f'"{value}"' if isinstance(value, str) else text_of(value)


def flat(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield a tree as dotted paths. Tables that are values themselves, such as a model's shape,
    stay whole.
    """
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and path not in field_index():
            yield from flat(value, f"{path}.")
        else:
            yield path, value


def values_of(spec: RunSpec) -> Texts:
    """Return every key of a spec as text."""
    known = field_index()
    return {path: text_of(value) for path, value in flat(complete_tree(spec)) if path in known}


def settings_of(spec: RunSpec) -> Texts:
    """Return every setting of a spec as text, by which runs are compared: not which of them a
    person set.
    """
    return {path: text for path, text in values_of(spec).items() if path != "fixed"}


def _length_of(values: Texts) -> tuple[str, str]:
    """Return key and text of the length: the one of the three that is not 0."""
    given = (path for path in LENGTH_KEYS if values.get(path, "0") not in ("0", "0.0", ""))
    path = next(given, LENGTH_KEYS[0])
    return path, values.get(path, "0")


def _same_value(path: str, one: str, other: str) -> bool:
    """Return whether two texts mean the same value of a field: ``4,096`` and ``4096`` do."""
    info = field_index()[path]
    return one == other or (
        info.type_name in NUMBERS and parse_value(one, info) == parse_value(other, info)
    )


def _with_edit(edits: Texts, base: Texts, path: str, text: str) -> Texts:
    """Return ``edits`` after ``text`` was typed into ``path``.

    A value equal to the preset's is no edit. One length replaces the others, and another data
    source what describes the preset's.
    """
    replaced = LENGTH_KEYS if path in LENGTH_KEYS else (path,)
    changed = {key: value for key, value in edits.items() if key not in replaced}
    if path == "data.source":
        plain = {
            f"data.{key}": text_of(field_index()[f"data.{key}"].default)
            for key in of_a_source(base["data.format"])
        }
        if path in edits:  # what was filled in for the source before
            changed = {key: value for key, value in changed.items() if plain.get(key) != value}
        if text != base[path]:
            changed = {key: value for key, value in plain.items() if base[key] != value} | changed
    if not _same_value(path, text, base[path]):
        changed[path] = text
    return changed


# What is edited in Configure: a preset with its unsaved edits. Without widgets.


@dataclass
class Draft:
    """A preset with the user's edits, and what was chosen for the machine beside them. The screen
    that shows it is the only one to change it.
    """

    base: RunSpec
    """The preset as it is saved."""
    edits: Texts = field(default_factory=dict)
    """The values that the user changed. For keys that the machine decides, an edit fixes the value,
    and ``auto`` opens one that the preset fixes.
    """
    resolved: RunSpec | None = None
    """The spec of the newest plan, with all that was chosen."""
    machine: str = ""
    """The machine that it was chosen for, in words."""
    base_values: Texts = field(init=False)

    def __post_init__(self) -> None:
        self.base_values = values_of(self.base)

    @property
    def spec(self) -> RunSpec:
        """What a plan is made of: the preset with the edits. Raises InputError."""
        return with_values(self.base, self.edits)

    @property
    def chosen(self) -> Texts:
        """What was chosen for the machine, by path: every field that it decides and nobody has
        fixed.
        """
        if self.resolved is None:
            return {}
        values = values_of(self.resolved)
        return {path: values[path] for path in MACHINE_DECIDES if not self.is_fixed(path)}

    @property
    def values(self) -> Texts:
        """Every field as text: as edited, else as chosen, else as the preset says."""
        typed = {path: text for path, text in self.edits.items() if text != AUTO}
        return {**self.base_values, **self.chosen, **typed}

    @property
    def changes(self) -> list[str]:
        """The fields that the user changed."""
        return list(self.edits)

    def is_fixed(self, path: str) -> bool:
        """Return whether a field that the machine would decide has a value of the user's, in the
        preset or edited.
        """
        both = SPLIT if path in SPLIT else (path,)
        if edited := [self.edits[each] for each in both if each in self.edits]:
            return any(text != AUTO for text in edited)
        return any(each in self.base.fixed for each in both)

    def resolve(self, spec: RunSpec, machine: str) -> None:
        """Take over what a plan chose for ``machine``."""
        self.resolved, self.machine = spec, machine

    def take(self, wanted: RunSpec, machine: str) -> None:
        """Take over a plan of the table: what it chose, and its number of GPUs where another would
        be chosen.
        """
        self.release("gpus")
        if "gpus" in wanted.fixed:
            self.enter("gpus", text_of(wanted.gpus))
        self.resolve(wanted, machine)

    def undo(self) -> None:
        """Undo the user's changes."""
        self.edits = {}

    def release(self, path: str) -> bool:
        """Leave a field to the machine again, or undo the change of any other. Return whether that
        changed anything.
        """
        before = self.edits
        both = SPLIT if path in SPLIT else LENGTH_KEYS if path == LENGTH else (path,)
        self.edits = {key: text for key, text in before.items() if key not in both}
        if path in MACHINE_DECIDES and self.is_fixed(path):
            self.edits = {**self.edits, **{key: AUTO for key in both if key in self.base.fixed}}
        return self.edits != before

    def fix(self, path: str) -> bool:
        """Keep the value that was chosen for a field, and return whether that changed anything."""
        return path in self.chosen and self._set(path, self.values[path])

    def enter(self, path: str, text: str) -> bool:
        """Enter ``text`` into a field, and return whether that changed anything: the value that is
        shown does not.
        """
        if path in MACHINE_DECIDES and text.strip() == AUTO:
            return self.release(path)
        if path in self.chosen and _same_value(path, text, self.values[path]):
            return False
        return self._set(path, text)

    def _set(self, path: str, text: str) -> bool:
        before = self.edits
        if path in MACHINE_DECIDES:
            with_other: Texts = {}
            if path in SPLIT and not self.is_fixed(path):
                # The other part stays as it is shown.
                shown, base = self.chosen, self.base_values
                with_other = {
                    key: shown[key] for key in SPLIT if shown.get(key, base[key]) != base[key]
                }
            self.edits = {**with_other, **before, path: text}
            if path in self.base.fixed and _same_value(path, text, self.base_values[path]):
                del self.edits[path]
        else:
            self.edits = _with_edit(before, self.base_values, path, text)
        return self.edits != before

    def shown_value(self, path: str) -> tuple[str, str]:
        """Return the key that a row of the form shows and its text."""
        if path == LENGTH:
            # An edited length hides those of the preset.
            typed = {key: text for key, text in self.edits.items() if key in LENGTH_KEYS}
            return _length_of(typed or self.base_values)
        return path, self.values[path]

    def was(self, path: str) -> str | None:
        """Return what a field said before the user changed it, ``auto`` where the machine decided;
        None where it was not changed.
        """
        if path == LENGTH:
            if not any(key in self.edits for key in LENGTH_KEYS):
                return None
            key, text = _length_of(self.base_values)
            return f"{text} {key.rpartition('.')[2]}"
        if path not in self.edits:
            return None
        decided = path in MACHINE_DECIDES and path not in self.base.fixed
        return AUTO if decided else self.base_values[path]


# The next value of a number field, for a press on ``+`` or ``−``: sensible for what the number
# means, inside its limits. Pure.


Direction = Literal[-1, 1]

NUMBERS = ("integer", "number")
"""Types of fields that have next values."""
_TOLERANCE = 1e-12


def _beyond(values: Iterable[float], present: float, direction: int) -> float | None:
    """Return the nearest value in a direction; None at the end."""
    there = (
        value
        for value in values
        if (value - present) * direction > _TOLERANCE * max(abs(value), abs(present))
    )
    return min(there, key=lambda value: value * direction, default=None)


def next_text(path: str, text: str, direction: Direction) -> str | None:
    """Return the next value of a field as it is typed; None at its limit, or where the text is no
    number.
    """
    info = field_index()[path]
    present = parse_value(text, info)
    if type(present) not in (int, float) or not math.isfinite(present):
        return None
    proposed = _beyond(_candidates(info, present), present, direction)
    if proposed is None:
        return None
    low = -math.inf if info.minimum is None else info.minimum
    high = math.inf if info.maximum is None else info.maximum
    value = min(max(float(f"{proposed:.12g}"), low), high)
    value = round(value) if info.type_name == "integer" else value
    excluded = (info.excludes_minimum and value == low) or (info.excludes_maximum and value == high)
    return None if excluded or (value - present) * direction <= 0 else text_of(value)


def _candidates(info: FieldInfo, present: float) -> list[float]:
    """Return the values around the present one, without regard to limits."""
    step = _FIELDS.steps.get(info.path)
    if isinstance(step, float):
        return [step * (round(present / step) + by) for by in (-1, 0, 1)]
    least = _FIELDS.first.get(info.path, 1.0)
    if present <= 0:
        return [least]
    if step == "powers of two":
        power = math.floor(math.log2(present))
        found = [2.0**exponent for exponent in range(power - 1, power + 2)]
    else:
        decade = math.floor(math.log10(present))
        digits = (1, 2, 5) if step == "1-2-5" else range(1, 10)
        found = [
            float(f"{digit}e{exponent}")
            for exponent in range(decade - 1, decade + 2)
            for digit in digits
        ]
    endless = info.excludes_minimum or info.path in LENGTH_KEYS  # 0 is no value
    if endless or present > least * (1 + _TOLERANCE):
        return found
    return [0.0, *(value for value in found if value > present)]


@dataclass
class Planned:
    """The plan of the values in the form, or their problems; ``serial`` identifies the request."""

    serial: int
    plan: Plan | None
    problems: tuple[Problem, ...]
    launch: Launch | None = None

    @property
    def command(self) -> str:
        """The command that a launch starts; empty without a launch."""
        return quoted(*self.launch.argv) if self.launch else ""


# Plans beside the one that is shown: the same run with another offload ratio, or another share of
# cores for Adam. Pure.


RATIO = "offload.ratio"
CORES = "offload.cpu_adam_cores_fraction"
VALUES = {
    RATIO: tuple(step / 10 for step in range(11)),
    CORES: tuple(step / 10 for step in range(1, 10)),
}
"""The values that a strip shows, ascending."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One value, and what the plan says with it."""

    value: float
    plan: Plan


@dataclass(frozen=True, slots=True)
class Strip:
    """The choices of one field."""

    path: str
    choices: tuple[Choice, ...]
    present: float

    @property
    def at(self) -> int:
        """The choice nearest to the present value."""
        return min(
            range(len(self.choices)),
            key=lambda index: abs(self.choices[index].value - self.present),
        )

    def stepped(self, direction: int) -> float | None:
        """Return the next value in a direction; None at the end."""
        return _beyond((choice.value for choice in self.choices), self.present, direction)


def strips_for(
    plan: Plan, machine: Machine, cancelled: Callable[[], bool] = lambda: False
) -> tuple[Strip, ...] | None:
    """Return what other values would do; nothing where the plan offloads nothing; None if it was
    cancelled meanwhile.
    """
    from so_tui.plan.planner import make_plan

    if plan.mode == "gpu" or not plan.possible:
        return ()
    present = {RATIO: plan.ratio}
    if plan.mode == "superoffload" and plan.binding and plan.binding[0].adam_cpus:
        present[CORES] = plan.spec.offload.cpu_adam_cores_fraction
    strips = []
    for path, value in present.items():
        choices = []
        for other in sorted({*VALUES[path], round(value, 6)}):
            if cancelled():
                return None
            edits = {"offload.mode": plan.mode, path: f"{other:g}"}
            try:
                found = make_plan(with_values(plan.spec, edits), machine)
            except InputError:
                continue  # this run cannot have it
            choices.append(Choice(other, found))
        if choices:
            strips.append(Strip(path, tuple(choices), value))
    return tuple(strips)
