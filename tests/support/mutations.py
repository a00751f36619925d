"""Hypothesis strategies that harm valid documents: wrong values, nesting, torn bytes."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

Tree = dict[str, Any] | list[Any]

_TEXTS = [
    *("", "x\n", "\x1b]52;c;cm0=\x07", "\x9b31m", "\u202e\u2066", "\ud800", "a\0b", "[red]"),
    *("../../etc/passwd", "/dev/zero", "a" * 100_000, "nan"),
]
_NUMBERS = [
    *(0, -1, 1, 2**31, 2**63 - 1, 2**63, -(2**64), 10**400),
    *(1e300, -1e300, 5e-324, float("nan"), float("inf"), float("-inf")),
]


_NESTED = [json.loads("[" * levels + "1" + "]" * levels) for levels in (20, 200)]
HOSTILE = st.one_of(
    st.sampled_from([*_TEXTS, *_NUMBERS, None, True, False, [], {}, [[]], {"": {}}, {"a": None}]),
    st.sampled_from([*_NESTED, [0] * 10_000, {str(number): number for number in range(2_000)}]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        st.lists,
        max_leaves=8,
    ),
)


@st.composite
def harmed_trees(draw: st.DrawFn, valid: Tree) -> Tree:
    """Return a copy of a tree with one to three values replaced, removed, wrapped or repeated."""
    tree = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        if not tree:
            break
        parent, key = draw(st.sampled_from(list(_places(tree))))
        match draw(st.sampled_from(("replace", "replace", "remove", "wrap", "add"))):
            case "replace":
                parent[key] = copy.deepcopy(draw(HOSTILE))
            case "remove":
                del parent[key]
            case "wrap":
                parent[key] = [parent[key]]
            case "add" if isinstance(parent, dict):
                parent[draw(st.sampled_from(_TEXTS))] = copy.deepcopy(draw(HOSTILE))
            case "add":
                parent.extend([copy.deepcopy(draw(HOSTILE))] * draw(st.integers(1, 50)))
    return tree


@st.composite
def harmed_bytes(draw: st.DrawFn, valid: bytes) -> bytes:
    """Return a document torn, flipped, spliced, repeated, or replaced altogether."""
    at = draw(st.integers(0, max(0, len(valid) - 1)))
    match draw(st.sampled_from(("tear", "flip", "insert", "repeat", "nest", "replace", "empty"))):
        case "tear":
            return valid[:at]
        case "flip" if valid:
            flipped = valid[at] ^ (1 << draw(st.integers(0, 7)))
            return valid[:at] + bytes([flipped]) + valid[at + 1 :]
        case "insert":
            return valid[:at] + draw(st.binary(max_size=40)) + valid[at:]
        case "repeat":
            return valid * draw(st.integers(2, 5))
        case "nest":
            opened = draw(st.sampled_from([b"[", b'{"a":', b"("]))
            return valid[:at] + opened * draw(st.sampled_from([100, 100_000])) + valid[at:]
        case "replace":
            return draw(st.binary(max_size=200))
    return b""


def harmed_json(valid: bytes) -> st.SearchStrategy[bytes]:
    """Return strategies for a JSON document: harmed as a tree, or as bytes."""
    return harmed_bytes(valid) | harmed_trees(json.loads(valid)).map(
        lambda t: json.dumps(t).encode()
    )


def harmed_lines(valid: bytes) -> st.SearchStrategy[bytes]:
    """Return a strategy for lines of JSON: a few of them harmed, or the bytes of all."""
    lines = valid.splitlines()

    @st.composite
    def some(draw: st.DrawFn) -> bytes:
        changed = list(lines)
        for _ in range(draw(st.integers(1, 3))):
            place = draw(st.integers(0, len(changed) - 1))
            changed[place] = draw(harmed_json(lines[place]))
        return b"\n".join(changed) + b"\n"

    return harmed_bytes(valid) | some()


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every value of a tree as its parent and its key."""
    for key in tree if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from _places(tree[key])
