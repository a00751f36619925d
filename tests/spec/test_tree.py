"""Changing a spec by dotted keys, and combining trees."""

from __future__ import annotations

import pytest

from so_tui.spec import (
    DataSource,
    InputError,
    RunSpec,
    check_tree,
    field_index,
    find_preset,
    parse_value,
    spec_tree,
    with_values,
)
from so_tui.spec.merge import merged
from so_tui.spec.run_spec import MACHINE_DECIDES
from tests.support.problems import refusal, rejected
from tests.support.trees import smallest


@pytest.fixture
def spec() -> RunSpec:
    return check_tree(smallest())


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("offload.ratio", "0.5", 0.5),
        ("offload.sub_group_size", "4e8", 400_000_000),
        ("train.deterministic", "true", True),
        ("data.source", "my/rows.jsonl", "my/rows.jsonl"),
        (
            "data.source",
            '[{source = "a", weight = 3.0}, {source = "b"}]',
            (DataSource(source="a", weight=3.0), DataSource(source="b", weight=1.0)),
        ),
        ("model.revision", "2024", "2024"),
        ("title", '"A title, with a comma"', "A title, with a comma"),
        ("model.tokenizer", "", ""),
        ("gpus", "0,1,3", (0, 1, 3)),
        ("gpus", "2, ", (2,)),
        ("gpus", "[0, 2]", (0, 2)),
        ("model.leaf_modules", "A,B", ("A", "B")),
    ],
)
def test_values_are_toml_or_text(spec: RunSpec, key: str, text: str, value: object) -> None:
    section, _, name = key.rpartition(".")
    changed = with_values(spec, {key: text})
    assert getattr(getattr(changed, section) if section else changed, name) == value


@pytest.mark.parametrize(
    ("key", "value"), [("steps", "7"), ("epochs", "0.5"), ("tokens", "1_000_000")]
)
def test_setting_one_length_clears_the_others(spec: RunSpec, key: str, value: str) -> None:
    train = with_values(with_values(spec, {"train.epochs": "3"}), {f"train.{key}": value}).train
    assert [name for name in ("steps", "epochs", "tokens") if getattr(train, name)] == [key]
    with rejected("several-lengths", field="train.tokens"):
        with_values(spec, {"train.steps": "5", "train.tokens": "100"})


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("offload.ration", "Did you mean `offload.ratio`?"),
        ("train", "`train` is a section"),
        ("train.step", "Did you mean `train.steps`?"),
        ("optimizer.lr", "Did you mean `train.learning_rate`?"),
        ("batch_size", "Did you mean `train.micro_batch`?"),
        ("model.parameters", "docs/presets.md"),
    ],
)
def test_an_unknown_key_names_the_nearest(spec: RunSpec, key: str, remedy: str) -> None:
    problem = refusal(lambda: with_values(spec, {key: "1"}))
    assert (problem.code, problem.field) == ("unknown-key", key)
    assert remedy in problem.remedy


def test_a_problem_shows_the_value_as_typed(spec: RunSpec) -> None:
    told = r"offload\.ratio = 1\.4: is out of range\. Give a number from 0 to 1"
    with pytest.raises(InputError, match=told):
        with_values(spec, {"offload.ratio": "1.4"})


GROUPED = ("16,384", "16_384", "16 384", "16\u202f384")


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        *(("data.sequence_length", text, 16_384) for text in GROUPED),
        ("train.tokens", " 1,234,567 ", 1_234_567),
        ("offload.speculation_gib", "1,024.5", 1024.5),
    ],
)
def test_numbers_may_be_grouped_as_they_are_shown(path: str, text: str, value: float) -> None:
    assert parse_value(text, field_index()[path]) == value


@pytest.mark.parametrize(
    "text", ["1,5", "16,38", "16,3844", ",384", "16,384_000", "1,,000", "4 4", "16,384,"]
)
def test_what_is_no_grouped_number_stays_an_error(spec: RunSpec, text: str) -> None:
    problem = refusal(lambda: with_values(spec, {"data.sequence_length": text}))
    assert problem.field == "data.sequence_length"
    assert parse_value("1,234", field_index()["gpus"]) == [1, 234], "a list"


def test_text_is_never_run_or_split() -> None:
    assert parse_value("$(rm -rf x); a = 1\nb = 2", None) == "$(rm -rf x); a = 1\nb = 2"


def test_a_new_architecture_drops_the_table_of_the_old_one() -> None:
    spec = find_preset("tiny").spec
    same, other = (
        with_values(spec, {"model.config.num_hidden_layers": layers}).model for layers in "62"
    )
    assert other.config == spec.model.config | {"num_hidden_layers": 2}
    assert other.parameters == ()
    assert same.parameters == spec.model.parameters != ()


@pytest.mark.parametrize(
    ("changes", "split"),
    [
        ({"data.source": "rows.jsonl"}, "train"),
        ({"data.source": "rows.jsonl", "data.split": "train[:5%]"}, "train[:5%]"),
        ({"data.source": "tatsu-lab/alpaca"}, "train[:10%]"),
        ({"data.packing": "false"}, "train[:10%]"),
    ],
)
def test_another_source_clears_what_described_the_one_before(
    changes: dict[str, str], split: str
) -> None:
    """Of one's own rows all are trained on, although a preset takes a tenth of its own."""
    preset = find_preset("qwen3-14b").spec
    assert (preset.data.source, preset.data.split) == ("tatsu-lab/alpaca", "train[:10%]")
    assert with_values(preset, changes).data.split == split


def test_a_length_that_a_person_sets_replaces_that_of_a_benchmark() -> None:
    preset = find_preset("qwen3-4b-random").spec
    assert preset.benchmark.measured_steps == 7
    longer = with_values(preset, {"train.steps": "40"})
    assert (longer.train.steps, longer.benchmark.measured_steps) == (40, 0)
    assert with_values(preset, {"train.seed": "1"}).benchmark == preset.benchmark
    both = with_values(preset, {"train.steps": "40", "benchmark.measured_steps": "37"})
    assert both.benchmark.measured_steps == 37


@pytest.mark.parametrize("name", ["tiny", "qwen3-30b-a3b"])
def test_a_tree_goes_back_to_the_same_spec(name: str, spec: RunSpec) -> None:
    """A tree for people leaves out defaults."""
    preset = find_preset(name).spec
    assert check_tree(spec_tree(preset)) == preset
    assert spec_tree(spec) == smallest()
    assert not {"config", "parameters"} & spec_tree(preset, full=False)["model"].keys()


def test_merging_changes_neither_tree() -> None:
    base, changes = smallest(), {"train": {"epochs": 2}}
    assert merged(base, changes)["train"] == {"epochs": 2}
    assert base == smallest()
    assert changes == {"train": {"epochs": 2}}


@pytest.mark.parametrize(
    ("micro_batch", "ranks", "target", "steps"),
    [(4, 1, 131_072, 8), (4, 2, 131_072, 4), (4, 1, 100_000, 6), (4, 1, 1, 1), (3, 1, 0, 1)],
)
def test_tokens_per_step_choose_the_nearest_accumulation(
    spec: RunSpec, micro_batch: int, ranks: int, target: int, steps: int
) -> None:
    changes = {"data.sequence_length": "4096", "gpus": str(ranks)}
    changes |= {"train.micro_batch": str(micro_batch), "train.tokens_per_step": str(target)}
    assert with_values(spec, changes).gradient_accumulation_steps == steps


def test_target_of_tokens_replaces_accumulation(spec: RunSpec) -> None:
    accumulating = with_values(spec, {"train.gradient_accumulation": "4"})
    aimed = with_values(accumulating, {"train.tokens_per_step": "131072"})
    assert (aimed.train.gradient_accumulation, aimed.train.tokens_per_step) == (1, 131_072)
    assert with_values(aimed, {"train.gradient_accumulation": "2"}).train.tokens_per_step == 0
    with rejected("several-step-sizes"):
        with_values(spec, {"train.gradient_accumulation": "2", "train.tokens_per_step": "131072"})


@pytest.mark.parametrize(
    ("values", "fixed"),
    [
        ({"offload.ratio": "0.9"}, ("offload.ratio",)),
        ({"gpus": "2", "train.seed": "7"}, ("gpus",)),
        ({"offload.mode": "gpu", "checkpoint.keep": "2"}, ("offload.mode", "checkpoint.keep")),
        ({"model.tiled_mlp": "auto", "offload.ratio": "auto"}, ()),
        ({"fixed": "offload.states,gpus"}, ("gpus", "offload.states")),
    ],
)
def test_a_value_that_a_person_sets_is_fixed(
    spec: RunSpec, values: dict[str, str], fixed: tuple[str, ...]
) -> None:
    """Even one that is the default."""
    assert with_values(spec, values).fixed == fixed


def test_auto_leaves_a_value_to_the_machine_again(spec: RunSpec) -> None:
    given = {"offload.ratio": "0.5", "offload.states": "int8-moments", "gpus": "4"}
    mine = with_values(spec, given | {"train.micro_batch": "2", "train.gradient_accumulation": "8"})
    assert len(mine.fixed) == 5
    again = with_values(mine, dict.fromkeys(("offload.ratio", "offload.states", "gpus"), "auto"))
    assert again.fixed == ("train.micro_batch", "train.gradient_accumulation")
    assert again.offload == spec.offload
    assert again.gpus == 4, "what the search begins with"
    split = with_values(mine, {"train.micro_batch": "auto"})
    assert not split.fixes("train.micro_batch", "train.gradient_accumulation")
    assert (split.train.micro_batch, split.train.gradient_accumulation) == (2, 8)
    aimed = with_values(mine, {"train.tokens_per_step": "131072"})
    assert not aimed.fixes("train.gradient_accumulation")
    assert aimed.fixes("train.micro_batch")


def test_every_key_that_the_machine_decides_can_be_left_to_it(spec: RunSpec) -> None:
    assert set(MACHINE_DECIDES) <= field_index().keys()
    opened = with_values(spec, dict.fromkeys(MACHINE_DECIDES, "auto"))
    assert opened == spec
    with rejected("wrong-type"):
        with_values(spec, {"offload.sub_group_size": "auto"})
    with rejected("invalid-content"):
        with_values(spec, {"fixed": '["train.seed"]'})
