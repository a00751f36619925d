"""Published figures beside ours: complete, explained where they differ, and consistent with each
other.
"""

from __future__ import annotations

from string import Formatter

import pytest

from benchmarks.published import _EVIDENCE, NOTABLE, Compared, compared, published
from so_tui.machine.known import named_machine
from so_tui.plan.resources import example_tflops
from so_tui.validation.validate import with_layers
from tests.support.planning import planned, spec_of

DEEPSPEED = {"offload__engine": "deepspeed"}


@pytest.fixture(scope="module")
def figures() -> dict[str, Compared]:
    return {one.published.key: one for one in compared()}


def tflops(**changes: str) -> float:
    given = {"gpus": "1", "offload__mode": "superoffload", "offload__ratio": "0.8"}
    given |= {"model__activation_checkpointing": "full", "train__gradient_clipping": "0"}
    given |= {"offload__sub_group_size": "400000000"} | changes
    return example_tflops(planned("llama-3.1-8b", named_machine("gh200-480"), **given)) or 0.0


def test_keys_are_unique_and_reasons_name_what_can_be_computed() -> None:
    assert len({figure.key for figure in published()}) == len(published())
    named = {
        name for figure in published() for _, name, _, _ in Formatter().parse(figure.reason) if name
    }
    assert named == _EVIDENCE.keys()


def test_every_notable_difference_has_its_reason(figures: dict[str, Compared]) -> None:
    for one in figures.values():
        if one.difference is None or abs(one.difference) > NOTABLE:
            assert one.reason, one.published.key
    early = _EVIDENCE["early_speedup"](figures["speedup-examples"].published)
    assert early == pytest.approx(1.5, rel=NOTABLE)
    assert abs(figures["largest-superoffload"].difference or 1) < NOTABLE


def test_deepspeeds_superoffload_is_faster_unless_it_clips() -> None:
    """It was planned at 208 TFLOPS, below ZeRO-Offload's 219: copies over PCIe had been counted as
    traffic of the host's memory.
    """
    clipped = tflops(**DEEPSPEED | {"train__gradient_clipping": "1"})
    zerooffload, superoffload = tflops(offload__mode="zerooffload"), tflops(**DEEPSPEED)
    assert clipped <= zerooffload < superoffload / 1.1
    assert superoffload <= tflops()


def test_another_number_of_layers_keeps_the_shape() -> None:
    llama = spec_of("llama-3.1-8b")
    half = with_layers(llama, 16)
    layer = (llama.model.parameter_count - half.model.parameter_count) / 16
    assert with_layers(llama, 15).model.parameter_count == half.model.parameter_count - layer
    assert with_layers(half, 32) == llama
