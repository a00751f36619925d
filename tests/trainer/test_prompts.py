"""Answers during training: those that the model gives alone, whatever shares a batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from so_tui.runs import create_run
from so_tui.runs.results import MOST_ASKED, AnsweredPrompt, Asked, add_answers, read_answers
from so_tui.spec import RunSpec
from so_tui.spec.generation import Prompt, Sampling, Turn
from so_tui_trainer.data.chat import chat_of
from so_tui_trainer.data.tokens import load_tokenizer
from so_tui_trainer.generation import Prompts, Writer, _batch_of
from so_tui_trainer.model.config import load_config
from so_tui_trainer.model.trained import TrainedModel
from so_tui_trainer.ranks import Ranks
from tests.support.launching import tiny
from tests.support.models import causal_model
from tests.support.problems import refusal

TEXTS = ("One?", "Which process uses a port on this machine?", "Show the disks.")


def spec(**changes: str) -> RunSpec:
    asked = {"prompts__texts": json.dumps(TEXTS), "prompts__max_tokens": "10"}
    return tiny(**(asked | {"data__sequence_length": "128"} | changes))


@pytest.fixture(scope="module")
def model() -> TrainedModel:
    torch.manual_seed(1)
    shape = tiny().model
    small = shape.config | {"num_hidden_layers": 2, "initializer_range": 0.3}
    return TrainedModel(causal_model(load_config(replace(shape, config=small))), "sdpa")


@pytest.mark.parametrize("micro_batch", ["1", "4"])
def test_answers_are_what_the_model_writes_alone(
    micro_batch: str, model: TrainedModel, single_rank: Ranks
) -> None:
    chat = chat_of(load_tokenizer(tiny().model))
    eos: Any = chat.tokenizer.eos_token_id
    writer, greedy = (
        Writer(model.causal, chat, frozenset([eos])),
        Sampling(temperature=0, max_tokens=10),
    )
    prompts = Prompts(spec(train__micro_batch=micro_batch), single_rank, end_to_end=False)
    model.train()
    asked = prompts.ask(model, attempt=1, step=7)
    assert (model.training, asked.step) == (True, 7)
    for text, answer in zip(TEXTS, asked.answers, strict=True):
        *_, alone = writer.write(Prompt(turns=(Turn("user", text),)), greedy)
        assert (answer.prompt, answer.text, answer.tokens) == (text, *alone[:2])


def test_answers_take_no_more_tokens_than_training(model: TrainedModel, single_rank: Ranks) -> None:
    shared = spec(
        train__micro_batch="4", train__sequence_parallel="2", gpus="2", prompts__max_tokens="100"
    )
    sizes: list[int] = []
    watch = model.register_forward_pre_hook(
        lambda _, given: sizes.append(given[0].input_ids.numel())
    )
    try:
        Prompts(shared, single_rank, end_to_end=False).ask(model, attempt=1, step=1)
    finally:
        watch.remove()
    assert 0 < max(sizes) <= shared.micro_batch_tokens == 256


def test_the_seed_decides_where_tokens_are_drawn(model: TrainedModel, single_rank: Ranks) -> None:
    def answers(seed: str) -> tuple[AnsweredPrompt, ...]:
        drawn = spec(prompts__temperature="1", train__seed=seed)
        return Prompts(drawn, single_rank, end_to_end=False).ask(model, attempt=1, step=1).answers

    before = torch.random.get_rng_state()
    assert answers("1") == answers("1") != answers("2")
    assert torch.equal(torch.random.get_rng_state(), before), "training draws as without prompts"


def test_a_prompt_needs_room_for_its_answer(single_rank: Ranks) -> None:
    long = spec(prompts__texts=json.dumps(["word " * 400]))
    assert refusal(lambda: Prompts(long, single_rank, end_to_end=False)).code == "prompt-too-long"


def test_documents_of_one_row_are_told_apart() -> None:
    batch = _batch_of([[1, 2, 3], [4, 5]], end_to_end=True)
    assert batch.input_ids[0, :6].tolist() == [1, 2, 3, 4, 5, 0]
    assert batch.position_ids[0, :7].tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert batch.boundaries.tolist() == [0, 3, 5, 64]
    assert batch.predictors.tolist() == [2, 4]
    rows = _batch_of([[1, 2, 3], [4, 5]], end_to_end=False)
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


def test_answers_that_cannot_be_read_are_not_replaced(tmp_path: Path) -> None:
    run = create_run(tiny(), tmp_path)
    run.answers_path.mkdir()
    assert read_answers(run).asked == ()
    with pytest.raises(OSError, match="answers"):
        add_answers(run, asked_at(1))
    assert run.answers_path.is_dir()
