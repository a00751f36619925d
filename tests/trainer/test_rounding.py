"""What a resume warns of when it rounds Adam's moments."""

from __future__ import annotations

import pytest

from so_tui_trainer.checkpoint import _rounding_warnings
from superoffload.resharding import Rounded
from tests.support import engine as support
from tests.support.planning import spec_of

NONE, BOTH = Rounded(blocks=0, numel=0), Rounded(blocks=3, numel=2_000_000)


def codes(before: dict[str, str], now: dict[str, str], rounded: Rounded) -> list[str]:
    ours = {"offload__mode": "superoffload"}
    saved = support.manifest(5, spec_of("tiny", **{**ours, **before}), ranks=2)
    return [
        warning.code
        for warning in _rounding_warnings(saved, spec_of("tiny", **{**ours, **now}), rounded)
    ]


@pytest.mark.parametrize("states", ["bf16-moments", "int8-moments"])
def test_another_format_and_the_same_one(states: str) -> None:
    compact = {"offload__states": states}
    assert codes({}, {}, NONE) == codes(compact, compact, NONE) == []
    assert codes({}, compact, BOTH) == codes(compact, {}, NONE) == ["states-format-changed"]
    assert codes(compact, compact, BOTH) == ["moments-rounded", "blocks-rounded-again"]


def test_without_offload_moments_are_fp32_whatever_the_spec_says() -> None:
    compact = {"offload__states": "int8-moments"}
    assert codes(compact | {"offload__mode": "gpu"}, compact, BOTH) == ["states-format-changed"]
    assert codes(compact | {"offload__mode": "gpu"}, {}, NONE) == []


def test_moments_that_begin_anew_are_all_there_is_to_say() -> None:
    assert codes({"offload__engine": "deepspeed"}, {}, Rounded(blocks=0, numel=0, restarted=5)) == [
        "moments-restarted"
    ]
