"""Every key of a preset or of another struct, with its documentation, unit, range and default."""

from __future__ import annotations

from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import Struct, inspect

from so_tui.spec.run_spec import RunSpec
from so_tui.units import thousands

FieldType = Literal["integer", "number", "text", "boolean", "choice", "list", "table"]

_NOUNS: dict[FieldType, str] = {
    "integer": "a whole number",
    "number": "a number",
    "text": "text",
    "boolean": "true or false",
    "list": "a list",
    "table": "a table",
    "choice": "one of",
}


class FieldInfo(Struct, frozen=True, kw_only=True):
    """One key of a preset."""

    path: str
    """Dotted name, as ``--set`` takes it."""
    type_name: FieldType
    """Type that an editor offers; the simplest one if the field takes several."""
    description: str
    unit: str = ""
    minimum: float | None = None
    maximum: float | None = None
    excludes_minimum: bool = False
    excludes_maximum: bool = False
    choices: tuple[str, ...] = ()
    takes_list: bool = False
    """Whether the field also takes a list (``gpus``, ``data.source``)."""
    default: Any = None
    required: bool = False

    @property
    def range_text(self) -> str:
        """Range in words, with its unit; empty if there is none."""
        parts = self.range_parts
        if not parts:
            return ""
        unit = f" {self.unit}" if self.unit else ""
        return f"{'from ' if self._closed else ''}{' and '.join(parts)}{unit}"

    @property
    def range_parts(self) -> tuple[str, ...]:
        """The bounds in words, without unit: ``0 to 1``, or one text for each bound."""
        low = "" if self.minimum is None else self._bound_text(self.minimum)
        high = "" if self.maximum is None else self._bound_text(self.maximum)
        if self._closed:
            return (f"{low} to {high}",)
        bounds = (
            ("above" if self.excludes_minimum else "at least", low),
            ("below" if self.excludes_maximum else "at most", high),
        )
        return tuple(f"{word} {number}" for word, number in bounds if number)

    @property
    def _closed(self) -> bool:
        """Whether both bounds are given and belong to the range."""
        return (
            None not in (self.minimum, self.maximum)
            and not self.excludes_minimum
            and not self.excludes_maximum
        )

    def _bound_text(self, bound: float) -> str:
        return thousands(int(bound)) if bound == int(bound) else f"{bound:g}"

    @property
    def expected(self) -> str:
        """Type and range in words: ``a number from 0 to 1``."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        text = _NOUNS[self.type_name]
        if bounds := self.range_text:
            first_excluded = (
                self.excludes_minimum if self.minimum is not None else self.excludes_maximum
            )
            text += f" {bounds}" if self._closed or first_excluded else f" of {bounds}"
        elif self.unit:
            text += f" ({self.unit})"
        return f"{text}, or a list" if self.takes_list and self.type_name != "list" else text


KEYS_MEANT = {
    "lr": "train.learning_rate",
    "batch-size": "train.micro_batch",
    "per-device-train-batch-size": "train.micro_batch",
    "gradient-accumulation-steps": "train.gradient_accumulation",
    "max-steps": "train.steps",
    "num-train-epochs": "train.epochs",
    "max-length": "data.sequence_length",
    "seq-length": "data.sequence_length",
    "dataset": "data.source",
    "data": "data.source",
    "model": "model.id",
    "output": "checkpoint.folder",
    "output-dir": "checkpoint.folder",
    "save-dir": "checkpoint.folder",
    "offload-ratio": "offload.ratio",
    "warmup": "train.warmup_ratio",
}
"""Options and keys of other tools, by the key that has their value here."""


@cache
def field_index() -> dict[str, FieldInfo]:
    """Return all keys by dotted path, in declaration order (``train.micro_batch``), without the
    generated parameter table.
    """
    return {info.path: info for info in fields_of(RunSpec) if info.path != "model.parameters"}


def fields_of(struct: type[Struct], prefix: str = "") -> list[FieldInfo]:
    """Return the keys of a struct and of the structs in it, with dotted names."""
    found: list[FieldInfo] = []
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    for field in info.fields:
        bare = _bare(field.type)
        if isinstance(bare, inspect.StructType):
            found += fields_of(bare.cls, f"{prefix}{field.name}.")
        else:
            found.append(_field_info(f"{prefix}{field.name}", struct, field))
    return found


def _field_info(path: str, struct: type[Struct], field: inspect.Field) -> FieldInfo:
    meta = field.type if isinstance(field.type, inspect.Metadata) else None
    schema = (meta.extra_json_schema or {}) if meta else {}
    extra = (meta.extra or {}) if meta else {}
    options = _options(_bare(field.type))
    plain = options[0]
    minimum, low_open = _bound(plain, "ge", "gt")
    maximum, high_open = _bound(plain, "le", "lt")
    if field.default is not msgspec.NODEFAULT:
        default = field.default
    else:
        default = None if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    return FieldInfo(
        path=path,
        type_name=_TYPE_NAMES[type(plain)],
        description=schema.get("description", ""),
        unit=extra.get("unit", ""),
        minimum=minimum,
        maximum=maximum,
        excludes_minimum=low_open,
        excludes_maximum=high_open,
        choices=_choices(struct, field.name) if isinstance(plain, inspect.LiteralType) else (),
        takes_list=any(_TYPE_NAMES[type(option)] == "list" for option in options),
        default=default,
        required=field.required,
    )


def _choices(struct: type[Struct], name: str) -> tuple[str, ...]:
    """Return the choices in declaration order (msgspec sorts them)."""
    choices = get_args(get_type_hints(struct)[name])
    return choices if NoneType not in choices else get_args(choices[0])


def _bare(kind: inspect.Type) -> inspect.Type:
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    return kind


def _options(kind: inspect.Type) -> list[inspect.Type]:
    """Return the members of a union without None, lists last."""
    options = (
        [_bare(option) for option in kind.types] if isinstance(kind, inspect.UnionType) else [kind]
    )
    options = [option for option in options if not isinstance(option, inspect.NoneType)]
    return sorted(options, key=lambda option: _TYPE_NAMES[type(option)] == "list")


_TYPE_NAMES: dict[type[inspect.Type], FieldType] = {
    inspect.BoolType: "boolean",
    inspect.IntType: "integer",
    inspect.FloatType: "number",
    inspect.StrType: "text",
    inspect.LiteralType: "choice",
    inspect.ListType: "list",
    inspect.VarTupleType: "list",
    inspect.TupleType: "list",
    inspect.DictType: "table",
}
"""Types that fields of a struct may have."""


def _bound(kind: inspect.Type, closed: str, opened: str) -> tuple[float | None, bool]:
    inclusive, exclusive = getattr(kind, closed, None), getattr(kind, opened, None)
    return (exclusive, True) if exclusive is not None else (inclusive, False)
