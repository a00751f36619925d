from itertools import pairwise

import pytest

from so_tui.spec import TrainSpec
from so_tui_trainer.schedule import learning_rate


def _rates(schedule: str, total: int = 100, warmup: float = 0.1) -> list[float]:
    train = TrainSpec(learning_rate=1.0, schedule=schedule, warmup_ratio=warmup)  # type: ignore[arg-type]
    return [learning_rate(step, total, train) for step in range(1, total + 1)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_it_rises_to_the_peak_over_the_warm_up(schedule: str) -> None:
    rates = _rates(schedule)
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert max(rates) == 1.0


def test_cosine_and_linear_fall_and_never_waste_a_step_on_zero() -> None:
    for schedule in ("cosine", "linear"):
        falling = _rates(schedule)[10:]
        assert falling[0] == 1.0
        assert all(after < before for before, after in pairwise(falling))
        assert 0 < falling[-1] < 0.02


def test_cosine_is_half_way_down_in_the_middle() -> None:
    assert _rates("cosine", total=101, warmup=0.0)[50] == pytest.approx(0.5, abs=0.02)


def test_constant_stays() -> None:
    assert set(_rates("constant")[9:]) == {1.0}


def test_a_run_of_one_step_has_a_rate() -> None:
    assert _rates("cosine", total=1, warmup=0.05) == [1.0]
