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
from so_tui.spec import RunSpec
from so_tui.spec.run_spec import ParameterBlock
from tests.support.planning import H200, facts_of, long_spec, only, spec_of, step_of
from tests.support.problems import rejected

LONG = 131_072
FULL = {"offload__mode": "superoffload", "model__activation_checkpointing": "full"}
PLAIN = {"model__kernels": "plain"}
HIDDEN, FEED_FORWARD = 2560, 9728
"""Of the 4B shape."""


def block_bytes(tokens: int, tiled: str, **changes: str) -> int:
    spec = long_spec(tokens, offload__mode="superoffload", model__tiled_mlp=tiled, **changes)
    terms = _all_terms(assess(spec, target_of(spec, H200)).placement)
    return sum(term.bytes for term in terms if term.kind == "block-working-set")


@pytest.mark.parametrize("policy", ["full", "attention"])
def test_block_grows_with_the_tile(policy: str) -> None:
    """A tile of norms holds less than one of the feed-forward block, which takes 12 f instead of 10
    f bytes a token.
    """
    given = {"model__activation_checkpointing": policy}
    once, whole = (block_bytes(LONG, value, **given) for value in ("on", "off"))
    assert once < 0.65 * whole
    assert once < block_bytes(2 * LONG, "on", **given) < 2 * once
    small = [block_bytes(MLP_TILE_TOKENS, value, **given) for value in ("on", "off")]
    assert small[0] == small[1]
    tiled_norms, norms = (block_bytes(LONG, value, **PLAIN | given) for value in ("on", "off"))
    assert norms - whole > LONG * 14 * HIDDEN
    assert tiled_norms - once == MLP_TILE_TOKENS * 2 * FEED_FORWARD


def test_larger_tile_of_norms_counts() -> None:
    config = spec_of("qwen3-4b-random").model.config
    shape = architecture(config | {"intermediate_size": HIDDEN})
    tiles = [ModelProfile((), shape, fused, False).tile_bytes for fused in (False, True)]
    assert tiles == [28 * HIDDEN, 10 * HIDDEN]


def added_s(spec: RunSpec) -> tuple[float, float]:
    """Return how much longer backward is with tiles, and how long it is without."""
    tiled, whole = (
        step_of(make_plan(replace(spec, model=replace(spec.model, tiled_mlp=value)), H200))
        for value in ("on", "off")
    )
    assert tiled.forward_s == whole.forward_s
    return tiled.backward_s - whole.backward_s, whole.backward_s


def test_tiles_cost_a_product_in_backward_and_again_the_norms() -> None:
    """Those of several kernels; three products where a norm follows the block."""
    given = long_spec(LONG, **FULL)
    added, backward_s = added_s(given)
    assert 0 < added < 0.03 * backward_s
    assert 1.2 < added_s(long_spec(LONG, **FULL | PLAIN))[0] / added < 3
    renamed = msgspec.json.encode(given.model.parameters).replace(
        b"post_attention_layernorm", b"post_feedforward_layernorm"
    )
    followed = msgspec.json.decode(renamed, type=tuple[ParameterBlock, ...])
    other = replace(given, model=replace(given.model, parameters=followed))
    assert added_s(other)[0] == pytest.approx(3 * added)


def test_they_are_proposed_where_only_they_make_a_length_fit() -> None:
    long = recommend(long_spec(524_288), H200)
    assert (long.verdict, only(long.reasons, MlpTiled).tile_tokens) == ("fits", MLP_TILE_TOKENS)
    assert facts_of(long.reasons, InputsOnHost)
    stays = {"model__activation_offload": "off", "model__tiled_mlp": "off"}
    assert recommend(long_spec(524_288, **stays), H200).verdict == "does not fit"
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
