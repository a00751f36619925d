"""Saving while training continues: the state of the step in which it began is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

import superoffload
from so_tui.model.sharding import copied
from tests.support import engine as support
from tests.support.problems import coded
from tests.support.reference_adamw import core_of

pytestmark = pytest.mark.slow

ALL = 1 << 30
"""Bytes that suffice for every sub-group of the small model."""


@pytest.mark.parametrize(
    ("clipping", "accumulation", "speculation_bytes", "copies_bytes", "states"),
    [
        (10.7, 1, 0, ALL, "fp32"),
        (10.7, 1, ALL, ALL, "fp32"),
        (7.1, 2, ALL, 0, "fp32"),
        (10.7, 1, ALL // 2**14, ALL // 2**13, "fp32"),
        (10.7, 1, ALL, 0, "int8-moments"),
        (0.0, 2, 0, ALL, "bf16-moments"),
        (0.0, 1, 0, 0, "fp32"),
    ],
)
def test_it_has_the_bits_of_a_save_for_which_training_waits(
    clipping: float,
    accumulation: int,
    speculation_bytes: int,
    copies_bytes: int,
    states: Literal["fp32", "bf16-moments", "int8-moments"],
    tmp_path: Path,
) -> None:
    """Norms are above and below the limit, and the states are written three steps late."""
    run = support.spec("superoffload", 0.8, clipping=clipping, accumulation=accumulation)
    data = support.batches(9 * accumulation)
    settings: dict[str, Any] = {
        "speculation_bytes": speculation_bytes,
        "copies_bytes": copies_bytes,
        "states": states,
    }
    expected: list[bytes] = []
    found: list[bytes] = []
    for ends, in_background in ((expected, False), (found, True)):
        with support.engine(run, **settings) as made:
            support.train(made, data[: 3 * accumulation])
            save = superoffload.begin_save(made, tmp_path / "background") if in_background else None
            folder = tmp_path / ("background" if in_background else "foreground")
            if save is None:
                superoffload.save_state(made, folder)
            support.train(made, data[3 * accumulation : 6 * accumulation])
            if save:
                on_gpu = {
                    index for index, group in enumerate(core_of(made).sub_groups) if group.on_gpu
                }
                assert bool(set(save.copies)) == bool(speculation_bytes or copies_bytes)
                assert (on_gpu <= set(save.copies)) == bool(copies_bytes)
                save.finish()
            superoffload.verify_state(folder)
            ends.append((folder / "rank_00000.states").read_bytes())
            ends.append((folder / "rank_00000.json").read_bytes())
            support.train(made, data[6 * accumulation :])
            ends.append(support.states(made, tmp_path / f"end-{in_background}"))
    assert found == expected


def test_a_lent_sub_group_speculates_again_once_written(tmp_path: Path) -> None:
    with support.engine(
        support.spec("superoffload", 1.0, clipping=1e6), speculation_bytes=ALL
    ) as made:
        core = core_of(made)
        every = core.cpu.speculating
        support.train(made, support.batches(2))
        save = superoffload.begin_save(made, tmp_path)
        assert set(save.copies) == every
        assert not core.cpu.speculating
        support.train(made, support.batches(2))
        assert superoffload.stats(made).kept_steps == 2
        save.finish()
        support.train(made, support.batches(2))
        assert core.cpu.speculating == every
        assert superoffload.stats(made).kept_steps == 3  # a step begins when the one before ends


def test_a_sub_group_with_a_copy_of_its_own_goes_on_speculating(tmp_path: Path) -> None:
    with support.engine(
        support.spec("superoffload", 1.0, clipping=1e6), speculation_bytes=ALL, copies_bytes=ALL
    ) as made:
        support.train(made, support.batches(2))
        save = superoffload.begin_save(made, tmp_path)
        support.train(made, support.batches(2))
        assert superoffload.stats(made).kept_steps == 4
        save.finish()


def test_what_keeps_sub_groups_from_speculating_is_written_first(tmp_path: Path) -> None:
    with support.engine(
        support.spec("superoffload", 1.0, clipping=1e6), speculation_bytes=ALL, copies_bytes=ALL
    ) as made:
        states_bytes = 12 * sum(group.weights.numel() for group in core_of(made).sub_groups)
    with support.engine(
        support.spec("superoffload", 1.0, clipping=1e6),
        speculation_bytes=ALL,
        copies_bytes=states_bytes // 2,
    ) as made:
        every = core_of(made).cpu.speculating
        support.train(made, support.batches(2))
        save = superoffload.begin_save(made, tmp_path)
        lent = every - core_of(made).cpu.speculating
        assert 0 < len(lent) < len(every)
        assert set(list(save.copies)[: len(lent)]) == lent
        save.finish()


def test_a_step_skipped_while_saving_leaves_the_copies(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"speculation_bytes": ALL, "max_skipped_steps": 1}
    with support.engine(support.spec("superoffload", 0.8, clipping=1e6), **settings) as made:
        support.train(made, support.batches(2))
        expected = support.states(made, tmp_path / "expected")
        save = superoffload.begin_save(made, tmp_path / "found")
        hook = support.poison(made)
        support.train(made, support.batches(1))
        hook.remove()
        support.train(made, support.batches(1))
        save.finish()
        assert (tmp_path / "found" / "rank_00000.states").read_bytes() == expected


def test_loading_waits_for_the_copies_of_what_it_overwrites(tmp_path: Path) -> None:
    with support.engine(support.spec("superoffload", 1.0), copies_bytes=ALL) as made:
        support.train(made, support.batches(1))
        support.states(made, tmp_path / "old")
        support.train(made, support.batches(2))
        expected = support.states(made, tmp_path / "expected")
        save = superoffload.begin_save(made, tmp_path / "found")
        superoffload.load_state(made, tmp_path / "old")
        save.finish()
        assert (tmp_path / "found" / "rank_00000.states").read_bytes() == expected


def test_copies_in_use_are_not_overwritten(tmp_path: Path) -> None:
    with support.engine(support.spec("superoffload", 1.0), copies_bytes=ALL) as made:
        support.train(made, support.batches(1))
        save = superoffload.begin_save(made, tmp_path / "first")
        with coded(superoffload.OffloadError, "copies-in-use"):
            superoffload.begin_save(made, tmp_path / "second")
        save.close()  # given up: what is there is no complete state
        with pytest.raises(superoffload.OffloadError):
            superoffload.verify_state(tmp_path / "first")
        superoffload.begin_save(made, tmp_path / "second").finish()
        superoffload.verify_state(tmp_path / "second")


def test_a_save_without_a_folder_fails_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with support.engine(support.spec("superoffload", 1.0), copies_bytes=ALL) as made:
        support.train(made, support.batches(1))
        with pytest.raises(OSError, match="file"):
            superoffload.begin_save(made, tmp_path / "file")
        superoffload.begin_save(made, tmp_path / "next").finish()


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(60, (0, 1, 2, 3)), (59, (0, 1, 2)), (40, (0, 1, 2)), (30, (0, 2)), (19, (0,)), (9, ())],
)
def test_copies_go_first_without_second_states(budget: int, expected: tuple[int, ...]) -> None:
    assert copied([10, 10, 20, 20], (1, 3), budget) == expected
