"""How states are cut over ranks, sub-groups and devices: by one arithmetic, DeepSpeed's."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from so_tui.model.profile import StateLayout, _sub_groups_on_gpu, compute_spans, profile_of
from so_tui.model.sharding import gpu_sub_groups, partition_numel, sub_group_slices
from so_tui.spec.run_spec import ModelSpec, OffloadSpec, ParameterBlock, Tensor
from tests.support.problems import rejected

CONFIG = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 3, "vocab_size": 100}
CONFIG |= {"intermediate_size": 33}
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


def on_gpu(layout: StateLayout) -> int:
    return len(layout.sub_groups) - len(layout.cpu_groups)


def model(**changes: object) -> ModelSpec:
    return ModelSpec(id="x", parameters=BLOCKS, config=dict(CONFIG), **changes)  # type: ignore[arg-type]


def offload(ratio: float = 0.9, sub_group_size: int = 1000, **changes: object) -> OffloadSpec:
    settings = {"mode": "superoffload", "engine": "so-tui"} | changes
    return OffloadSpec(ratio=ratio, sub_group_size=sub_group_size, **settings)  # type: ignore[arg-type]


def state_layout(ranks: int, given: OffloadSpec) -> StateLayout:
    return profile_of(model()).layout(ranks, given)


@pytest.mark.parametrize(
    "numels", [[1] * 10, [3, 1, 4, 1, 5, 9, 2, 6], [400_000_000] * 32 + [700_000]]
)
def test_gpu_keeps_what_the_ratio_allows(numels: list[int]) -> None:
    for ratio in (step / 20 for step in range(21)):
        kept = gpu_sub_groups(numels, ratio)
        allowed = (1 - ratio) * sum(numels)
        assert sum(numels[:kept]) <= allowed + 1e-6 * sum(numels)
        assert kept == len(numels) or sum(numels[: kept + 1]) > allowed


def test_rounding_is_not_left_to_floating_point() -> None:
    assert gpu_sub_groups([1] * 10, 0.9) == 1
    assert _sub_groups_on_gpu([1] * 10, 0.9, "deepspeed") == 0
    assert gpu_sub_groups([1] * 10, 0.0) == 10
    assert gpu_sub_groups([1] * 10, 1.0) == 0


def test_decay_comes_first_and_tied_tensors_count_once() -> None:
    layout = state_layout(2, offload())
    (decay, matrices, numel), (rest, *_) = (
        (sub_group.decay, sub_group.names, sub_group.numel) for sub_group in layout.sub_groups
    )
    layers = [f"layers.{layer}.up.weight" for layer in range(3)]
    assert decay
    assert not rest
    assert matrices == ("embed.weight", *layers)
    assert (numel, layout.numel) == (400 + 3 * 132, 796 + 12)


def test_state_bytes_by_device() -> None:
    layout = state_layout(1, offload(0.5))
    found = [(sub_group.numel, sub_group.device) for sub_group in layout.sub_groups]
    assert found == [(1064, "cpu"), (528, "cpu"), (24, "cpu")]
    layout = state_layout(1, offload(0.3))
    assert (on_gpu(layout), layout.gpu_numel, layout.cpu_numel) == (1, 1064, 552)


def test_each_mode_follows_its_own_rule() -> None:
    assert state_layout(1, offload(mode="gpu")).cpu_numel == 0
    assert on_gpu(state_layout(1, offload(0.6))) == 0
    for theirs in (offload(0.6, mode="zerooffload"), offload(0.6, engine="deepspeed")):
        assert on_gpu(state_layout(1, theirs)) == 1


def test_a_spec_without_a_table_is_an_input_error() -> None:
    with rejected("missing-parameter-table"):
        profile_of(ModelSpec(id="x"))


def test_a_profile_knows_the_largest_layer_and_the_tied_head() -> None:
    profile = profile_of(model())
    largest = profile.largest_layer, profile.largest_layer_tensor, profile.largest_parameter
    assert largest == (8 + 264, 264, 800)
    assert profile.tied_head
    assert profile.small_parameters == profile.parameters == 800 + 3 * (8 + 264)


def test_forward_uses_sub_groups_by_products() -> None:
    profile = profile_of(model())
    spans = compute_spans(profile, 1, 1)
    assert spans[0] == (0.0, 0.0), "the embedding takes no time"
    assert [round(end, 3) for _, end in spans[1:4]] == [0.333, 0.667, 1.0]


def deepspeed_cut(optimizer_class: type, numels: list[int], sub_group_size: int) -> list[list[int]]:
    optimizer = SimpleNamespace(
        sub_group_size=sub_group_size, sub_group_to_param_num={}, max_grad_numel=0
    )
    shares = [SimpleNamespace(partition_numel=lambda numel=numel: numel) for numel in numels]
    groups = optimizer_class._create_fp16_sub_groups(optimizer, shares)  # type: ignore[attr-defined]
    return [[share.partition_numel() for share in group] for group in groups]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("zero.stage3", "DeepSpeedZeroOptimizer_Stage3"),
        ("superoffload.superoffload_stage3", "SuperOffloadOptimizer_Stage3"),
    ],
)
def test_sub_groups_are_those_of_deepspeed(module: str, name: str) -> None:
    theirs = getattr(pytest.importorskip(f"deepspeed.runtime.{module}"), name)
    for ranks in (1, 2, 3, 4):
        chance = random.Random(ranks)
        for size in (1, 64, 1000, 4096, 10**9):
            numels = [
                partition_numel(chance.choice((7, 64, 640, 1000, 4096)), ranks)
                for _ in range(chance.randrange(1, 40))
            ]
            ours = [numels[start:stop] for start, stop in sub_group_slices(numels, size)]
            assert ours == deepspeed_cut(theirs, numels, size)


def test_a_partition_of_a_real_parameter_has_the_size_we_say() -> None:
    theirs = pytest.importorskip("deepspeed.runtime.zero.partition_parameters").Init
    for ranks in (1, 2, 3, 4):
        init: Any = SimpleNamespace(_partition_world_size=lambda _, ranks=ranks: ranks)
        init._padding_size = partial(theirs._padding_size, init)
        for numel in (1, 7, 8, 9, 1000):
            aligned = theirs._aligned_size(init, SimpleNamespace(ds_numel=numel))
            assert aligned // ranks == partition_numel(numel, ranks)
