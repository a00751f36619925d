"""Problems with user input, as tests assert them: by their codes instead of their wording."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import pytest

from so_tui.spec import InputError, Problem, Refused


def codes(caught: pytest.ExceptionInfo[InputError]) -> list[str]:
    return [problem.code for problem in caught.value.problems]


def refusal(call: Callable[[], object]) -> Problem:
    """Return the one problem that ``call`` raises, which must have a code and a remedy."""
    with pytest.raises(InputError) as caught:
        call()
    (problem,) = caught.value.problems
    assert problem.code
    assert problem.remedy
    return problem


def raising(error: Exception, asked: list[object] | None = None) -> Callable[..., NoReturn]:
    """Return a function that raises an error, and notes first what it was asked."""

    def fail(*given: object, **_: object) -> NoReturn:
        if asked is not None:
            asked.append(given)
        raise error

    return fail


@contextmanager
def coded(kind: type[Exception], code: str, match: str | None = None) -> Iterator[None]:
    with pytest.raises(kind, match=match) as caught:
        yield
    assert getattr(caught.value, "code", None) == code


@contextmanager
def rejected(
    *expected: str, field: str | None = None
) -> Iterator[pytest.ExceptionInfo[InputError]]:
    """Expect problems with these codes, and of this field if one is given."""
    with pytest.raises(InputError) as caught:
        yield caught
    assert codes(caught) == list(expected)
    assert field is None or {problem.field for problem in caught.value.problems} == {field}


@contextmanager
def refused(
    *expected: str, forceable: bool | None = None
) -> Iterator[pytest.ExceptionInfo[Refused]]:
    """Expect a refusal with these codes, which can or cannot be forced if that is given."""
    with pytest.raises(Refused) as caught:
        yield caught
    assert caught.value.codes == expected
    assert forceable is None or caught.value.forceable == forceable
