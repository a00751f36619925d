"""Saving while training continues: the state of the step in which it began is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import superoffload
from tests.support import engine as support
from tests.support.engine import ALL
from tests.support.problems import coded
from tests.support.reference_adamw import core_of

pytestmark = pytest.mark.slow


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
