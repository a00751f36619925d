"""Every wrong input is named with its field, its value and what to do about it; all of them at once."""

from __future__ import annotations

from typing import Any

import pytest

from so_tui.spec import InputError, check_tree, problems_in
from tests.support.trees import smallest

BAD = [
    # what is wrong, the field that is named, a part of the message, a part of the remedy
    ({"offload": {"ratio": 1.4}}, "offload.ratio", "out of range", "from 0 to 1"),
    ({"offload": {"ratio": -0.1}}, "offload.ratio", "out of range", "from 0 to 1"),
    ({"offload": {"ratio": float("nan")}}, "offload.ratio", "not finite", "from 0 to 1"),
    ({"offload": {"ratio": "much"}}, "offload.ratio", "is not a number", "from 0 to 1"),
    ({"offload": {"ration": 0.5}}, "offload.ration", "not a known key", "Did you mean `ratio`?"),
    ({"offload": {"cpu_adam_cores_fraction": 0}}, "offload.cpu_adam_cores_fraction", "out of range", "above 0 and below 1"),
    ({"offload": {"cpu_adam_cores_fraction": 1}}, "offload.cpu_adam_cores_fraction", "out of range", "above 0 and below 1"),
    ({"offload": {"mode": "superofload"}}, "offload.mode", "not one of the choices", "Did you mean `superoffload`?"),
    ({"offload": {"parameters": "cpu"}}, "offload.parameters", "refused", '"none"'),
    ({"offload": 0.5}, "offload", "is a section", "[offload]"),
    ({"offlaod": {"ratio": 0.5}}, "offlaod", "not a known key", "Did you mean `offload`?"),
    ({"ratio": 0.5}, "ratio", "not a known key", "Did you mean `offload.ratio`?"),
    ({"gpus": 0}, "gpus", "out of range", "from 1 to 16"),
    ({"gpus": []}, "gpus", "names no GPU", "list of indices"),
    ({"gpus": [1, 1]}, "gpus", "twice", "once"),
    ({"gpus": "all"}, "gpus", "is not a whole number", "or a list"),
    ({"gpus": [0, -1]}, "gpus", "wrong inside", "or a list"),
    ({"name": "Bad Name"}, "name", "not a valid name", "small letters"),
    ({"train": {"micro_batch": 0}}, "train.micro_batch", "out of range", "sequences"),
    ({"train": {"micro_batch": 2.5}}, "train.micro_batch", "is not a whole number", "sequences"),
    ({"train": {"micro_batch": True}}, "train.micro_batch", "is not a whole number", "sequences"),
    ({"train": {"learning_rate": 0}}, "train.learning_rate", "out of range", "The default is 1e-05"),
    ({"train": {"epochs": 1}}, "train.epochs", "several lengths", "Keep one of"),
    ({"train": {"steps": 0}}, "train.steps", "no length", "train.epochs"),
    ({"train": {"deterministic": "yes"}}, "train.deterministic", "is not true or false", "true or false"),
    ({"data": {"source": []}}, "data.source", "names no data", "hub id"),
    ({"data": {"source": [{"sauce": "x", "source": "a"}]}}, "data.source[0].sauce", "not a known key", "Did you mean `source`?"),
    ({"data": {"source": [{"source": "a"}, {"weight": 2}]}}, "data.source[1].source", "is missing", "hub id"),
    ({"data": {"source": [{"source": "a"}, {"source": "b", "weight": -1}]}}, "data.source[1].weight", "out of range", "a number above 0"),
    ({"data": {"source": [{"source": "a", "weight": float("nan")}]}}, "data.source[0].weight", "not finite", "a number above 0"),
    ({"data": {"source": [{"source": "a", "weight": "x"}]}}, "data.source[0].weight", "is not a number", "The default is 1.0"),
    ({"data": {"source": [{"source": "a", "format": "alpacka"}]}}, "data.source[0].format", "not one of", "Did you mean `alpaca`?"),
    ({"data": {"source": ["a.jsonl", {"source": "b"}]}}, "data.source[0]", "is not a source", '{source = "a.jsonl", weight = 1}'),
    ({"data": {"sequence_length": 8}}, "data.sequence_length", "out of range", "from 16 to"),
    ({"model": {"id": ""}}, "model.id", "must not be empty", "hub id"),
    ({"model": {"weights": "random"}}, "model.config", "needs the shape", "model_type"),
    ({"model": {"config": {"model_type": 3}, "parameters": [{"repeat": 0}]}}, "model.parameters", "wrong inside", "Generate"),
]


@pytest.mark.parametrize(("changes", "field", "message", "remedy"), BAD, ids=[f"{field}-{i}" for i, (_, field, _, _) in enumerate(BAD)])
def test_a_wrong_value_is_named_with_message_and_remedy(changes: dict[str, Any], field: str, message: str, remedy: str) -> None:
    (problem,) = problems_in(smallest(**changes))
    assert problem.field == field
    assert message in problem.message
    assert remedy in problem.remedy


def test_the_smallest_tree_is_right() -> None:
    spec = check_tree(smallest())
    assert spec.train.steps == 10
    assert spec.ranks == 1
    assert problems_in(smallest()) == ()


def test_all_problems_are_told_at_once_with_the_file() -> None:
    tree = smallest(offload={"ratio": 2}, train={"epochs": 1, "micro_batch": 0}, gpus=99)
    with pytest.raises(InputError) as caught:
        check_tree(tree, "my.toml")
    assert {problem.field for problem in caught.value.problems} == {"offload.ratio", "train.micro_batch", "train.epochs", "gpus"}
    assert all(problem.file == "my.toml" for problem in caught.value.problems)
    assert "offload.ratio = 2" in str(caught.value)
    assert caught.value.exit_code == 2


def test_an_empty_tree_says_what_is_missing() -> None:
    assert {problem.field for problem in problems_in({})} == {"name", "model", "data", "train.steps"}
    assert {problem.field for problem in problems_in(smallest(model={}, data={}) | {"model": {}, "data": {}})} == {
        "model.id",
        "data.source",
    }


def test_a_benchmark_needs_no_length() -> None:
    assert problems_in(smallest(train={"steps": 0}, benchmark={"measured_steps": 5})) == ()


def test_a_mixture_of_sources_is_taken() -> None:
    spec = check_tree(smallest(data={"source": [{"source": "a.jsonl", "weight": 2}, {"source": "b.jsonl"}]}))
    assert not isinstance(spec.data.source, str)
    assert [(source.source, source.weight) for source in spec.data.source] == [("a.jsonl", 2.0), ("b.jsonl", 1.0)]
