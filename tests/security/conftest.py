"""Two users of one machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.users import SharedMachine, shared_machine


@pytest.fixture
def machine() -> Iterator[SharedMachine]:
    with shared_machine() as found:
        yield found
