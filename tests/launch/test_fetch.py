"""Downloads by the real clients, from a hub on loopback, and presets from hub ids."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from so_tui.launch.helper import stream_tool
from so_tui.launch.helper_jobs import describe_model
from so_tui.spec import InputError, RunSpec, resolve_source, spec_tree
from tests.support.hub import TOKEN, Hub, loopback_hub
from tests.support.launching import tiny
from tests.support.problems import codes, rejected

pytest.importorskip("transformers")
pytestmark = pytest.mark.system
CHUNK_BYTES = 10 << 20
"""What the hub's client writes, and resumes from, at once."""
WEIGHTS_BYTES = CHUNK_BYTES + (1 << 20)
MODEL = {
    name: Path(resolve_source(f"builtin:tiny/{name}")).read_bytes()
    for name in ("tokenizer.json", "tokenizer_config.json")
}
MODEL |= {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": bytes(WEIGHTS_BYTES),
    "pytorch_model.bin": b"a program",
}
ROWS = Path(resolve_source("builtin:tiny/rows.jsonl")).read_bytes()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with loopback_hub(tmp_path / "cache") as found:
        found.add("datasets", "owner/rows", {"train.jsonl": ROWS})
        yield found


def fetch(**changes: str) -> list[dict[str, Any]]:
    """Fetch ``owner/model`` and ``owner/rows``, and return what was reported."""
    needed = {"model__id": "owner/model", "model__weights": "pretrained"}
    spec: RunSpec = tiny(**needed | {"data__source": "owner/rows"} | changes)
    return list(stream_tool("fetch", {"spec": spec_tree(spec)}))


def refused(**changes: str) -> list[str]:
    """Return the codes of the problems of a fetch that must fail."""
    with pytest.raises(InputError) as caught:
        fetch(**changes)
    return codes(caught)


def test_everything_is_downloaded_once(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = MODEL | {"chat_template.jinja": b"{{ messages }}"}
    first, _ = hub.add("models", "owner/model", MODEL, newer, tag="v1")
    hub.cuts["model.safetensors"] = [CHUNK_BYTES + 1]
    told = fetch(model__revision="v1")
    wanted = sum(len(content) for name, content in MODEL.items() if name != "pytorch_model.bin")
    assert (told[0]["total_bytes"], told[-1]["bytes"]) == (wanted, wanted)
    steps = [event["done_bytes"] for event in told if "done_bytes" in event]
    assert steps == sorted(steps)
    partial = (event["done_bytes"] for event in told if event.get("partial"))
    assert any(CHUNK_BYTES < done < wanted for done in partial)
    weights = hub.downloads("model.safetensors")
    asked = [(request.status, request.range) for request in weights]
    assert asked == [(200, ""), (206, f"bytes={CHUNK_BYTES}-")]
    assert all(first in request.path for request in weights), "not the newest revision"
    assert hub.downloads("train.jsonl")
    assert not hub.downloads("pytorch_model.bin"), "pickled weights stay on the hub"

    hub.asked.clear()
    assert fetch(model__revision="v1")[-1]["bytes"] == 0
    assert not hub.downloads("model.safetensors")
    assert not hub.downloads("train.jsonl")

    assert fetch()[-1]["done"]
    assert [asked.status for asked in hub.downloads("chat_template.jinja")] == [200]
    assert not hub.downloads("model.safetensors"), "a newer revision has the same weights"

    hub.asked.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch()[-1]["done"], "what is in the cache needs no network"
    assert hub.asked == []
    assert refused(model__id="owner/other") == ["hub-unreachable"]


def test_a_connection_that_is_always_lost(hub: Hub) -> None:
    hub.add("models", "owner/model", MODEL)
    hub.cuts["model.safetensors"] = [0] * 20
    assert refused() == ["download-failed"]
    assert len(hub.downloads("config.json")) == 1
    hub.cuts.clear()
    hub.asked.clear()
    assert fetch()[-1]["done"]
    assert not hub.downloads("config.json"), "complete files were kept"


def test_gated_models_need_a_token_with_access(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("models", "owner/model", MODEL, gated=True)
    assert refused() == ["hub-access-denied"]
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    assert refused() == ["hub-access-denied"]
    assert {asked.status for asked in hub.asked if "resolve" in asked.path} == {401, 403}
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert fetch()[-1]["done"]
    cached = (path for path in Path(os.environ["HF_HOME"]).rglob("*") if path.is_file())
    assert not any(TOKEN.encode() in path.read_bytes() for path in cached), "no token is kept"


def test_what_is_not_on_the_hub(hub: Hub) -> None:
    hub.add("models", "owner/model", MODEL)
    assert refused(model__revision="v9") == ["hub-revision-missing"]
    assert refused(model__id="owner/absent") == ["hub-model-missing"]


def test_preset_from_a_model_of_the_hub(hub: Hub) -> None:
    shape = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2}
    config = json.dumps({"model_type": "llama", "num_attention_heads": 4} | shape).encode()
    hub.add("models", "owner/open", {"model.safetensors": b"w", "config.json": config})
    hub.add("models", "owner/bare", {"model.safetensors": b"w"})
    spec, notes = describe_model("owner/open")
    assert (spec.model.id, spec.name) == ("owner/open", "open")
    assert spec.model.parameter_count > 0
    assert notes == ()
    hub.add("models", "owner/gated", {"config.json": config}, gated=True)
    refusals = {
        "owner/bare": "model-config-missing",
        "owner/gated": "hub-access-denied",
        "owner/absent": "hub-model-missing",
    }
    for name, code in refusals.items():
        with rejected(code):
            describe_model(name)
