"""Check what a command printed with ``--json`` against its published schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

FOLDER = Path(__file__).parents[2] / "docs" / "schemas"


def valid(name: str, printed: str) -> Any:
    """Return the values that were printed. They agree with the schema and have no key that it does
    not describe.
    """
    values = json.loads(printed)
    schema = json.loads((FOLDER / f"{name}.json").read_text())
    for kind in schema["$defs"].values():
        if (
            "properties" in kind and "code" not in kind["properties"]
        ):  # facts have more keys in plans
            kind["additionalProperties"] = False
    Draft202012Validator(schema).validate(values)
    return values
