from itertools import pairwise

import pytest

from so_tui.spec import TrainSpec
from so_tui_trainer.loop import learning_rate


def _rates(
    schedule: str, total: int = 100, warmup: float = 0.1, decay: float = 0.1, floor: float = 0.0
) -> list[float]:
    train = TrainSpec(
        learning_rate=1.0,
        schedule=schedule,  # type: ignore[arg-type]
        warmup_ratio=warmup,
        decay_ratio=decay,
        min_learning_rate_ratio=floor,
    )
    return [learning_rate(step, total, train) for step in range(1, total + 1)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
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


def test_wsd_stays_at_the_peak_and_falls_over_its_last_steps() -> None:
    rates = _rates("wsd", decay=0.2)
    assert set(rates[9:81]) == {1.0}
    assert rates[80:] == pytest.approx([1 - step / 20 for step in range(20)])


def test_the_decay_of_wsd_leaves_the_warm_up_alone() -> None:
    rates = _rates("wsd", total=10, warmup=0.5, decay=1.0)
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5:] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_falling_schedules_end_just_above_their_floor(schedule: str) -> None:
    rates = _rates(schedule, total=1000, floor=0.1)
    assert max(rates) == 1.0
    assert 0.1 < rates[-1] < 0.11
    assert min(rates[100:]) == rates[-1]
