"""Second states: stepping before the norm is known and saving during training change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import superoffload
from so_tui.model.sharding import speculating
from superoffload.steps import REMEMBERED
from superoffload.transfers import Event
from superoffload.worker import Command, Operation
from tests.support import engine as support
from tests.support.engine import ALL
from tests.support.problems import coded
from tests.support.reference_adamw import core_of

pytestmark = pytest.mark.slow


def trained(speculation_bytes: int, accumulation: int) -> tuple[Any, ...]:
    """Train with a falling learning rate; return losses, states and stats. Half of the steps have
    a norm above the limit.
    """
    run: dict[str, Any] = {
        "clipping": {1: 10.7, 4: 7.1}[accumulation],
        "accumulation": accumulation,
    }
    with support.offloading(speculation_bytes=speculation_bytes, **run) as made:
        losses = []
        for step in range(30):
            superoffload.set_learning_rate(made, 1e-2 / (1 + step))
            losses += support.train(made, support.batches(accumulation, seed=step))
        return losses, support.states(made), superoffload.stats(made)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_speculation_has_the_bits_of_steps_that_are_held_back(accumulation: int) -> None:
    """Also where there is memory for a part of it."""
    held = trained(0, accumulation)
    assert (held[2].kept_steps, held[2].redone_steps) == (0, 0)
    for speculation_bytes in (int(0.4 * 14 * support.TRAINABLE), ALL):
        early = trained(speculation_bytes, accumulation)
        assert early[:2] == held[:2]
        assert min(early[2].kept_steps, early[2].redone_steps) >= 3


def test_what_speculates_is_spread_as_far_as_memory_goes() -> None:
    assert speculating([10] * 8, 40) == (1, 3, 5, 7)
    assert speculating([10] * 8, 79) == (1, 2, 3, 4, 5, 6, 7)
    assert speculating([10] * 8, 80) == tuple(range(8))
    assert speculating([10, 20, 5, 30], 64) == (1, 2, 3)
    assert speculating([50, 20, 5], 30) == (1, 2)
    assert speculating([10], 9) == speculating([], 9) == ()


@pytest.mark.parametrize(("ranks", "speculates"), [(2, True), (4, False)])
def test_the_ranks_of_a_host_share_what_they_all_find_available(
    ranks: int, speculates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher starts them at once, and each sees all of the host's memory."""
    monkeypatch.setenv("LOCAL_SIZE", str(ranks))
    for_two = 2 * (28 * support.TRAINABLE + (17 << 20))
    room: dict[str, Any] = {"speculation_bytes": 1 << 40, "copies_bytes": 1 << 40}
    with support.offloading(clipping=1e6, available_bytes=lambda: for_two, **room) as made:
        assert bool(core_of(made).cpu.speculating) == speculates
        support.train(made, support.batches(1))


def test_weights_are_restored_after_the_last_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the copy would overwrite the weights in the staging buffer."""
    with support.offloading(clipping=1e6, speculation_bytes=ALL, max_skipped_steps=1) as made:
        core = core_of(made)
        support.train(made, support.batches(2))
        waited_for: list[bool] = []
        update = core.cpu._update

        def recording(command: Command, after: Event) -> None:
            if command.operation == Operation.RESTORE:
                waited_for.append(core.cpu._gradients[command.sub_group].copied is after)
            update(command, after)

        monkeypatch.setattr(core.cpu, "_update", recording)
        support.skip_step(made, support.batches(1))
        assert waited_for
        assert all(waited_for)


@pytest.mark.parametrize(
    ("accumulation", "speculation_bytes", "parameters"),
    [(1, ALL, "none"), (2, 0, "none"), (2, ALL, "none"), (1, ALL, "cpu"), (1, 0, "cpu")],
)
def test_a_step_that_is_not_finite_might_never_have_been(
    accumulation: int, speculation_bytes: int, parameters: support.Parameters
) -> None:
    run: dict[str, Any] = {"ratio": 0.8, "clipping": 5.0, "accumulation": accumulation}
    run |= {"speculation_bytes": speculation_bytes, "max_skipped_steps": 1}
    data = support.batches(8 * accumulation)
    with support.offloading(**run) as made:
        expected = support.train(made, data), support.states(made)
    with support.offloading(**run, parameters=parameters) as made:
        losses = support.train(made, data[: 4 * accumulation])
        superoffload.synchronize(made)
        groups = core_of(made).sub_groups
        before = [group.weights.clone() for group in groups]
        support.skip_step(made, support.batches(accumulation, seed=9))
        skipped = core_of(made).skipped
        assert skipped is not None
        assert (skipped.step, skipped.sub_group, skipped.poisoned) == (5, 0, False)
        superoffload.synchronize(made)
        for weights, group in zip(before, groups, strict=True):
            assert torch.equal(weights, group.weights)
        losses += support.train(made, data[4 * accumulation :])
        assert superoffload.stats(made).skipped_steps == 1
        assert core_of(made).skipped is None
        assert (losses, support.states(made)) == expected


def test_too_many_skipped_steps_end_the_run_with_sound_states() -> None:
    with support.offloading(0.8, clipping=5.0, speculation_bytes=ALL, max_skipped_steps=2) as made:
        support.train(made, support.batches(3))
        before = support.states(made)
        for _ in range(2):
            support.skip_step(made, support.batches(1))
        support.train(made, support.batches(1))  # they are no longer in a row
        taken = support.states(made)
        assert taken != before
        support.poison(made)
        support.train(made, support.batches(2))
        with pytest.raises(superoffload.NonFiniteGradientError) as caught:
            support.train(made, support.batches(1))
        assert not caught.value.poisoned
        assert support.states(made) == taken


def test_a_saved_state_is_that_of_the_set_that_was_accepted(tmp_path: Path) -> None:
    """After an odd and an even number of accepted steps; DeepSpeed's weights are its cast."""
    with support.offloading(clipping=1e6, speculation_bytes=ALL) as made:
        for step in range(2):
            support.train(made, support.batches(1, seed=step))
            superoffload.save_state(made, tmp_path)
            saved = support.saved_bytes(tmp_path)
            with support.offloading(clipping=1e6, speculation_bytes=ALL * (step % 2)) as other:
                superoffload.load_state(other, tmp_path)
                assert support.states(other) == saved
            for index, master_weights in enumerate(made.optimizer.fp32_partitioned_groups_flat):
                weights = made.optimizer.fp16_partitioned_groups_flat[index]
                assert torch.equal(weights, master_weights.bfloat16())
        assert superoffload.stats(made).kept_steps == 2


def test_the_engine_stops_speculating_and_begins_again() -> None:
    with support.offloading(clipping=1e-6, speculation_bytes=ALL) as made:
        core = core_of(made)
        support.train(made, support.batches(REMEMBERED - 1))
        assert 0 in core.cpu.speculating
        support.train(made, support.batches(4))
        assert superoffload.stats(made).redone_steps == REMEMBERED
        assert 0 not in core.cpu.speculating
        core.clipping = 1e6
        support.train(made, support.batches(2))
        assert 0 in core.cpu.speculating
        assert superoffload.stats(made).kept_steps == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"clipping": 10.7, "copies_bytes": ALL},
        {"clipping": 10.7, "speculation_bytes": ALL, "copies_bytes": ALL},
        {"clipping": 7.1, "accumulation": 2, "speculation_bytes": ALL},
        {"clipping": 10.7, "speculation_bytes": ALL // 2**14, "copies_bytes": ALL // 2**13},
        {"clipping": 10.7, "speculation_bytes": ALL, "states": "int8-moments"},
        {"accumulation": 2, "copies_bytes": ALL, "states": "bf16-moments"},
        {"clipping": 9.0, "speculation_bytes": ALL, "copies_bytes": ALL, "parameters": "cpu"},
        {},
    ],
)
def test_it_has_the_bits_of_a_save_for_which_training_waits(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Norms are above and below the limit, and the states are written three steps late."""
    steps = 3 * settings.get("accumulation", 1)
    data = support.batches(3 * steps)
    ends: list[tuple[bytes, ...]] = []
    for copying in (False, True):
        folder = tmp_path / str(copying)
        with support.offloading(0.8, **settings) as made:
            support.train(made, data[:steps])
            save = superoffload.begin_save(made, folder, copying=copying)
            on_gpu = {index for index, group in enumerate(core_of(made).sub_groups) if group.on_gpu}
            copies = settings.get("copies_bytes", 0)
            speculates = settings.get("speculation_bytes", 0)
            assert bool(save.copies) == (copying and bool(copies or speculates))
            assert (on_gpu <= set(save.copies)) == (copying and bool(copies))
            support.train(made, data[steps : 2 * steps])
            save.finish()
            superoffload.verify_state(folder)
            support.train(made, data[2 * steps :])
            manifest = (folder / "rank_00000.json").read_bytes()
            ends.append((support.saved_bytes(folder), manifest, support.states(made)))
    assert ends[0] == ends[1]


def test_a_skipped_step_and_a_load_leave_the_copies(tmp_path: Path) -> None:
    """Loading waits for the copies of what it overwrites."""
    room: dict[str, Any] = {"speculation_bytes": ALL, "copies_bytes": ALL}
    with support.offloading(0.8, clipping=1e6, max_skipped_steps=1, **room) as made:
        support.train(made, support.batches(1))
        superoffload.save_state(made, tmp_path / "old")
        support.train(made, support.batches(2))
        expected = support.states(made)
        for name in ("skipped", "loaded"):
            save = superoffload.begin_save(made, tmp_path / name)
            if name == "skipped":
                support.skip_step(made, support.batches(1))
            else:
                superoffload.load_state(made, tmp_path / "old")
            save.finish()
            assert support.saved_bytes(tmp_path / name) == expected


def test_copies_in_use_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with support.offloading(copies_bytes=ALL) as made:
        support.train(made, support.batches(1))
        with pytest.raises(OSError, match="file"):
            superoffload.begin_save(made, tmp_path / "file")
        save = superoffload.begin_save(made, tmp_path / "first")
        with coded(superoffload.OffloadError, "copies-in-use"):
            superoffload.begin_save(made, tmp_path / "second")
        save.close()  # given up: what is there is no complete state
        with pytest.raises(superoffload.OffloadError):
            superoffload.verify_state(tmp_path / "first")
        superoffload.begin_save(made, tmp_path / "second").finish()
        superoffload.verify_state(tmp_path / "second")
