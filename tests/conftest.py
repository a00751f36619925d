"""Give every test its own folders, so that the user's presets, runs and measurements are neither
read nor changed.

Tests share the cache folder, with compiled kernels and prepared data, with the user.
"""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest_plugins = ("tests.support.tiers",)

OWN = {"XDG_CONFIG_HOME": "config", "XDG_STATE_HOME": "state", "XDG_DATA_HOME": "data"}


@pytest.fixture(scope="session", autouse=True)
def _folders_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Set the folders for fixtures of session scope."""
    folder = tmp_path_factory.mktemp("user")
    with pytest.MonkeyPatch.context() as patch:
        for variable, name in OWN.items():
            patch.setenv(variable, str(folder / name))
        yield


@pytest.fixture(autouse=True)
def _folders_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the folders for a single test."""
    for variable, name in OWN.items():
        monkeypatch.setenv(variable, str(tmp_path / name))
    monkeypatch.delenv("SO_TUI_RUNS_DIR", raising=False)


def pytest_configure(config: pytest.Config) -> None:
    """Collect garbage rarely, which saves a fifth of the time of the tests of screens.

    Also have processes that tests start react to SIGINT, even if a shell started the tests in the
    background, which ignores it.
    """
    gc.set_threshold(100_000, 20, 20)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what was imported out of every later garbage collection."""
    gc.freeze()
