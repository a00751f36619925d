"""The next value of a number field: sensible for what it means, and never beyond its limits."""

from __future__ import annotations

import math
from typing import get_args

import pytest

from so_tui.spec import field_index, parse_value
from so_tui.ui.form import LENGTH_KEYS, Direction, next_text
from so_tui.ui.form import NUMBERS as NUMBER_TYPES

NUMBERS = [
    path
    for path, info in field_index().items()
    if info.type_name in NUMBER_TYPES and not path.startswith("benchmark.")
]


def walk(path: str, text: str, direction: Direction, most: int = 60) -> list[str]:
    found: list[str] = []
    while len(found) < most and (after := next_text(path, text, direction)) is not None:
        found.append(text := after)
    return found


@pytest.mark.parametrize(
    ("path", "text", "direction", "after"),
    [
        ("train.steps", "60", -1, "50 40 30 20 10 9 8 7 6 5 4 3 2 1"),
        ("train.steps", "12,431", 1, "20000 30000"),
        ("train.tokens", "5000000", -1, "4000000 3000000 2000000 1000000"),
        ("train.epochs", "1.0", 1, "2 3"),
        ("checkpoint.every_steps", "0", 1, "1 2 3"),
        ("checkpoint.every_minutes", "1", -1, "0"),
        ("offload.ratio", "0.87", -1, "0.85 0.8"),
        ("offload.cpu_adam_cores_fraction", "0.85", 1, "0.9 0.95"),
        ("train.learning_rate", "1e-05", 1, "2e-05 5e-05 0.0001"),
        ("train.learning_rate", "1e-05", -1, "5e-06 2e-06"),
        ("train.gradient_clipping", "1.0", -1, "0.5 0.2 0.1 0"),
        ("train.micro_batch", "3", 1, "4 8"),
        ("train.micro_batch", "3", -1, "2 1"),
        ("gpus", "1", 1, "2 3"),
        ("train.beta2", "0.999", -1, "0.998"),
        ("train.seed", "2000000000", 1, "2000000001"),
        ("train.seed", "2000000000", -1, "1999999999"),
    ],
)
def test_the_next_value_is_one_that_is_used(
    path: str, text: str, direction: Direction, after: str
) -> None:
    expected = after.split()
    assert walk(path, text, direction, len(expected)) == expected


@pytest.mark.parametrize("text", ["", "many", "0,1", "[0, 1]", "nan", "inf", "true"])
def test_there_is_none_of_what_is_no_number(text: str) -> None:
    assert next_text("gpus", text, 1) is None
    assert next_text("train.warmup_ratio", text, -1) is None


@pytest.mark.parametrize("path", NUMBERS)
def test_every_number_moves_within_its_limits_and_back(path: str) -> None:
    info = field_index()[path]
    start = "1" if path in LENGTH_KEYS else str(info.default)
    low = -math.inf if info.minimum is None else info.minimum
    high = math.inf if info.maximum is None else info.maximum
    moves = {direction: walk(path, start, direction) for direction in get_args(Direction)}
    assert any(moves.values())
    for direction, texts in moves.items():
        values = [parse_value(text, info) for text in texts]
        assert values == sorted(set(values), reverse=direction < 0)
        for value in values:
            assert low <= value <= high
            assert value != low or not info.excludes_minimum
            assert value != high or not info.excludes_maximum
            assert value or path not in LENGTH_KEYS
        assert all(next_text(path, text, -direction) is not None for text in texts)
