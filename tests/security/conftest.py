"""Two users of one machine."""

from tests.support.users import machine  # noqa: F401 - a fixture
