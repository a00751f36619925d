"""Feed-forward blocks in tiles of tokens: what plans count for them, and when they are proposed."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from so_tui.model.profile import MLP_TILE_TOKENS, ModelProfile
from so_tui.model.shape import architecture
from so_tui.plan.fit import assess, target_of
from so_tui.plan.gpu_memory import _all_terms
from so_tui.plan.notes import InputsOnHost, MlpTiled
from so_tui.plan.planner import make_plan, recommend
from so_tui.spec.run_spec import ParameterBlock
from tests.support.machines import x86
from tests.support.planning import facts_of, long_spec, only, spec_of, step_of
from tests.support.problems import rejected

H200 = x86("NVIDIA H200")
LONG = 131_072
FULL = {"offload__mode": "superoffload", "model__activation_checkpointing": "full"}
HIDDEN, FEED_FORWARD = 2560, 9728
"""Of the 4B shape."""


def block_bytes(tokens: int, tiled: str, **changes: str) -> int:
    spec = long_spec(tokens, offload__mode="superoffload", model__tiled_mlp=tiled, **changes)
    terms = _all_terms(assess(spec, target_of(spec, H200)).placement)
    return sum(term.bytes for term in terms if term.kind == "block-working-set")


@pytest.mark.parametrize("policy", ["full", "attention"])
def test_block_grows_with_the_tile(
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
def test_norms_cost_no_more_outside_their_tile(
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


def test_larger_tile_of_norms_counts() -> None:
    config = spec_of("qwen3-4b-random").model.config
    shape = architecture(config | {"intermediate_size": HIDDEN})
    assert ModelProfile((), shape, False, False).tile_bytes == 28 * HIDDEN
    assert ModelProfile((), shape, True, False).tile_bytes == 10 * HIDDEN


def test_tiles_cost_a_product_in_backward_and_again_the_norms() -> None:
    """Those of several kernels."""
    added = []
    for changes in ({}, {"model__kernels": "plain"}):
        tiled, whole = (
            step_of(make_plan(long_spec(LONG, model__tiled_mlp=value, **FULL, **changes), H200))
            for value in ("on", "off")
        )
        added.append(tiled.backward_s - whole.backward_s)
        assert tiled.forward_s == whole.forward_s
        assert 0 < added[-1] < 0.06 * whole.backward_s
    assert added[0] < 0.03 * whole.backward_s
    assert 1.2 < added[1] / added[0] < 3


def test_they_cost_three_products_where_a_norm_follows() -> None:
    given = long_spec(LONG, **FULL)
    renamed = msgspec.json.encode(given.model.parameters).replace(
        b"post_attention_layernorm", b"post_feedforward_layernorm"
    )
    followed = msgspec.json.decode(renamed, type=tuple[ParameterBlock, ...])
    added = []
    for blocks in (given.model.parameters, followed):
        tiled, whole = (
            replace(given, model=replace(given.model, parameters=blocks, tiled_mlp=value))
            for value in ("on", "off")
        )
        added.append(
            step_of(make_plan(tiled, H200)).backward_s - step_of(make_plan(whole, H200)).backward_s
        )
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
def test_nothing_to_cut_without_a_dense_block(preset: str, changes: dict[str, str]) -> None:
    with rejected("nothing-to-tile"):
        long_spec(LONG, preset, model__tiled_mlp="on", **changes)
    assert recommend(long_spec(1_048_576, preset, **changes), H200).spec.model.tiled_mlp == "auto"
