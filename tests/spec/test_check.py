"""Every invalid input is reported with its field, code and remedy, all of them together."""

from __future__ import annotations

import math
from typing import Any

import pytest

from so_tui.spec import InputError, check_tree, find_preset, problems_in
from so_tui.spec.merge import complete_tree
from tests.support.trees import smallest

MORE, LEAST = "above 0 and below 1", "from 0 to 1"
WEIGHT = "a number above 0"
NAN = float("nan")
SOURCE = "data.source"
A = {"source": "a"}
TABLE = {"config": {"model_type": 3}, "parameters": [{"repeat": 0}]}
BAD: list[tuple[str, Any, str, str, str]] = [
    # (key, value, field of the problem if it differs from the key, code, part of the remedy)
    ("offload.ratio", 1.4, "", "out-of-range", LEAST),
    ("offload.ratio", NAN, "", "not-finite", LEAST),
    ("offload.ratio", "much", "", "wrong-type", LEAST),
    ("offload.ration", 0.5, "", "unknown-key", "Did you mean `ratio`?"),
    ("offload.cpu_adam_cores_fraction", 0, "", "out-of-range", MORE),
    ("offload.cpu_adam_cores_fraction", 1, "", "out-of-range", MORE),
    ("offload.mode", "superofload", "", "invalid-choice", "Did you mean `superoffload`?"),
    ("offload", {"parameters": "cpu", "mode": "gpu"}, ".parameters", "parameter-offload", '"none"'),
    ("offload", 0.5, "", "not-a-section", "[offload]"),
    ("offlaod.ratio", 0.5, "offlaod", "unknown-key", "Did you mean `offload`?"),
    ("ratio", 0.5, "", "unknown-key", "Did you mean `offload.ratio`?"),
    ("gpus", 0, "", "out-of-range", "from 1 to 16"),
    ("gpus", [], "", "no-gpu", "list of indices"),
    ("gpus", [1, 1], "", "repeated-gpu", "once"),
    ("gpus", [0, -1], "", "invalid-content", "or a list"),
    ("name", "Bad Name", "", "invalid-name", "lower-case letters"),
    ("train.micro_batch", True, "", "wrong-type", "sequences"),
    ("train.learning_rate", 0, "", "out-of-range", "above 0 and at most 1"),
    ("train.epochs", 1, "", "several-lengths", "Keep one of"),
    ("train.steps", 0, "", "no-length", "train.epochs"),
    ("train.deterministic", "yes", "", "wrong-type", "true or false"),
    (SOURCE, [], "", "no-data", "hub id"),
    (SOURCE, [{"sauce": "x", "source": "a"}], "[0].sauce", "unknown-key", "mean `source`?"),
    (SOURCE, [A, {"weight": 2}], "[1].source", "missing", "hub id"),
    (SOURCE, [A, A | {"weight": -1}], "[1].weight", "out-of-range", WEIGHT),
    (SOURCE, [A | {"weight": NAN}], "[0].weight", "not-finite", WEIGHT),
    (SOURCE, [A | {"format": "alpacka"}], "[0].format", "invalid-choice", "mean `alpaca`?"),
    (SOURCE, ["a.jsonl", A], "[0]", "not-a-source", '{source = "a.jsonl", weight = 1}'),
    ("slurm.account", "my project", "", "invalid-text", "without spaces"),
    ("slurm.time_limit", "1 day", "", "invalid-text", "HH:MM:SS or D-HH"),
    ("slurm.account", "a" * 65, "", "invalid-text", "at most 64"),
    ("model.id", "", "", "empty", "hub id"),
    ("model.weights", "random", "model.config", "missing-architecture", "model_type"),
    ("model", TABLE, ".parameters", "invalid-content", "Generate"),
]


@pytest.mark.parametrize(
    ("key", "value", "field", "code", "remedy"),
    BAD,
    ids=[f"{key}-{index}" for index, (key, *_) in enumerate(BAD)],
)
def test_wrong_value_has_a_remedy(key: str, value: Any, field: str, code: str, remedy: str) -> None:
    section, _, name = key.partition(".")
    (problem,) = problems_in(smallest(**{section: {name: value} if name else value}))
    assert problem.code == code
    assert problem.field == (key + field if field[:1] in (".", "[") else field or key)
    assert remedy in problem.remedy


@pytest.mark.parametrize(
    ("changes", "default"),
    [
        ({"train": {"learning_rate": 0}}, "1e-05"),
        ({"data": {"source": [A | {"weight": "x"}]}}, "1.0"),
        ({"model": {"id": ""}}, ""),
        ({"gpus": 0}, '"auto"'),
        ({"offload": {"ratio": 2}}, '"auto"'),
    ],
)
def test_a_problem_gives_the_default_of_its_field(changes: dict[str, Any], default: str) -> None:
    (problem,) = problems_in(smallest(**changes))
    assert problem.default == default
    assert "default" not in problem.remedy
    assert str(problem).endswith(f"The default is {default}.") == bool(default)


def test_all_problems_are_reported_together_with_the_file() -> None:
    tree = smallest(offload={"ratio": 2}, train={"epochs": 1, "micro_batch": 0}, gpus=99)
    with pytest.raises(InputError) as caught:
        check_tree(tree, "my.toml")
    fields = {problem.field for problem in caught.value.problems}
    assert fields == {"offload.ratio", "train.micro_batch", "train.epochs", "gpus"}
    assert all(problem.file == "my.toml" for problem in caught.value.problems)
    assert "offload.ratio = 2" in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("tree", "fields"),
    [
        (smallest(), set()),
        ({}, {"name", "model", "data", "train.steps"}),
        (smallest() | {"model": {}, "data": {}}, {"model.id", "data.source"}),
        (smallest(train={"steps": 0}, benchmark={"measured_steps": 5}), set()),
    ],
    ids=["smallest", "empty", "empty sections", "benchmark"],
)
def test_a_tree_lacks_the_required_keys(tree: dict[str, Any], fields: set[str]) -> None:
    assert {problem.field for problem in problems_in(tree)} == fields


@pytest.mark.parametrize("held", [math.inf, [0.0, math.inf], {"low": [{"high": math.nan}]}])
def test_what_json_cannot_hold_is_a_problem_inside_a_table_too(held: object) -> None:
    tree = complete_tree(find_preset("tiny").spec)
    tree["model"]["config"]["time_step_limit"] = held
    problems = [(problem.code, problem.field) for problem in problems_in(tree)]
    assert problems == [("not-finite", "model.config")]
