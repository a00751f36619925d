"""The smallest spec that is right, for tests to spoil."""

from __future__ import annotations

from typing import Any


def smallest(**sections: Any) -> dict[str, Any]:
    """A right tree with the given sections over it."""
    tree: dict[str, Any] = {"name": "trial", "model": {"id": "some/model"}, "data": {"source": "rows.jsonl"}, "train": {"steps": 10}}
    for name, value in sections.items():
        tree[name] = {**tree[name], **value} if isinstance(value, dict) and name in tree else value
    return tree
