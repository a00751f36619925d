"""The cut is DeepSpeed's own: the same lists through the grouping functions of its two stage-3
optimizers.
"""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from so_tui.model.sharding import partition_numel, sub_group_slices

stage3 = pytest.importorskip("deepspeed.runtime.zero.stage3")
superoffload = pytest.importorskip("deepspeed.runtime.superoffload.superoffload_stage3")
Init = pytest.importorskip("deepspeed.runtime.zero.partition_parameters").Init


def deepspeed_cut(optimizer_class: type, numels: list[int], sub_group_size: int) -> list[list[int]]:
    optimizer = SimpleNamespace(
        sub_group_size=sub_group_size, sub_group_to_param_num={}, max_grad_numel=0
    )
    shares = [SimpleNamespace(partition_numel=lambda numel=numel: numel) for numel in numels]
    groups = optimizer_class._create_fp16_sub_groups(optimizer, shares)  # type: ignore[attr-defined]
    return [[share.partition_numel() for share in group] for group in groups]


@pytest.mark.parametrize(
    "optimizer_class",
    [stage3.DeepSpeedZeroOptimizer_Stage3, superoffload.SuperOffloadOptimizer_Stage3],
)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_sub_groups_are_those_of_deepspeed(optimizer_class: type, ranks: int) -> None:
    chance = random.Random(ranks)
    for sub_group_size in (1, 64, 1000, 4096, 10**9):
        numels = [
            partition_numel(chance.choice((7, 64, 640, 1000, 4096)), ranks)
            for _ in range(chance.randrange(1, 40))
        ]
        ours = [numels[start:stop] for start, stop in sub_group_slices(numels, sub_group_size)]
        assert ours == deepspeed_cut(optimizer_class, numels, sub_group_size)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_partition_of_a_real_parameter_has_the_size_we_say(ranks: int) -> None:
    init: Any = SimpleNamespace(_partition_world_size=lambda _: ranks)
    init._padding_size = partial(Init._padding_size, init)
    for numel in (1, 7, 8, 9, 1000):
        aligned = Init._aligned_size(init, SimpleNamespace(ds_numel=numel))
        assert aligned // ranks == partition_numel(numel, ranks)
