"""Whether the hub can be asked at all."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest

from so_tui_trainer.hub import stay_offline_when_cut_off
from tests.support.waiting import LIMIT_S


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "")  # so that what is set meanwhile is taken back


def test_only_a_hub_that_answers_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        stay_offline_when_cut_off()
    assert os.environ.get("HF_HUB_OFFLINE") == ""
    stay_offline_when_cut_off()  # nothing listens there any more
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_a_name_server_that_is_silent_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: over.wait(LIMIT_S) and [])
    began = time.monotonic()
    stay_offline_when_cut_off()
    took_s = time.monotonic() - began
    over.set()
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert took_s < LIMIT_S / 2
