"""Write the JSON schemas of what commands print with ``--json``, and of files that users write.

python docs/make_schemas.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from so_tui.commands.machine import Findings, KnownMachines, Measured
from so_tui.commands.models import Generated
from so_tui.commands.presets import AddedPreset, Presets
from so_tui.commands.run import StartedRun
from so_tui.commands.runs import ComparedRuns, Runs
from so_tui.commands.settings import ShownSettings
from so_tui.launch.helper_jobs import DataCheck, DataPreview
from so_tui.launch.show import ShownLaunch
from so_tui.launch.slurm.script import Site
from so_tui.machine.types import Machine
from so_tui.plan.measured import Probe
from so_tui.plan.notes import AnyFact
from so_tui.plan.plan import Plan
from so_tui.runs.listing import RunNotes
from so_tui.settings import Settings
from so_tui.spec import RunSpec
from so_tui.validation.report import Report

Schema = dict[str, Any]
FOLDER = Path(__file__).with_name("schemas")

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TYPES = {
    "inspect": Machine,
    "machines": KnownMachines,
    "doctor": Findings,
    "calibrate": Measured,
    "validate": Report,
    "presets": Presets,
    "preset": RunSpec,
    "presets-add": AddedPreset,
    "data": DataPreview,
    "data-check": DataCheck,
    "run-detach": StartedRun,
    "runs": Runs,
    "compare": ComparedRuns,
    "generate": Generated,
    "note": RunNotes,
    "settings": ShownSettings,
    "settings-file": Settings,
    "site-profile": Site,
}
_TEXT: Schema = {"type": "string"}
_NULL: Schema = {"type": "null"}


def schemas() -> dict[str, Schema]:
    """Return the schemas by name."""
    return {name: {"$schema": _DIALECT, "title": name, **schema} for name, schema in _schemas()}


def _schemas() -> Iterator[tuple[str, Schema]]:
    for name, kind in _TYPES.items():
        yield name, msgspec.json.schema(kind)
    (launch, plan), types = _with_plan(ShownLaunch)
    types["ShownLaunch"]["properties"]["plan"] = plan
    yield "run-dry-run", {**launch, "$defs": types}
    (probe, plan), types = _with_plan(Probe)
    _as_plans_json(types)
    plans = {"plans": {"type": "array", "items": plan}, "probe": probe, "path": _TEXT}
    yield "plan", {"type": "object", "properties": plans, "required": ["plans"], "$defs": types}


def _with_plan(kind: type[Struct]) -> tuple[tuple[Schema, ...], dict[str, Schema]]:
    """Return the schemas of a type and of a plan as ``plan_tree`` returns it, with texts for facts
    and the facts beside them.
    """
    (own, plan, fact), types = msgspec.json.schema_components(
        [kind, Plan, AnyFact], ref_template="#/$defs/{name}"
    )
    texts = {"type": "array", "items": _TEXT}
    types["Plan"]["properties"] |= {
        "reasons": texts,
        "remedies": texts,
        "warnings": texts,
        "facts": {
            "type": "array",
            "items": _extended(fact, role={"enum": ["reason", "remedy", "warning"]}, message=_TEXT),
        },
        "shortage": {"anyOf": [_extended({"$ref": "#/$defs/Shortage"}, place=_TEXT), _NULL]},
        "speed_source": _TEXT,
        "speed": {"anyOf": [{"$ref": "#/$defs/SpeedSource"}, _NULL]},
    }
    types["Plan"]["required"] += ["facts", "speed"]
    return (own, plan), types


def _extended(schema: Schema, **fields: Schema) -> Schema:
    return {"allOf": [schema, {"type": "object", "properties": fields, "required": [*fields]}]}


def _as_plans_json(types: dict[str, Schema]) -> None:
    """Change a plan into one of ``plans_json``, which has settings in place of the spec."""
    plan = types["Plan"]
    plan["properties"]["settings"] = {
        "type": "object",
        "additionalProperties": {"type": ["string", "number"]},
    }
    del plan["properties"]["spec"]
    plan["required"] = [*(key for key in plan["required"] if key != "spec"), "settings"]
    for name in msgspec.json.schema_components([RunSpec])[1]:
        del types[name]


def schema_text(schema: Schema) -> str:
    """Return a schema as it is published: with the end of a text as JSON Schema's patterns write
    it, not as Python's do.
    """
    return json.dumps(_on_one_line(schema), indent=1).replace('\\\\Z"', '$"') + "\n"


def _on_one_line(schema: Any) -> Any:
    """Return a schema whose descriptions, which are docstrings, do not depend on their lines."""
    if isinstance(schema, dict):
        return {
            key: " ".join(value.split())
            if key == "description" and isinstance(value, str)
            else _on_one_line(value)
            for key, value in schema.items()
        }
    return [_on_one_line(part) for part in schema] if isinstance(schema, list) else schema


if __name__ == "__main__":
    for name, schema in schemas().items():
        (FOLDER / f"{name}.json").write_text(schema_text(schema), encoding="utf-8")
