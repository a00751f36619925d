"""Figures of a live run in the text format of Prometheus, for this host and whoever has the token. Off unless the user's settings say so.

It listens on 127.0.0.1 alone. Everybody on the host can reach that, so each request must carry the token. It answers in threads of its own,
a few at a time and each for seconds at most, and reads nothing but the last figures that the supervisor handed over.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from typing import Any

from msgspec import Struct

from so_tui.launch.command import log_line
from so_tui.runs.records import RunState, Sample, StepRecord
from so_tui.settings import PrometheusSettings
from so_tui.trust.text import printable_line

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PORTS = 16
"""Ports that are tried, from the first one on: several runs may share a host."""
_LONGEST_REQUEST_S = 5.0
_MOST_REQUESTS = 8
_BEARER = "Bearer "


class Figures(Struct, frozen=True):
    """What is known of a run at one moment."""

    run: str
    host: str
    state: RunState
    step: StepRecord | None = None
    sample: Sample | None = None


def exposition(figures: Figures) -> str:
    """Return figures in the text format of Prometheus, version 0.0.4."""
    lines: dict[str, list[str]] = {}
    common = {"run": figures.run, "host": figures.host}
    for name, value, labels in _figures(figures):
        if value is not None:
            shown = ",".join(
                f'{key}="{_escaped(text)}"' for key, text in {**common, **labels}.items()
            )
            lines.setdefault(name, []).append(f"so_tui_{name}{{{shown}}} {_number(value)}")
    return "".join(
        f"# TYPE so_tui_{name} gauge\n" + "\n".join(rows) + "\n" for name, rows in lines.items()
    )


def _figures(figures: Figures) -> Iterator[tuple[str, float | None, dict[str, str]]]:
    """Yield name, value and labels; a value that is None was not measured."""
    state, step, sample = figures.state, figures.step, figures.sample
    yield "state", 1, {"state": state.state}
    yield "attempt", state.attempt, {}
    yield "steps", state.step, {}
    yield "steps_planned", state.total_steps, {}
    yield "saved_step", state.saved_step, {}
    if step is not None:
        yield "step_time_seconds", step.time, {}
        yield "loss", step.loss, {}
        yield "gradient_norm", step.gradient_norm, {}
        yield "learning_rate", step.learning_rate, {}
        yield "useful_tokens_per_second", step.useful_tokens_per_s_total, {}
        yield "model_tflops_per_gpu", step.model_tflops_per_gpu, {}
        yield "mfu_ratio", step.mfu, {}
        yield "step_seconds", step.step_s, {}
        for part in ("data", "forward", "backward", "exposed_optimizer", "other"):
            yield "step_part_seconds", getattr(step, f"{part}_s"), {"part": part}
        yield "gpu_memory_peak_bytes", step.gpu_memory_peak_bytes, {}
        yield "redone_steps", step.redone_steps, {}
        yield "skipped_steps", step.skipped_steps, {}
    if sample is not None:
        yield "run_memory_bytes", sample.run_memory_bytes, {}
        for node in sample.nodes:
            labels = {"node": str(node.id)}
            yield "node_memory_used_bytes", node.memory_used_bytes, labels
            yield (
                "node_cpu_busy_ratio",
                sum(node.cores) / (100 * len(node.cores)) if node.cores else None,
                labels,
            )
        for gpu in sample.gpus:
            labels = {"gpu": str(gpu.index)}
            yield (
                "gpu_busy_ratio",
                None if gpu.busy_percent is None else gpu.busy_percent / 100,
                labels,
            )
            yield "gpu_memory_used_bytes", gpu.memory_used_bytes, labels
            yield "gpu_power_watts", gpu.power_w, labels
            yield "gpu_temperature_celsius", gpu.temperature_c, labels
            yield "gpu_clock_hertz", None if gpu.clock_mhz is None else gpu.clock_mhz * 1e6, labels


def _escaped(text: str) -> str:
    return printable_line(text).replace("\\", "\\\\").replace('"', '\\"')


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


class Endpoint:
    """Answers ``GET /metrics`` with the figures that were published last."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self.port: int = server.server_address[1]
        threading.Thread(
            target=server.serve_forever,
            kwargs={"poll_interval": 1.0},
            name="prometheus",
            daemon=True,
        ).start()

    def publish(self, figures: Figures) -> None:
        """Answer with these figures from now on."""
        self._server.figures = figures

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


def open_endpoint(settings: PrometheusSettings) -> Endpoint | None:
    """Listen where the settings say, and log that, or why not. Return None if that is nowhere."""
    if not settings.token:
        log_line(
            "no figures for Prometheus: prometheus.token is not set, and everybody on this host could ask"
        )
        return None
    for port in range(settings.port, min(settings.port + PORTS, 1 << 16)):
        with contextlib.suppress(OSError):
            endpoint = Endpoint(_Server(port, settings.token))
            log_line(f"figures for Prometheus at http://127.0.0.1:{port}/metrics")
            return endpoint
    log_line(
        f"no figures for Prometheus: ports {settings.port} to {settings.port + PORTS - 1} are taken"
    )
    return None


class _Server(ThreadingMixIn, HTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, port: int, token: str) -> None:
        self.figures: Figures | None = None
        self._token = token.encode()
        self._free = threading.BoundedSemaphore(_MOST_REQUESTS)
        super().__init__(("127.0.0.1", port), _Handler)

    def server_bind(self) -> None:
        socket_server_bind = super(HTTPServer, self).server_bind
        socket_server_bind()  # HTTPServer's own also asks the resolver for the name of this host, which may take long
        self.server_name, self.server_port = "localhost", int(self.server_address[1])

    def allows(self, authorization: str) -> bool:
        """Return whether a request may be answered, in a time that says nothing about the token."""
        given = authorization.removeprefix(_BEARER) if authorization.startswith(_BEARER) else ""
        return hmac.compare_digest(given.encode(errors="replace"), self._token)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        over = threading.Timer(
            _LONGEST_REQUEST_S, _cut, (request,)
        )  # a timeout of each read would let one byte at a time hold a thread
        over.daemon = True
        over.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            over.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a connection that breaks off is no event of the run."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "so-tui"
    sys_version = ""
    timeout = _LONGEST_REQUEST_S

    def do_GET(self) -> None:
        if not self.server.allows(self.headers.get("Authorization", "")):
            self._answer(401, "a bearer token is needed\n", ("WWW-Authenticate", "Bearer"))
        elif self.path.partition("?")[0] != "/metrics":
            self._answer(404, "only /metrics is here\n")
        else:
            figures = self.server.figures
            self._answer(
                200,
                exposition(figures) if figures is not None else "",
                ("Content-Type", CONTENT_TYPE),
            )

    def _answer(self, code: int, text: str, *headers: tuple[str, str]) -> None:
        body = text.encode(errors="replace")
        self.send_response(code)
        for name, value in (*headers, ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log no requests: others on the host could fill the disk."""


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
