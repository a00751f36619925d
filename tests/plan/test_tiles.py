"""Feed-forward blocks in tiles of tokens: what plans count for them, and when they are proposed."""

from __future__ import annotations

import msgspec
import pytest

from so_tui.model.profile import MLP_TILE_TOKENS, tile_bytes
from so_tui.model.shape import architecture
from so_tui.plan.fit import assess, target_of
from so_tui.plan.gpu_memory import _all_terms
from so_tui.plan.notes import InputsOnHost, MlpTiled
from so_tui.plan.planner import make_plan, recommend
from so_tui.spec import InputError, RunSpec
from so_tui.spec.run_spec import ParameterBlock
from tests.support.machines import x86
from tests.support.planning import facts_of, only, spec_of

H200 = x86("NVIDIA H200")
LONG = 131_072
HIDDEN, FEED_FORWARD = 2560, 9728
"""Of the 4B shape."""


def long_spec(tokens: int, preset: str = "qwen3-4b-random", **changes: str) -> RunSpec:
    one = {
        "gpus": "1",
        "train__micro_batch": "1",
        "train__gradient_accumulation": "1",
        "data__sequence_length": str(tokens),
    }
    return spec_of(preset, **one | changes)


def block_bytes(tokens: int, tiled: str, **changes: str) -> int:
    spec = long_spec(tokens, offload__mode="superoffload", model__tiled_mlp=tiled, **changes)
    terms = _all_terms(assess(spec, target_of(spec, H200)).placement)
    return sum(term.bytes for term in terms if term.kind == "block-working-set")


@pytest.mark.parametrize("policy", ["full", "attention"])
def test_a_block_grows_with_the_tile_and_not_with_the_sequence_in_its_feed_forward(
    policy: str,
) -> None:
    given = {"model__activation_checkpointing": policy}
    assert block_bytes(LONG, "on", **given) < 0.65 * block_bytes(LONG, "off", **given)
    once, twice = (block_bytes(tokens, "on", **given) for tokens in (LONG, 2 * LONG))
    assert once < twice < 2 * once
    assert block_bytes(MLP_TILE_TOKENS, "on", **given) == block_bytes(
        MLP_TILE_TOKENS, "off", **given
    )


@pytest.mark.parametrize("policy", ["full", "attention"])
def test_norms_of_several_kernels_cost_no_more_than_fused_ones_outside_their_tile(
    policy: str,
) -> None:
    """A tile of them holds less than one of the feed-forward block, which takes 12 f instead of 10
    f bytes a token.
    """
    given = {"model__activation_checkpointing": policy}
    whole, tiled = (
        block_bytes(LONG, value, model__kernels="plain", **given)
        - block_bytes(LONG, value, **given)
        for value in ("off", "on")
    )
    assert whole > LONG * 14 * HIDDEN
    assert tiled == MLP_TILE_TOKENS * 2 * FEED_FORWARD


def test_a_tile_of_norms_counts_where_it_is_larger_than_that_of_the_feed_forward_block() -> None:
    config = spec_of("qwen3-4b-random").model.config
    shape = architecture(config | {"intermediate_size": HIDDEN})
    assert tile_bytes(shape, fused=False) == 28 * HIDDEN
    assert tile_bytes(shape, fused=True) == 10 * HIDDEN


def test_norms_of_several_kernels_are_computed_again_in_backward() -> None:
    given = {"offload__mode": "superoffload", "model__activation_checkpointing": "full"}
    added = []
    for changes in ({}, {"model__kernels": "plain"}):
        tiled, whole = (
            make_plan(long_spec(LONG, model__tiled_mlp=value, **given, **changes), H200).step
            for value in ("on", "off")
        )
        assert tiled is not None
        assert whole is not None
        added.append(tiled.backward_s - whole.backward_s)
    assert 1.2 < added[1] / added[0] < 3


def test_tiles_cost_a_product_in_backward() -> None:
    given = {"offload__mode": "superoffload", "model__activation_checkpointing": "full"}
    tiled, whole = (
        make_plan(long_spec(LONG, model__tiled_mlp=value, **given), H200).step
        for value in ("on", "off")
    )
    assert tiled is not None
    assert whole is not None
    assert tiled.forward_s == whole.forward_s
    assert 1 < tiled.backward_s / whole.backward_s < 1.03


def test_they_cost_all_three_products_where_a_norm_follows_the_block() -> None:
    given = long_spec(LONG, offload__mode="superoffload", model__activation_checkpointing="full")
    renamed = msgspec.json.encode(given.model.parameters).replace(
        b"post_attention_layernorm", b"post_feedforward_layernorm"
    )
    followed = msgspec.json.decode(renamed, type=tuple[ParameterBlock, ...])
    added = []
    for blocks in (given.model.parameters, followed):
        steps = []
        for tiled in ("on", "off"):
            model = msgspec.structs.replace(given.model, parameters=blocks, tiled_mlp=tiled)
            step = make_plan(msgspec.structs.replace(given, model=model), H200).step
            assert step is not None
            steps.append(step.backward_s)
        added.append(steps[0] - steps[1])
    assert added[0] > 0
    assert added[1] == pytest.approx(3 * added[0])


def test_they_are_proposed_where_only_they_make_a_length_fit() -> None:
    long = recommend(long_spec(524_288), H200)
    assert (long.verdict, only(long.reasons, MlpTiled).tile_tokens) == ("fits", MLP_TILE_TOKENS)
    assert facts_of(long.reasons, InputsOnHost)
    alone = recommend(
        long_spec(524_288, model__activation_offload="off", model__tiled_mlp="off"), H200
    )
    assert alone.verdict == "does not fit"
    short = recommend(long_spec(16_384), H200)
    assert (short.verdict, short.spec.model.tiled_mlp) == ("fits", "auto")


@pytest.mark.parametrize(
    ("preset", "changes"),
    [("qwen3-30b-a3b", {}), ("qwen3-4b-random", {"model__activation_checkpointing": "selective"})],
)
def test_without_a_dense_block_that_is_recomputed_there_is_nothing_to_cut(
    preset: str, changes: dict[str, str]
) -> None:
    with pytest.raises(InputError) as caught:
        long_spec(LONG, preset, model__tiled_mlp="on", **changes)
    assert [problem.code for problem in caught.value.problems] == ["nothing-to-tile"]
    assert recommend(long_spec(1_048_576, preset, **changes), H200).spec.model.tiled_mlp == "auto"
