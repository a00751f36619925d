"""The smallest valid spec as a plain tree, for tests to change."""

from __future__ import annotations

from typing import Any


def smallest(**sections: Any) -> dict[str, Any]:
    """Return a valid tree with the given sections merged into it."""
    tree: dict[str, Any] = {
        "name": "trial",
        "model": {"id": "some/model"},
        "data": {"source": "rows.jsonl"},
        "train": {"steps": 10},
    }
    for name, value in sections.items():
        tree[name] = {**tree[name], **value} if isinstance(value, dict) and name in tree else value
    return tree
