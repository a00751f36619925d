"""Check what a command printed with ``--json`` against its published schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

FOLDER = Path(__file__).parents[2] / "docs" / "schemas"


def valid(name: str, printed: str) -> Any:
    """Return the printed values, which agree with the schema and have no other key."""
    values = json.loads(printed)
    schema = json.loads((FOLDER / f"{name}.json").read_text())
    for kind in schema["$defs"].values():
        # Facts have more keys in plans.
        if "properties" in kind and "code" not in kind["properties"]:
            kind["additionalProperties"] = False
    Draft202012Validator(schema).validate(values)
    return values
