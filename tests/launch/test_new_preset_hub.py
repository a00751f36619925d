"""Presets from hub ids: the helper process asks a hub on loopback over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from so_tui.launch.helper_jobs import describe_model
from tests.support.hub import PROXIES, loopback_hub
from tests.support.problems import rejected

pytest.importorskip("transformers")
pytestmark = pytest.mark.system
CONFIG = json.dumps(
    {
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
).encode()


@pytest.fixture(autouse=True)
def _hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with loopback_hub() as hub:
        hub.add("models", "owner/open", {"model.safetensors": b"w", "config.json": CONFIG})
        hub.add(
            "models", "owner/gated", {"model.safetensors": b"w", "config.json": CONFIG}, gated=True
        )
        hub.add("models", "owner/bare", {"model.safetensors": b"w"})
        for name, value in hub.environment(tmp_path / "cache").items():
            monkeypatch.setenv(name, value)
        for name in ("HF_HUB_OFFLINE", "HF_TOKEN", *PROXIES):
            monkeypatch.delenv(name, raising=False)
        yield


def test_a_model_of_the_hub() -> None:
    described = describe_model("owner/open")
    assert described.spec.model.id == "owner/open"
    assert described.spec.name == "open"
    assert described.spec.model.parameter_count > 0
    assert described.notes == ()


@pytest.mark.parametrize(
    ("model", "code"),
    [
        ("owner/gated", "hub-access-denied"),
        ("owner/absent", "hub-model-missing"),
        ("owner/bare", "model-config-missing"),
    ],
)
def test_what_the_hub_refuses(model: str, code: str) -> None:
    with rejected(code):
        describe_model(model)
