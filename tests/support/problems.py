"""What tests assert of problems: their codes instead of their wording."""

from __future__ import annotations

import pytest

from so_tui.spec import InputError


def codes(caught: pytest.ExceptionInfo[InputError]) -> list[str]:
    """Return the code of each problem of a caught error."""
    return [problem.code for problem in caught.value.problems]
