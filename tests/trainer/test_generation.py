"""How a model writes: how tokens are chosen and become text, when an answer ends, what it is given;
and during training the answers that it gives alone, whatever shares a batch.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import PreTrainedModel

from so_tui.runs import create_run
from so_tui.runs.results import MOST_ASKED, AnsweredPrompt, Asked, add_answers, read_answers
from so_tui.spec import ModelSpec, RunSpec
from so_tui.spec.generation import LoadModel, Prompt, Sampling, Turn
from so_tui_trainer.data.chat import Chat, chat_of
from so_tui_trainer.data.encoder import Encoder, leading_ids
from so_tui_trainer.data.spans import documents_of
from so_tui_trainer.data.tokens import load_tokenizer
from so_tui_trainer.data.turns import TEXT, Message
from so_tui_trainer.export import _marker_of, of_folder, placed
from so_tui_trainer.generation import (
    Prompts,
    Writer,
    Written,
    _batch_of,
    _Detokenizer,
    _next_token,
    _prompt_ids,
    stop_tokens,
)
from so_tui_trainer.model.config import load_config, stored_config
from so_tui_trainer.model.trained import TrainedModel
from so_tui_trainer.model.weights import meta_model
from so_tui_trainer.ranks import Ranks
from so_tui_trainer.tools.generate import _base_of, _in_turn, _of_folder
from tests.support.launching import tiny
from tests.support.models import MULTIMODAL, causal_model
from tests.support.problems import refusal, rejected

GREEDY = Sampling(temperature=0, max_tokens=12)
ASKED = Prompt(turns=(Turn("system", "Be brief."), Turn("user", "Add 2 and 3.")))
TUNED = ModelSpec(id="owner/model", revision="v2")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def chat() -> Chat:
    return chat_of(load_tokenizer(tiny().model))


@pytest.fixture(scope="module")
def templated() -> Chat:
    tokenizer: Any = load_tokenizer(tiny().model)
    tokenizer.chat_template = (
        "{% for m in messages %}<|bos|>{{ m.role }}: {{ m.content }}<|eos|>{% endfor %}"
        "{% if add_generation_prompt %}<|bos|>assistant: {% endif %}"
    )
    return chat_of(tokenizer)


@pytest.fixture(scope="module")
def causal() -> PreTrainedModel:
    torch.manual_seed(1)
    shape = {"num_hidden_layers": 2, "max_position_embeddings": 64, "initializer_range": 0.3}
    model = tiny().model
    return placed(causal_model(load_config(replace(model, config=model.config | shape))), CPU)


@pytest.fixture
def writer(chat: Chat, causal: PreTrainedModel) -> Writer:
    return Writer(causal, chat, frozenset())


def written(parts: Iterator[str | Written]) -> Written:
    *pieces, last = parts
    assert isinstance(last, Written)
    assert "".join(map(str, pieces)) == last.text
    return last


def test_tokens_are_drawn_from_the_most_probable_ones() -> None:
    logits = torch.tensor([0.1, 0.4, 0.3, 0.2]).log()
    source = torch.Generator().manual_seed(0)

    def drawn(temperature: float = 1.0, top_p: float = 1.0) -> Counter[int]:
        sampling = Sampling(temperature=temperature, top_p=top_p)
        return Counter(_next_token(logits, sampling, source) for _ in range(2000))

    everything = drawn()
    shares = [everything[token] / 2000 for token in range(4)]
    assert shares == pytest.approx([0.1, 0.4, 0.3, 0.2], abs=0.05)
    assert set(drawn(temperature=0)) == set(drawn(top_p=0.01)) == {1}
    assert set(drawn(top_p=0.65)) == {1, 2}
    assert drawn(temperature=0.2)[1] > everything[1]


def test_text_comes_in_whole_characters(chat: Chat) -> None:
    text = "Grüße an 日本 and 🙂, then\n\n  indented text."
    detokenizer = _Detokenizer(chat.tokenizer)
    pieces = [detokenizer.add(token) for token in chat.tokenizer(text)["input_ids"]]
    assert "".join(pieces) + detokenizer.rest() == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert sum(map(bool, pieces)) > 10
    cut = _Detokenizer(chat.tokenizer)
    assert [cut.add(token) for token in chat.tokenizer("🙂")["input_ids"][:2]] == ["", ""]
    assert cut.rest() == "\ufffd"


def test_it_writes_what_transformers_generates(writer: Writer) -> None:
    answer = written(writer.write(ASKED, GREEDY))
    ids = torch.tensor([_prompt_ids(writer.chat, ASKED)])
    generate: Any = writer.causal.generate
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = generate(ids, **options)[0, ids.shape[1] :]
    assert len(set(expected.tolist())) > 4
    assert answer.text == writer.chat.tokenizer.decode(
        expected, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert (answer.tokens, answer.ended) == (12, "length")


def test_the_seed_decides(writer: Writer) -> None:
    first, again, other = (
        written(writer.write(ASKED, Sampling(max_tokens=8, seed=seed))).text for seed in (1, 1, 2)
    )
    assert first == again != other


def test_when_an_answer_ends(writer: Writer, chat: Chat) -> None:
    tokens = list(itertools.islice(writer._tokens(_prompt_ids(chat, ASKED), GREEDY), 4))
    assert tokens[3] not in tokens[:3]
    stopped = written(Writer(writer.causal, chat, frozenset(tokens[3:])).write(ASKED, GREEDY))
    assert (stopped.tokens, stopped.ended) == (4, "stop")
    assert stopped.text == chat.tokenizer.decode(tokens[:3], skip_special_tokens=True)
    long = Prompt(text="a " * 50)
    full = written(writer.write(long, Sampling(temperature=0, max_tokens=500)))
    assert (full.ended, full.tokens + len(_prompt_ids(chat, long))) == ("context", 64)
    asked = iter([False, False, True])
    assert written(writer.write(ASKED, GREEDY, lambda: next(asked)))[1::2] == (2, "cancelled")
    problem = refusal(lambda: list(writer.write(Prompt(text="a " * 400), GREEDY)))
    assert problem.code == "prompt-too-long"


def test_weights_that_are_not_finite_are_found(chat: Chat) -> None:
    broken = placed(causal_model(load_config(tiny().model)), CPU)
    with torch.no_grad():
        next(broken.parameters()).fill_(float("nan"))
    problem = refusal(lambda: list(Writer(broken, chat, frozenset()).write(ASKED, GREEDY)))
    assert problem.code == "logits-not-finite"


@pytest.mark.parametrize("layout", ["chat", "templated"])
def test_prompts_are_given_as_in_training(layout: str, request: pytest.FixtureRequest) -> None:
    chat: Chat = request.getfixturevalue(layout)
    leading = leading_ids(chat.tokenizer)
    said = (
        *(Message(turn.role, turn.content) for turn in ASKED.turns),
        Message("assistant", "They make 5."),
        Message("user", "And 7?"),
        Message("assistant", "12."),
    )
    ((tokens, trained),) = Encoder(chat, "last-turn", 256).encode(
        documents_of(chat, said, "last-turn").documents
    )
    asked = Prompt(turns=tuple(Turn(*message[:2]) for message in said[:-1]))  # type: ignore[arg-type]
    context = tokens[: int(np.flatnonzero(trained)[0])].tolist()
    assert _prompt_ids(chat, asked) == [*([] if chat.templated else leading), *context]
    text = (Message(TEXT, "Once upon"),)
    ((tokens, _),) = Encoder(chat, "all", 256).encode(documents_of(chat, text, "all").documents)
    assert _prompt_ids(chat, Prompt(text="Once upon")) == [*leading, *tokens[:-1].tolist()]


def test_nothing_cannot_be_continued(chat: Chat) -> None:
    assert leading_ids(chat.tokenizer) == []
    assert refusal(lambda: _prompt_ids(chat, Prompt(text=""))).code == "prompt-empty"


def test_answers_end_at_any_known_stop_token(templated: Chat, causal: PreTrainedModel) -> None:
    eos: Any = templated.tokenizer.eos_token_id
    assert causal.generation_config is not None
    causal.generation_config.eos_token_id = [7, eos]
    assert stop_tokens(templated, causal.generation_config) == {7, eos}


def test_models_write_in_turn() -> None:
    assert list(_in_turn(iter([iter("abc"), iter("12345")]))) == list("a1b2c345")


def test_only_safetensors_are_read(tmp_path: Path, causal: PreTrainedModel) -> None:
    """A pickle is a program."""
    proof = tmp_path / "proof"
    causal.config.save_pretrained(tmp_path)
    program = f"cbuiltins\nopen\n(V{proof}\nVw\ntR.".encode()
    (tmp_path / "pytorch_model.bin").write_bytes(program)
    problem = refusal(lambda: of_folder(tmp_path, ModelSpec(id=str(tmp_path))))
    assert problem.code == "model-unreadable"
    assert not proof.exists()


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("model.safetensors", b"\0" * 5, "model-unreadable"),
        ("config.json", b'{"model_type": "qwen3", "hidden_size": "x"}', "model-unreadable"),
        ("config.json", b"[" * 200_000, "model-unreadable"),
        ("generation_config.json", b"[]", "generation-config-unreadable"),
        (
            "generation_config.json",
            b'{"watermarking_config": 3}',
            "generation-config-unreadable",
        ),
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
    load: Callable[[ModelSpec], object] = (
        load_tokenizer if code.startswith("tokenizer") else partial(of_folder, tmp_path)
    )
    assert refusal(lambda: load(model)).code == code
    if name == "config.json":
        assert refusal(lambda: load_config(model)).code == "model-config-unreadable"


def test_a_contradicting_shape_is_refused(tmp_path: Path) -> None:
    shape = {"model_type": "qwen3", "num_hidden_layers": 4, "layer_types": ["full_attention"] * 3}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    problem = refusal(lambda: load_config(ModelSpec(id=str(tmp_path))))
    assert (problem.code, problem.field) == ("model-config-unreadable", "model.id")
    assert all(part in problem.message for part in ("layer_types", "num_hidden_layers", "4", "3"))


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize("name", ["someone/kernel", "paged|someone/kernel", "flash_attention_2"])
def test_a_kernel_that_a_model_names_is_not_loaded(
    tmp_path: Path, causal: PreTrainedModel, key: str, name: str
) -> None:
    """A kernel on the hub is a program, too."""
    causal.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: name}))
    model = ModelSpec(id=str(tmp_path))
    for loaded in (of_folder(tmp_path, model), meta_model(load_config(model))):
        assert loaded.config._attn_implementation == "sdpa"


def test_a_kernel_that_a_part_of_a_model_names_is_not_loaded(tmp_path: Path) -> None:
    shape = {"model_type": "gemma3", **MULTIMODAL["gemma3"]}
    for part in ("text_config", "vision_config"):
        shape[part] = shape[part] | {"_attn_implementation": "someone/kernel"}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    config = stored_config(ModelSpec(id=str(tmp_path)))
    parts = (config, config.text_config, config.vision_config)
    assert [part._attn_implementation for part in parts] == 3 * [None]


def test_no_kernel_is_loaded_for_quantised_weights(tmp_path: Path, causal: PreTrainedModel) -> None:
    shape = causal.config.to_dict() | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(shape, default=str))
    config: Any = stored_config(ModelSpec(id=str(tmp_path)))
    assert config.quantization_config["dequantize"]


def test_a_writable_export_names_no_download(tmp_path: Path, causal: PreTrainedModel) -> None:
    folder = tmp_path / "model"
    causal.save_pretrained(folder)
    marker = msgspec.json.encode(_marker_of("run", 5, TUNED))
    (folder / "so_tui_export.json").write_bytes(marker)
    load = LoadModel(folder=str(folder), compare=True)

    def loaded() -> Iterator[Any]:
        yield (yield from _of_folder(load))

    def base() -> ModelSpec:
        *_, (_, model, _, step) = loaded()
        assert step == 5
        return _base_of(load, model)

    assert base() == TUNED
    folder.chmod(0o777)
    assert refusal(base).code == "base-model-unknown"


def test_the_base_model_is_what_the_training_began_with(tmp_path: Path) -> None:
    load, other = LoadModel(run=str(tmp_path)), ModelSpec(id="owner/other")
    assert _base_of(load, TUNED) == TUNED
    assert refusal(lambda: _base_of(load, tiny().model)).code == "base-model-unknown"
    tmp_path.chmod(0o777)  # what others could have written names no download
    assert refusal(lambda: _base_of(load, TUNED)).code == "base-model-unknown"
    assert _base_of(replace(load, base="owner/other"), TUNED) == other
    assert _marker_of("run", 5, TUNED).base == "owner/model"
    assert _marker_of("run", 5, tiny().model).base == ""


TEXTS = ("One?", "Which process uses a port on this machine?", "Show the disks.")


def spec(**changes: str) -> RunSpec:
    asked = {"prompts__texts": json.dumps(TEXTS), "prompts__max_tokens": "10"}
    return tiny(**(asked | {"data__sequence_length": "128"} | changes))


@pytest.fixture(scope="module")
def trained() -> TrainedModel:
    torch.manual_seed(1)
    shape = tiny().model
    small = shape.config | {"num_hidden_layers": 2, "initializer_range": 0.3}
    return TrainedModel(causal_model(load_config(replace(shape, config=small))), "sdpa")


@pytest.fixture
def asked(trained: TrainedModel, single_rank: Ranks) -> Callable[[RunSpec], Asked]:
    def ask(prompts: RunSpec) -> Asked:
        return Prompts(prompts, single_rank, end_to_end=False).ask(trained, attempt=1, step=7)

    return ask


@pytest.mark.parametrize("micro_batch", ["1", "4"])
def test_answers_are_what_the_model_writes_alone(
    micro_batch: str, trained: TrainedModel, chat: Chat, asked: Callable[[RunSpec], Asked]
) -> None:
    eos: Any = chat.tokenizer.eos_token_id
    writer = Writer(trained.causal, chat, frozenset([eos]))
    trained.train()
    found = asked(spec(train__micro_batch=micro_batch))
    assert (trained.training, found.step) == (True, 7)
    for text, answer in zip(TEXTS, found.answers, strict=True):
        prompt = Prompt(turns=(Turn("user", text),))
        alone = written(writer.write(prompt, Sampling(temperature=0, max_tokens=10)))
        assert (answer.prompt, answer.text, answer.tokens) == (text, *alone[:2])


def test_answers_take_no_more_tokens_than_training(
    trained: TrainedModel, asked: Callable[[RunSpec], Asked]
) -> None:
    shared = spec(
        train__micro_batch="4", train__sequence_parallel="2", gpus="2", prompts__max_tokens="100"
    )
    with rejected("prompt-too-long"):
        asked(spec(prompts__texts=json.dumps(["word " * 400])))
    sizes: list[int] = []
    watch = trained.register_forward_pre_hook(
        lambda _, given: sizes.append(given[0].input_ids.numel())
    )
    with watch:
        asked(shared)
    assert 0 < max(sizes) <= shared.micro_batch_tokens == 256


def test_the_seed_of_training_decides_answers(asked: Callable[[RunSpec], Asked]) -> None:
    before = torch.random.get_rng_state()
    one, again, two = (
        asked(spec(prompts__temperature="1", train__seed=seed)).answers for seed in "112"
    )
    assert one == again != two
    assert torch.equal(torch.random.get_rng_state(), before), "training draws as without prompts"


def test_documents_of_one_row_are_told_apart() -> None:
    batch = _batch_of([[1, 2, 3], [4, 5]], end_to_end=True, apart=False)
    assert batch.input_ids[0, :6].tolist() == [1, 2, 3, 4, 5, 0]
    assert batch.position_ids[0, :7].tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert batch.boundaries.tolist() == [0, 3, 5, 64]
    assert batch.predictors.tolist() == [2, 4]
    rows = _batch_of([[1, 2, 3], [4, 5]], end_to_end=False, apart=False)
    assert (rows.input_ids.shape, int(rows.real.sum())) == ((2, 64), 5)
    assert rows.boundaries.tolist() == [0, 3, 64, 66, 128]
    assert rows.predictors.tolist() == [2, 65]


def asked_at(step: int, text: str = "a") -> Asked:
    answer = AnsweredPrompt(prompt="p", text=text, tokens=1, stopped=True)
    return Asked(attempt=1, time=0.0, step=step, seconds=0.1, answers=(answer,))


def test_answers_are_bounded_and_replaced_after_a_resume(tmp_path: Path) -> None:
    run = create_run(tiny(), tmp_path)
    assert read_answers(run).asked == ()
    for step in range(MOST_ASKED + 5):
        add_answers(run, asked_at(step))
    steps = [each.step for each in read_answers(run).asked]
    assert (len(steps), steps[:2]) == (MOST_ASKED, [0, 6])
    add_answers(run, asked_at(50, "again"))
    assert read_answers(run).asked[-1] == asked_at(50, "again")
    assert read_answers(run).asked[-2].step == 49
    run.answers_path.write_text('{"asked": [')
    assert read_answers(run).asked == ()
    run.answers_path.unlink()
    run.answers_path.mkdir()  # what cannot be read is not replaced
    with pytest.raises(OSError, match="answers"):
        add_answers(run, asked_at(60))
