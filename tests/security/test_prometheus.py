"""The Prometheus endpoint: off by default, on loopback, for those who have the token, and nothing to attack a run by."""

from __future__ import annotations

import hmac
import http.client
import re
import socket
import time
from collections.abc import Iterator

import pytest

from so_tui.launch.supervisor import prometheus
from so_tui.launch.supervisor.prometheus import (
    CONTENT_TYPE,
    PORTS,
    Endpoint,
    Figures,
    exposition,
    open_endpoint,
)
from so_tui.runs.records import GpuSample, NodeSample, RunState, Sample
from so_tui.settings import PrometheusSettings, Settings
from tests.support.records import step_record

TOKEN = "0123456789abcdef-secret"
NODE = NodeSample(
    id=0, cores=(50, 100), memory_used_bytes=7, memory_total_bytes=9, file_cache_bytes=0
)
FIGURES = Figures(
    run='a"\\\n\x1b{}',
    host="h",
    state=RunState(name="r", state="training", step=3, total_steps=9),
    step=step_record(3, loss=float("nan")),
    sample=Sample(
        attempt=1,
        time=1.0,
        interval_s=1.0,
        nodes=(NODE,),
        gpus=(GpuSample(index=0, busy_percent=40, clock_mhz=1980),),
    ),
)
LINE = re.compile(r'[a-z_]+\{([a-z_]+="(\\["\\]|[^"\\\n])*",?)+\} (-?[0-9.e+-]+|NaN|[+-]Inf)')


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    opened = open_endpoint(PrometheusSettings(enabled=True, port=29_464, token=TOKEN))
    assert opened is not None
    opened.publish(FIGURES)
    yield opened
    opened.close()


def asked(
    endpoint: Endpoint, path: str = "/metrics", method: str = "GET", **headers: str
) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), answer.headers.get("Content-Type", "")
    connection.close()
    return found


def test_it_is_off_by_default_and_needs_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    assert not Settings().prometheus.enabled
    assert open_endpoint(PrometheusSettings(enabled=True)) is None
    assert "token is not set" in capsys.readouterr().err


def test_only_the_token_is_answered(endpoint: Endpoint) -> None:
    assert asked(endpoint)[0] == 401
    for wrong in (
        "",
        "Bearer",
        "Bearer ",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Basic {TOKEN}",
        TOKEN,
        "Bearer \xff\xfe",
    ):
        code, body, _ = asked(endpoint, Authorization=wrong)
        assert (code, "so_tui" in body) == (401, False), wrong
    code, body, kind = asked(endpoint, Authorization=f"Bearer {TOKEN}")
    assert (code, kind) == (200, CONTENT_TYPE)
    assert body == exposition(FIGURES)
    assert asked(endpoint, "/etc/passwd", Authorization=f"Bearer {TOKEN}")[0] == 404
    assert asked(endpoint, method="POST", Authorization=f"Bearer {TOKEN}")[0] == 501


def test_the_token_is_compared_in_constant_time(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []
    real = hmac.compare_digest

    def compare(one: bytes, two: bytes) -> bool:
        compared.append((one, two))
        return bool(real(one, two))

    monkeypatch.setattr(hmac, "compare_digest", compare)
    asked(endpoint)
    asked(endpoint, Authorization="Bearer guess")
    assert compared == [(b"", TOKEN.encode()), (b"guess", TOKEN.encode())]


def test_it_listens_on_loopback_alone_and_takes_the_next_port(endpoint: Endpoint) -> None:
    assert endpoint._server.socket.getsockname()[0] == "127.0.0.1"
    other = open_endpoint(PrometheusSettings(enabled=True, port=endpoint.port, token=TOKEN))
    assert other is not None
    assert endpoint.port < other.port < endpoint.port + PORTS
    other.close()


def test_those_who_hold_connections_are_cut_off(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than are answered at a time, one byte after the other."""
    monkeypatch.setattr(prometheus, "_LONGEST_REQUEST_S", 0.3)
    held = [socket.create_connection(("127.0.0.1", endpoint.port), timeout=5) for _ in range(20)]
    started = time.monotonic()
    for connection in held:
        connection.send(b"GET /metrics HTTP/1.1\r\nX: ")
    while time.monotonic() - started < 0.5:
        for connection in held[:8]:
            try:
                connection.send(b"x")
            except OSError:
                break
        time.sleep(0.05)
    assert asked(endpoint, Authorization=f"Bearer {TOKEN}")[0] == 200
    for connection in held:
        connection.close()


def test_names_stay_in_their_labels() -> None:
    lines = exposition(FIGURES).splitlines()
    assert len(lines) > 20
    for line in lines:
        assert line.startswith("# TYPE so_tui_") or LINE.fullmatch(line), line
        assert line.isprintable()
    assert any(line.startswith("so_tui_loss{") and line.endswith(" NaN") for line in lines)
    assert any("node_cpu_busy_ratio" in line and line.endswith(" 0.75") for line in lines)
    assert any("gpu_clock_hertz" in line and line.endswith(" 1980000000.0") for line in lines)
