"""What ranks exchange."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from so_tui_trainer.failures import Explanation
from so_tui_trainer.ranks import Ranks


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (True, bool),
        ("host", str),
        (Path("/a"), Path),
        (None, Path | None),
        (Explanation("code", "reason", "suggestion"), Explanation | None),
    ],
)
def test_values_arrive_as_they_were(value: object, kind: object, single_rank: Ranks) -> None:
    assert single_rank.all_gather(value, kind) == [value]
    assert single_rank.broadcast(value, kind) == value


def test_a_value_of_another_type_is_refused(single_rank: Ranks) -> None:
    with pytest.raises(msgspec.ValidationError):
        single_rank.broadcast("text", int)
