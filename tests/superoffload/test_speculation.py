"""Stepping before the gradient norm is known has the bits of holding back, whatever the norm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import superoffload
from so_tui.model.sharding import speculating
from superoffload.steps import REMEMBERED, Speculation
from superoffload.transfers import Event
from superoffload.worker import Command, Operation
from tests.support import engine as support
from tests.support.reference_adamw import Reference, core_of

pytestmark = pytest.mark.slow

ALL = 1 << 30
"""Bytes that let every sub-group of the small model speculate."""


LIMIT = {1: 10.7, 4: 7.1}
"""A norm that half of the small model's first steps exceed, by accumulation steps."""


def trained(
    run: Any,
    data: list[torch.Tensor],
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
    **settings: Any,
) -> tuple[Any, ...]:
    """Train; return losses, states and stats. What is held back is compared with float32 AdamW."""
    accumulation = run.train.gradient_accumulation
    with support.engine(run, dtype, **settings) as made:
        reference = None if settings else Reference(made, run.train.gradient_clipping)
        losses = []
        for step in range(len(data) // accumulation):
            rate = 1e-2 / (1 + step)
            superoffload.set_learning_rate(made, rate)
            losses += support.train(made, data[step * accumulation : (step + 1) * accumulation])
            if reference:
                assert superoffload.gradient_norm(made) == pytest.approx(
                    reference.step(rate), rel=1e-6
                )
        superoffload.synchronize(made)
        if reference:
            reference.assert_same_states(made)
        return losses, support.states(made, folder), superoffload.stats(made)


@pytest.mark.parametrize(
    ("accumulation", "ratio", "dtype", "steps"),
    [
        (1, 1.0, torch.bfloat16, 24),
        (1, 0.5, torch.float32, 40),
        (4, 1.0, torch.float32, 14),
        (4, 0.5, torch.bfloat16, 40),
    ],
)
def test_speculation_has_the_bits_of_steps_that_are_held_back(
    accumulation: int, ratio: float, dtype: torch.dtype, steps: int, tmp_path: Path
) -> None:
    run = support.spec(
        "superoffload", ratio, clipping=LIMIT[accumulation], accumulation=accumulation
    )
    data = support.batches(steps * accumulation)
    held = trained(run, data, tmp_path / "held", dtype)
    early = trained(run, data, tmp_path / "early", dtype, speculation_bytes=ALL)
    assert early[:2] == held[:2]
    assert (held[2].kept_steps, held[2].redone_steps) == (0, 0)
    assert early[2].kept_steps >= 3
    assert early[2].redone_steps >= REMEMBERED


@pytest.mark.parametrize("share", [0.0, 0.4, 0.8])
def test_the_rest_is_held_back_where_memory_is_short(share: float, tmp_path: Path) -> None:
    run = support.spec("superoffload", 1.0, clipping=12.0)
    data = support.batches(12)
    with support.engine(run) as made:
        numel = sum(group.weights.numel() for group in core_of(made).sub_groups)
    expected = trained(run, data, tmp_path / "held")
    found = trained(run, data, tmp_path / "some", speculation_bytes=int(share * 14 * numel))
    assert found[:2] == expected[:2]
    assert bool(found[2].kept_steps) == bool(share)


def test_what_speculates_is_spread_as_far_as_memory_goes() -> None:
    assert speculating([10] * 8, 40) == (1, 3, 5, 7)
    assert speculating([10] * 8, 79) == (1, 2, 3, 4, 5, 6, 7)
    assert speculating([10] * 8, 80) == tuple(range(8))
    assert speculating([10, 20, 5, 30], 64) == (1, 2, 3)
    assert speculating([50, 20, 5], 30) == (1, 2)
    assert speculating([10], 9) == speculating([], 9) == ()


@pytest.mark.parametrize(("ranks", "speculates"), [(1, True), (2, True), (4, False)])
def test_the_ranks_of_a_host_share_what_they_all_find_available(
    ranks: int, speculates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher starts them at once, and each sees all of the host's memory."""
    with support.engine(support.spec("superoffload", 1.0)) as made:
        numel = sum(group.weights.numel() for group in core_of(made).sub_groups)
    for_two = 2 * (28 * numel + (17 << 20))
    monkeypatch.setenv("LOCAL_SIZE", str(ranks))
    settings: dict[str, Any] = {
        "speculation_bytes": 1 << 40,
        "copies_bytes": 1 << 40,
        "available_bytes": lambda: for_two,
    }
    with support.engine(support.spec("superoffload", 1.0, clipping=1e6), **settings) as made:
        assert bool(core_of(made).cpu.speculating) == speculates
        support.train(made, support.batches(1))


def test_weights_are_restored_after_the_last_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the copy would overwrite the weights in the staging buffer."""
    with support.engine(
        support.spec("superoffload", 1.0, clipping=1e6), speculation_bytes=ALL, max_skipped_steps=1
    ) as made:
        core = core_of(made)
        support.train(made, support.batches(2))
        copied, waited_for = {}, {}
        update = core.cpu._update

        def recording(command: Command, after: Event) -> None:
            if command.operation == Operation.RESTORE:
                index = command.sub_group
                copied[index], waited_for[index] = core.cpu._gradients[index].copied, after
            update(command, after)

        monkeypatch.setattr(core.cpu, "_update", recording)
        support.poison(made)
        support.train(made, support.batches(1))
        assert waited_for
        assert all(waited_for[index] is copied[index] for index in waited_for)


@pytest.mark.parametrize(
    ("accumulation", "speculation_bytes"), [(1, ALL), (1, 0), (2, 0), (2, ALL)]
)
def test_a_step_that_is_not_finite_might_never_have_been(
    accumulation: int, speculation_bytes: int, tmp_path: Path
) -> None:
    run = support.spec("superoffload", 0.8, clipping=5.0, accumulation=accumulation)
    data = support.batches(8 * accumulation)
    settings: dict[str, Any] = {"speculation_bytes": speculation_bytes, "max_skipped_steps": 1}
    with support.engine(run, **settings) as made:
        support.train(made, data)
        expected = support.states(made, tmp_path / "without")
    with support.engine(run, **settings) as made:
        support.train(made, data[: 4 * accumulation])
        hook = support.poison(made)
        support.train(made, support.batches(accumulation, seed=9))
        hook.remove()
        assert made.skipped_steps == 1
        skipped = core_of(made).skipped
        assert skipped is not None
        assert (skipped.step, skipped.sub_group, skipped.poisoned) == (5, 0, False)
        support.train(made, data[4 * accumulation :])
        assert superoffload.stats(made).skipped_steps == 1
        assert core_of(made).skipped is None
        assert support.states(made, tmp_path / "with") == expected


def test_too_many_skipped_steps_end_the_run_with_sound_states(tmp_path: Path) -> None:
    with support.engine(
        support.spec("superoffload", 0.8, clipping=5.0), speculation_bytes=ALL, max_skipped_steps=2
    ) as made:
        support.train(made, support.batches(3))
        before = support.states(made, tmp_path / "before")
        hook = support.poison(made)
        support.train(made, support.batches(2))
        hook.remove()
        support.train(made, support.batches(1))  # they are no longer in a row
        taken = support.states(made, tmp_path / "taken")
        assert taken != before
        support.poison(made)
        support.train(made, support.batches(2))
        with pytest.raises(superoffload.NonFiniteGradientError) as caught:
            support.train(made, support.batches(1))
        assert not caught.value.poisoned
        assert support.states(made, tmp_path / "after") == taken


def test_a_saved_state_is_that_of_the_set_that_was_accepted(tmp_path: Path) -> None:
    """After an odd and an even number of accepted steps; DeepSpeed's weights are its cast."""
    run = support.spec("superoffload", 1.0, clipping=1e6)
    with support.engine(run, speculation_bytes=ALL) as made:
        for step in range(2):
            support.train(made, support.batches(1, seed=step))
            saved = support.states(made, tmp_path / str(step))
            with support.engine(run, speculation_bytes=ALL if step % 2 else 0) as other:
                superoffload.load_state(other, tmp_path / str(step))
                assert support.states(other, tmp_path / f"again-{step}") == saved
            for index, master_weights in enumerate(made.optimizer.fp32_partitioned_groups_flat):
                assert torch.equal(
                    made.optimizer.fp16_partitioned_groups_flat[index], master_weights.bfloat16()
                )
        assert superoffload.stats(made).kept_steps == 2


def test_speculation_pauses_while_the_limit_is_exceeded() -> None:
    found = Speculation()
    assert found.is_worthwhile
    for _ in range(REMEMBERED):
        assert found.is_worthwhile
        found.record(within=False, speculated=True)
    assert not found.is_worthwhile
    found.record(within=False, speculated=False)
    assert not found.is_worthwhile
    found.record(within=True, speculated=False)
    assert found.is_worthwhile
    assert (found.kept, found.redone) == (0, REMEMBERED)


def test_the_engine_stops_speculating_and_begins_again() -> None:
    with support.engine(
        support.spec("superoffload", 1.0, clipping=1e-6), speculation_bytes=ALL
    ) as made:
        core = core_of(made)
        support.train(made, support.batches(REMEMBERED + 3))
        assert superoffload.stats(made).redone_steps == REMEMBERED
        assert 0 not in core.cpu.speculating
        core.clipping = 1e6
        support.train(made, support.batches(2))
        assert 0 in core.cpu.speculating
        assert superoffload.stats(made).kept_steps == 1
