"""Problems with user input, as tests assert them: by their codes instead of their wording."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from so_tui.spec import InputError, Problem


def codes(caught: pytest.ExceptionInfo[InputError]) -> list[str]:
    """Return the code of each problem of a caught error."""
    return [problem.code for problem in caught.value.problems]


def refusal(call: Callable[[], object]) -> Problem:
    """Return the one problem that ``call`` raises, which must have a code and a remedy."""
    with pytest.raises(InputError) as caught:
        call()
    (problem,) = caught.value.problems
    assert problem.code
    assert problem.remedy
    return problem


@contextmanager
def coded(kind: type[Exception], code: str, match: str | None = None) -> Iterator[None]:
    """Expect an error of a kind with a code."""
    with pytest.raises(kind, match=match) as caught:
        yield
    assert getattr(caught.value, "code", None) == code
