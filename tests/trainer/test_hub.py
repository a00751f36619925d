"""Whether the hub can be asked at all."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Any

import pytest

from so_tui_trainer.hub import stay_offline_when_cut_off
from tests.support.waiting import LIMIT_S

_PROXIES = ("HF_HUB_OFFLINE", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _PROXIES:
        monkeypatch.setenv(name, "")  # so that what is set meanwhile is taken back


def test_a_hub_that_answers_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        stay_offline_when_cut_off()
    assert not os.environ["HF_HUB_OFFLINE"]


def test_a_hub_that_refuses_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    stay_offline_when_cut_off()
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_a_name_server_that_is_silent_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def silent(*_: Any, **__: Any) -> None:
        over.wait(LIMIT_S)
        raise socket.gaierror("no answer")

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    began = time.monotonic()
    stay_offline_when_cut_off()
    took_s = time.monotonic() - began
    over.set()
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert took_s < LIMIT_S / 2
