"""How tokens are chosen and become text, when an answer ends, and what a model is given."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import PreTrainedModel

from so_tui.spec import ModelSpec
from so_tui.spec.generation import LoadModel, Prompt, Sampling, Turn
from so_tui_trainer import export
from so_tui_trainer.data.chat import Chat, Encoder, _segments, chat_of, leading_ids
from so_tui_trainer.data.rows import TEXT, Message
from so_tui_trainer.data.tokens import load_tokenizer
from so_tui_trainer.export import _marker_of, placed
from so_tui_trainer.generation import (
    Writer,
    Written,
    _Detokenizer,
    _next_token,
    _prompt_ids,
    stop_tokens,
)
from so_tui_trainer.model.config import load_config
from so_tui_trainer.model.weights import meta_model
from so_tui_trainer.tools.generate import _base_of, _in_turn, _of_folder
from tests.support.launching import tiny
from tests.support.models import causal_model
from tests.support.problems import refusal

GREEDY = Sampling(temperature=0, max_tokens=12)
ASKED = Prompt(turns=(Turn("system", "Be brief."), Turn("user", "Add 2 and 3.")))


@pytest.fixture(scope="module")
def chat() -> Chat:
    return chat_of(load_tokenizer(tiny().model))


@pytest.fixture(scope="module")
def templated() -> Chat:
    tokenizer: Any = load_tokenizer(tiny().model)
    tokenizer.chat_template = (
        "{% for message in messages %}<|bos|>{{ message.role + ': ' + message.content + '<|eos|>' "
        "}}{% endfor %}"
        "{% if add_generation_prompt %}<|bos|>assistant: {% endif %}"
    )
    return chat_of(tokenizer)


@pytest.fixture(scope="module")
def causal() -> PreTrainedModel:
    torch.manual_seed(1)
    return placed(
        causal_model(shape(num_hidden_layers=2, max_position_embeddings=64, initializer_range=0.3)),
        torch.device("cpu"),
    )


def shape(**changes: object) -> Any:
    """The embedded model's configuration, changed."""
    model = tiny().model
    return load_config(replace(model, config=model.config | changes))


def written(parts: Iterator[str | Written]) -> Written:
    *pieces, last = parts
    assert isinstance(last, Written)
    assert "".join(map(str, pieces)) == last.text
    return last


def test_tokens_are_drawn_from_the_most_probable_ones() -> None:
    logits = torch.tensor([0.1, 0.4, 0.3, 0.2]).log()
    source = torch.Generator().manual_seed(0)

    def drawn(**changes: float) -> Counter[int]:
        sampling = Sampling(
            temperature=changes.get("temperature", 1.0), top_p=changes.get("top_p", 1.0)
        )
        return Counter(_next_token(logits, sampling, source) for _ in range(2000))

    assert set(drawn(temperature=0)) == {1}
    everything = drawn()
    assert [everything[token] / 2000 for token in range(4)] == pytest.approx(
        [0.1, 0.4, 0.3, 0.2], abs=0.05
    )
    assert set(drawn(top_p=0.65)) == {1, 2}
    assert set(drawn(top_p=0.01)) == {1}
    assert drawn(temperature=0.2)[1] > everything[1]


def test_text_comes_in_whole_characters(chat: Chat) -> None:
    text = "Grüße an 日本 and 🙂, then\n\n  indented text."
    detokenizer = _Detokenizer(chat.tokenizer)
    pieces = [detokenizer.add(token) for token in chat.tokenizer(text)["input_ids"]]
    assert "".join(pieces) + detokenizer.rest() == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert sum(map(bool, pieces)) > 10


def test_an_unfinished_character_is_given_at_the_end(chat: Chat) -> None:
    detokenizer = _Detokenizer(chat.tokenizer)
    assert [detokenizer.add(token) for token in chat.tokenizer("🙂")["input_ids"][:2]] == ["", ""]
    assert detokenizer.rest() == "\ufffd"


def test_it_writes_what_transformers_generates(chat: Chat, causal: PreTrainedModel) -> None:
    writer = Writer(causal, chat, frozenset())
    answer = written(writer.write(ASKED, GREEDY))
    ids = torch.tensor([_prompt_ids(chat, ASKED)])
    generate: Any = causal.generate
    expected = generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)[
        0, ids.shape[1] :
    ]
    assert len(set(expected.tolist())) > 4
    assert answer.text == chat.tokenizer.decode(
        expected, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert (answer.tokens, answer.ended) == (12, "length")


def test_the_seed_decides(chat: Chat, causal: PreTrainedModel) -> None:
    writer = Writer(causal, chat, frozenset())
    first, again, other = (
        written(writer.write(ASKED, Sampling(max_tokens=8, seed=seed))).text for seed in (1, 1, 2)
    )
    assert first == again != other


def test_when_an_answer_ends(chat: Chat, causal: PreTrainedModel) -> None:
    tokens = list(
        itertools.islice(
            Writer(causal, chat, frozenset())._tokens(_prompt_ids(chat, ASKED), GREEDY), 4
        )
    )
    assert tokens[3] not in tokens[:3]
    stopped = written(Writer(causal, chat, frozenset(tokens[3:])).write(ASKED, GREEDY))
    assert (stopped.tokens, stopped.ended) == (4, "stop")
    assert stopped.text == chat.tokenizer.decode(tokens[:3], skip_special_tokens=True)
    writer = Writer(causal, chat, frozenset())
    full = written(writer.write(Prompt(text="a " * 50), Sampling(temperature=0, max_tokens=500)))
    assert full.ended == "context"
    assert full.tokens + len(_prompt_ids(chat, Prompt(text="a " * 50))) == 64
    asked = iter([False, False, True])
    assert written(writer.write(ASKED, GREEDY, lambda: next(asked)))[1::2] == (2, "cancelled")
    assert (
        refusal(lambda: list(writer.write(Prompt(text="a " * 400), GREEDY))).code
        == "prompt-too-long"
    )


def test_weights_that_are_not_finite_are_found(chat: Chat) -> None:
    torch.manual_seed(1)
    broken = placed(causal_model(shape(num_hidden_layers=1)), torch.device("cpu"))
    with torch.no_grad():
        next(broken.parameters()).fill_(float("nan"))
    assert (
        refusal(lambda: list(Writer(broken, chat, frozenset()).write(ASKED, GREEDY))).code
        == "logits-not-finite"
    )


@pytest.mark.parametrize("layout", ["chat", "templated"])
def test_questions_are_given_as_in_training(layout: str, request: pytest.FixtureRequest) -> None:
    chat: Chat = request.getfixturevalue(layout)
    said = [
        ("system", "Be brief."),
        ("user", "Add 2 and 3."),
        ("assistant", "They make 5."),
        ("user", "And 7?"),
        ("assistant", "12."),
    ]
    (tokens, trained), *_ = Encoder(chat, "last-turn", 256).encode(
        [_segments(chat, tuple(Message(*turn) for turn in said), "last-turn")]
    )
    asked = Prompt(turns=tuple(Turn(role, content) for role, content in said[:-1]))  # type: ignore[arg-type]
    leading = [] if chat.templated else leading_ids(chat.tokenizer)
    context = tokens[: int(np.flatnonzero(trained)[0])].tolist()
    assert _prompt_ids(chat, asked) == [*leading, *context]


def test_text_is_continued_as_it_is(chat: Chat, templated: Chat) -> None:
    (tokens, _), *_ = Encoder(chat, "all", 256).encode(
        [_segments(chat, (Message(TEXT, "Once upon"),), "all")]
    )
    for each in (chat, templated):
        assert _prompt_ids(each, Prompt(text="Once upon")) == [
            *leading_ids(chat.tokenizer),
            *tokens[:-1].tolist(),
        ]


def test_nothing_cannot_be_continued(chat: Chat) -> None:
    assert leading_ids(chat.tokenizer) == []
    assert refusal(lambda: _prompt_ids(chat, Prompt(text=""))).code == "prompt-empty"


def test_answers_end_at_any_known_stop_token(templated: Chat, causal: PreTrainedModel) -> None:
    eos = templated.tokenizer.eos_token_id
    assert isinstance(eos, int)
    assert causal.generation_config is not None
    causal.generation_config.eos_token_id = [7, eos]
    assert stop_tokens(templated, causal.generation_config) == {7, eos}


def test_models_write_in_turn() -> None:
    assert list(_in_turn(iter([iter("abc"), iter("12345")]))) == list("a1b2c345")


def test_only_safetensors_are_read(tmp_path: Path, causal: PreTrainedModel) -> None:
    """A pickle is a program."""
    proof = tmp_path / "proof"
    causal.config.save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(
        b"cbuiltins\nopen\n(V" + str(proof).encode() + b"\nVw\ntR."
    )
    assert (
        refusal(lambda: export.of_folder(tmp_path, ModelSpec(id=str(tmp_path)))).code
        == "model-unreadable"
    )
    assert not proof.exists()


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("model.safetensors", b"\0" * 5, "model-unreadable"),
        ("config.json", b'{"model_type": "qwen3", "hidden_size": "x"}', "model-unreadable"),
        ("config.json", b"[1]", "model-unreadable"),
        ("config.json", b"[" * 200_000, "model-unreadable"),
        ("tokenizer_config.json", b"[]", "tokenizer-unreadable"),
    ],
)
def test_a_damaged_folder_is_named(
    name: str, content: bytes, code: str, tmp_path: Path, causal: PreTrainedModel
) -> None:
    causal.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[]")
    (tmp_path / name).write_bytes(content)
    model = ModelSpec(id=str(tmp_path))
    load: Callable[[], object] = (
        partial(load_tokenizer, model)
        if code.startswith("tokenizer")
        else partial(export.of_folder, tmp_path, model)
    )
    assert refusal(load).code == code
    if name == "config.json":
        assert refusal(lambda: load_config(model)).code == "model-config-unreadable"


@pytest.mark.parametrize("weights", ["pretrained", "random"])
def test_a_contradicting_shape_is_refused(
    weights: Literal["pretrained", "random"], tmp_path: Path
) -> None:
    shape = {"model_type": "qwen3", "num_hidden_layers": 4, "layer_types": ["full_attention"] * 3}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    problem = refusal(
        lambda: load_config(ModelSpec(id=str(tmp_path), weights=weights, config=shape))
    )
    assert (problem.code, problem.field) == (
        "model-config-unreadable",
        "model.config" if weights == "random" else "model.id",
    )
    assert all(part in problem.message for part in ("layer_types", "num_hidden_layers", "4", "3"))


def test_a_kernel_that_a_model_names_is_not_loaded(tmp_path: Path, causal: PreTrainedModel) -> None:
    """A kernel on the hub is a program, too."""
    causal.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"attn_implementation": "someone/kernel"})
    )
    model = ModelSpec(id=str(tmp_path))
    assert export.of_folder(tmp_path, model).config._attn_implementation == "sdpa"
    assert meta_model(load_config(model)).config._attn_implementation == "sdpa"


def test_a_writable_export_names_no_download(tmp_path: Path, causal: PreTrainedModel) -> None:
    folder = tmp_path / "model"
    causal.save_pretrained(folder)
    marker = _marker_of("run", 5, ModelSpec(id="owner/model", revision="v2"))
    (folder / "so_tui_export.json").write_bytes(msgspec.json.encode(marker))
    load = LoadModel(folder=str(folder), compare=True)

    def base() -> ModelSpec:
        steps = _of_folder(load)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                _, model, _, step = end.value
                assert step == 5
                return _base_of(load, model)

    assert base() == ModelSpec(id="owner/model", revision="v2")
    folder.chmod(0o777)
    assert refusal(base).code == "base-model-unknown"


def test_the_base_model_is_what_the_training_began_with(tmp_path: Path) -> None:
    tuned, run = ModelSpec(id="owner/model", revision="v2"), str(tmp_path)
    assert _base_of(LoadModel(run=run), tuned) == tuned
    assert _base_of(LoadModel(run=run, base="owner/other"), tuned) == ModelSpec(id="owner/other")
    assert refusal(lambda: _base_of(LoadModel(run=run), tiny().model)).code == "base-model-unknown"
    assert _marker_of("run", 5, tuned).base == "owner/model"
    assert _marker_of("run", 5, tiny().model).base == ""


def test_a_writable_run_names_no_download(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    load = LoadModel(run=str(tmp_path))
    assert refusal(lambda: _base_of(load, ModelSpec(id="owner/model"))).code == "base-model-unknown"
    assert _base_of(replace(load, base="owner/model"), ModelSpec(id="owner/model")) == ModelSpec(
        id="owner/model"
    )
