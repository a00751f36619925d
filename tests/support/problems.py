"""Problems with user input, as the code raises them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from so_tui.spec import InputError, Problem


def refusal(call: Callable[[], object]) -> Problem:
    """Return the one problem that ``call`` raises, which must have a code and a remedy."""
    with pytest.raises(InputError) as caught:
        call()
    (problem,) = caught.value.problems
    assert problem.code
    assert problem.remedy
    return problem
