"""Give every test folders of its own, so that the user's presets, runs and measurements are neither seen nor touched.

Compiled kernels and prepared data lie in the cache folder, which all tests share with the user.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest_plugins = ("tests.support.budgets", "tests.support.tiers")

OWN = {"XDG_CONFIG_HOME": "config", "XDG_STATE_HOME": "state", "XDG_DATA_HOME": "data"}


@pytest.fixture(scope="session", autouse=True)
def _folders_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Redirect the user's folders for fixtures that outlive a test."""
    folder = tmp_path_factory.mktemp("user")
    with pytest.MonkeyPatch.context() as patch:
        for variable, name in OWN.items():
            patch.setenv(variable, str(folder / name))
        yield


@pytest.fixture(autouse=True)
def _folders_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, name in OWN.items():
        monkeypatch.setenv(variable, str(tmp_path / name))
    monkeypatch.delenv("SO_TUI_RUNS_DIR", raising=False)
