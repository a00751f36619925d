"""Presets from hub ids, against a hub of our own that answers as the real one does: the helper process asks it over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from so_tui.launch.new_preset import describe_model
from so_tui.spec import InputError

pytest.importorskip("transformers")
CONFIG = json.dumps(
    {"model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
).encode()


class Hub(BaseHTTPRequestHandler):
    """``owner/open`` has a config.json, ``owner/gated`` shows its page but no file, ``owner/bare`` has none; nothing else is there."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/owner/"):
            name = path.split("/")[4]
            if name in ("gated", "bare", "open"):
                files = [
                    {"rfilename": "model.safetensors", "size": 1},
                    *([{"rfilename": "config.json", "size": 1}] if name != "bare" else []),
                ]
                return self._answer(200, json.dumps({"id": f"owner/{name}", "sha": "a" * 40, "siblings": files}).encode())
            return self._answer(404, b"{}", "RepoNotFound")
        if path.startswith("/owner/open/resolve/") and path.endswith("/config.json"):
            return self._answer(200, CONFIG)
        if path.startswith("/owner/gated/"):
            return self._answer(403, b"{}", "GatedRepo")
        if path.startswith(("/owner/open/", "/owner/bare/")):
            return self._answer(404, b"{}", "EntryNotFound")
        return self._answer(404, b"{}", "RepoNotFound")

    def do_HEAD(self) -> None:
        self.do_GET()

    def _answer(self, status: int, body: bytes, error: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", "a" * 40)
        self.send_header("ETag", '"abc"')
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
        for name in ("HF_HUB_OFFLINE", "HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield
        server.shutdown()


def test_a_model_of_the_hub() -> None:
    described = describe_model("owner/open")
    assert described.spec.model.id == "owner/open"
    assert described.spec.name == "open"
    assert described.spec.model.parameter_count > 0
    assert described.notes == ()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("owner/gated", "is gated, and this user has no access. Accept its terms"),
        ("owner/absent", "is not on the hub, or private"),
        ("owner/bare", "has no config.json on the hub"),
    ],
)
def test_what_the_hub_refuses(model: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        describe_model(model)
    assert words in str(caught.value)
