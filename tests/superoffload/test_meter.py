"""How long the optimizer keeps a layer waiting, told from what else happens meanwhile."""

from __future__ import annotations

import pytest

from superoffload.meter import LayerWait, Meter
from superoffload.transfers import Transfers


@pytest.mark.parametrize(
    ("updated", "seconds"),
    [
        ((2.5,), 1.5),  # what follows until 3.0 is the all-gather
        ((0.5,), 0.0),  # the weights had arrived while the GPU still computed
        ((0.5, 2.0), 1.0),  # the host was kept until 2.0, by weights that are needed later
        ((4.0,), 2.0),  # copied for another stream: the layer had begun
        ((), 0.0),
    ],
)
def test_a_layer_waits_for_the_optimizer_from_having_nothing_to_do_until_its_weights_are_there(
    updated: tuple[float, ...], seconds: float
) -> None:
    assert LayerWait(begin=1.0, end=3.0, updated=updated).seconds(Transfers()) == pytest.approx(
        seconds
    )


def test_waits_in_forward_are_part_of_what_is_exposed() -> None:
    meter = Meter(Transfers())
    meter.current.layer_waits += [LayerWait(0.0, 1.0, (0.75,)), LayerWait(2.0, 3.0, (5.0,))]
    meter.current.step_waits.append((3.0, 3.5))
    meter.end_step()
    stats = meter.stats()
    assert (stats.exposed_in_forward_s, stats.exposed_wait_s) == pytest.approx((1.75, 2.25))
    meter.current.layer_waits.append(LayerWait(0.0, 1.0, (1.0,)))
    meter.leave_out_waits()
    meter.end_step()
    assert meter.stats().exposed_in_forward_s == 0.0
