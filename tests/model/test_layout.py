"""The one arithmetic: how states are cut over ranks, sub-groups and devices."""

from __future__ import annotations

import msgspec
import pytest

from so_tui.model.profile import profile_of
from so_tui.model.shape import Parameter, StateLayout, _expand
from so_tui.model.sharding import (
    deepspeed_gpu_sub_groups,
    gpu_sub_groups,
    partition_numel,
    sub_group_slices,
)
from so_tui.spec.run_spec import DataSpec, ModelSpec, OffloadSpec, ParameterBlock, RunSpec, Tensor
from tests.support.layouts import layout_of, on_gpu
from tests.support.problems import rejected

CONFIG = {
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 100,
    "intermediate_size": 33,
}
BLOCKS = (
    ParameterBlock(tensors=(Tensor("embed.weight", (100, 8), True, "embedding"),)),
    ParameterBlock(
        repeat=3,
        tensors=(
            Tensor("layers.{i}.norm.weight", (8,), False, "other"),
            Tensor("layers.{i}.up.weight", (33, 8), True, "linear"),
        ),
    ),
    ParameterBlock(tensors=(Tensor("head.weight", (100, 8), True, "linear", "embed.weight"),)),
)


def spec(
    ratio: float = 0.9,
    sub_group_size: int = 1000,
    mode: str = "superoffload",
    engine: str = "so-tui",
) -> RunSpec:
    return RunSpec(
        name="small",
        model=ModelSpec(id="x", parameters=BLOCKS, config=CONFIG),
        data=DataSpec(source="x"),
        offload=OffloadSpec(mode=mode, ratio=ratio, sub_group_size=sub_group_size, engine=engine),  # type: ignore[arg-type]
    )


def state_layout(given: RunSpec, ranks: int) -> StateLayout:
    return profile_of(given.model).layout(ranks, given.offload)


@pytest.mark.parametrize(
    ("numel", "ranks", "share"), [(8, 1, 8), (8, 4, 2), (9, 4, 3), (1, 4, 1), (0, 4, 0)]
)
def test_a_share_is_rounded_up(numel: int, ranks: int, share: int) -> None:
    assert partition_numel(numel, ranks) == share


def test_sub_groups_cover_the_list_in_order_and_reach_the_size() -> None:
    numels = [5, 1, 7, 2, 2, 9, 1]
    slices = sub_group_slices(numels, 6)
    assert [index for start, stop in slices for index in range(start, stop)] == list(
        range(len(numels))
    )
    assert all(sum(numels[start:stop]) >= 6 for start, stop in slices[:-1])


@pytest.mark.parametrize("ratio", [i / 20 for i in range(21)])
@pytest.mark.parametrize(
    "numels", [[1] * 10, [3, 1, 4, 1, 5, 9, 2, 6], [400_000_000] * 32 + [700_000]]
)
def test_gpu_keeps_what_the_ratio_allows(numels: list[int], ratio: float) -> None:
    kept = gpu_sub_groups(numels, ratio)
    allowed = (1 - ratio) * sum(numels)
    assert sum(numels[:kept]) <= allowed + 1e-6 * sum(numels)
    assert kept == len(numels) or sum(numels[: kept + 1]) > allowed


def test_rounding_is_not_left_to_floating_point() -> None:
    assert gpu_sub_groups([1] * 10, 0.9) == 1
    assert deepspeed_gpu_sub_groups(10, 0.9) == 0
    assert gpu_sub_groups([1] * 10, 0.0) == 10
    assert gpu_sub_groups([1] * 10, 1.0) == 0


def test_the_table_expands_in_order_with_indices_filled_in() -> None:
    names = [tensor.name for tensor in _expand(BLOCKS)]
    assert names[:3] == ["embed.weight", "layers.0.norm.weight", "layers.0.up.weight"]
    assert len(names) == 8


def test_decay_comes_first_and_tied_tensors_count_once() -> None:
    layout = state_layout(spec(), 2)
    assert layout.parameters == 800 + 3 * (8 + 264)
    assert [sub_group.group for sub_group in layout.sub_groups] == ["decay", "no-decay"]
    assert layout.sub_groups[0].names == (
        "embed.weight",
        "layers.0.up.weight",
        "layers.1.up.weight",
        "layers.2.up.weight",
    )
    assert layout.sub_groups[0].numel == 400 + 3 * 132
    assert layout.numel == 796 + 12


def test_state_bytes_by_device() -> None:
    layout = state_layout(spec(ratio=0.5, sub_group_size=1000), 1)
    assert [(sub_group.numel, sub_group.device) for sub_group in layout.sub_groups] == [
        (1064, "cpu"),
        (528, "cpu"),
        (24, "cpu"),
    ]
    layout = state_layout(spec(ratio=0.3, sub_group_size=1000), 1)
    assert on_gpu(layout) == 1
    assert (layout.gpu_numel, layout.cpu_numel) == (1064, 552)


def test_each_mode_follows_its_own_rule() -> None:
    assert state_layout(spec(ratio=0.9, mode="gpu"), 1).cpu_numel == 0
    assert on_gpu(state_layout(spec(ratio=0.6, sub_group_size=1000, mode="zerooffload"), 1)) == 1
    assert on_gpu(state_layout(spec(ratio=0.6, sub_group_size=1000), 1)) == 0
    assert on_gpu(state_layout(spec(ratio=0.6, sub_group_size=1000, engine="deepspeed"), 1)) == 1


def test_more_ratio_never_puts_more_on_the_gpu() -> None:
    parameters = tuple(Parameter(f"p{i}", 1000 + 37 * i, i % 5 != 0) for i in range(60))
    counts = [layout_of(parameters, 2, 4000, ratio / 20).gpu_numel for ratio in range(21)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == layout_of(parameters, 2, 4000, 0.0).numel
    assert counts[-1] == 0


def test_a_spec_without_a_table_is_an_input_error() -> None:
    bare = RunSpec(name="bare", model=ModelSpec(id="x"), data=DataSpec(source="x"))
    with rejected("missing-parameter-table"):
        profile_of(bare.model)


def test_a_profile_is_made_once_for_a_model_and_its_layouts_once() -> None:
    given = spec()
    profile = profile_of(given.model)
    again = profile_of(
        msgspec.structs.replace(given.model, activation_checkpointing="none", config=dict(CONFIG))
    )
    assert again is profile, "recomputation is no property of the model"
    assert profile.layout(2, given.offload) is profile.layout(2, spec().offload)
    assert (
        profile.gpu_numel(2, given.offload, 0.0)
        == profile.layout(2, spec(ratio=0.0).offload).gpu_numel
        > 0
    )


def test_a_profile_knows_the_largest_layer_and_the_tied_head() -> None:
    profile = profile_of(spec().model)
    assert (profile.largest_layer, profile.largest_layer_tensor, profile.largest_parameter) == (
        8 + 264,
        264,
        800,
    )
    assert profile.tied_head
    assert profile.small_parameters == profile.parameters == 800 + 3 * (8 + 264)


def test_forward_uses_sub_groups_by_products() -> None:
    profile = profile_of(spec(sub_group_size=1).model)
    spans = profile.compute_spans(1, 1)
    assert spans[0] == (0.0, 0.0), "the embedding takes no time"
    assert [round(end, 3) for _, end in spans[1:4]] == [0.333, 0.667, 1.0]
