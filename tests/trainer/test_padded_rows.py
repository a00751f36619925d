"""Rows as DeepSpeed's SuperOffload example has them: filled up, and all of that trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from so_tui.plan import workload
from so_tui.runs.records import StepRecord
from so_tui.spec import RunSpec, with_values
from so_tui.spec.presets import as_published
from so_tui_trainer.data import documents, tokens
from so_tui_trainer.data.batches import Batches
from so_tui_trainer.model import attention
from so_tui_trainer.model.config import load_config
from so_tui_trainer.model.trained import TrainedModel
from tests.support.attention import PLAIN
from tests.support.launching import log, of_kind, tiny, train
from tests.support.models import causal_model
from tests.support.problems import rejected

LENGTH = 96
STEPS = 4
SHORT = {
    "data__sequence_length": str(LENGTH),
    "train__micro_batch": "3",
    "train__steps": str(STEPS),
    "checkpoint__at_end": "false",
    "offload__mode": "zerooffload",
}
ROWS = [
    {
        "instruction": f"Name {number} towns by the sea.",
        "input": "On the coast of Peru\n" if number % 2 else " ",
        "output": ", ".join(["Callao", "Ilo", "Paita"] * (1 + number % 3 + 8 * (number == 7))),
    }
    for number in range(12)
]


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    rows = tmp_path / "towns.json"
    rows.write_text(json.dumps(ROWS))
    return with_values(
        as_published(tiny(gpus="1")),
        {"data.source": str(rows)} | {name.replace("__", "."): it for name, it in SHORT.items()},
    )


def text_of(row: dict[str, str]) -> str:
    parts = ["### Instruction:\n", row["instruction"], "\n\n"]
    if row["input"].strip():
        parts += ["### Input:\n", row["input"], "\n\n"]
    return "".join([*parts, "### Response:\n", row["output"]])


def encoded(tokenizer: PreTrainedTokenizerBase) -> list[dict[str, torch.Tensor]]:
    """All rows as transformers fills them up."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    options: dict[str, Any] = {"truncation": True, "max_length": LENGTH, "padding": "max_length"}
    return [tokenizer(text_of(row), return_tensors="pt", **options) for row in ROWS]


def steps_of(
    batches: Batches, rows: list[dict[str, torch.Tensor]], steps: int
) -> Iterator[dict[str, torch.Tensor]]:
    """What the script gives its model in each step, for the rows that the trainer takes."""
    held = batches._documents
    for step in range(1, steps + 1):
        sequences = batches._indices(3 * (step - 1), 3)
        members = [int(held.rows[batches.sequences.of(int(at))[0]]) - 1 for at in sequences]
        joined = {
            name: torch.cat([rows[at][name] for at in members])
            for name in ("input_ids", "attention_mask")
        }
        yield joined | {"labels": joined["input_ids"]}


def batches_of(spec: RunSpec, folder: Path) -> Batches:
    return Batches(documents.read(tokens.prepare(spec, folder), spec.data), spec, 0)


def test_rows_are_filled_up_and_all_of_them_trained(spec: RunSpec, tmp_path: Path) -> None:
    batches = batches_of(spec, tmp_path / "cache")
    held = batches._documents
    rows = encoded(tokens.load_tokenizer(spec.model))
    assert held.counts.truncated == sum(int(row["attention_mask"].sum()) == LENGTH for row in rows)
    for step, given in enumerate(steps_of(batches, rows, STEPS), 1):
        (batch,) = batches.micro_batches(step)
        assert torch.equal(batch.input_ids, given["input_ids"])
        assert torch.equal(batch.real.long(), given["attention_mask"])
        assert torch.equal(batch.targets, given["input_ids"][:, 1:].flatten())
        counts = batches.counts(step)
        assert counts.trained_tokens == 3 * (LENGTH - 1)
        assert counts.computed_tokens == 3 * LENGTH
        assert counts.useful_tokens == int(given["attention_mask"].sum())
    known = workload.seen(spec)
    assert known is not None
    own = float(held.lengths.sum()) / (len(ROWS) * LENGTH)
    assert known.workload.useful_share == pytest.approx(own)
    assert known.workload.trained_share == pytest.approx((LENGTH - 1) / LENGTH)
    assert known.workload.row_share(3) == 1


@pytest.mark.slow
def test_losses_are_those_of_the_script(spec: RunSpec, tmp_path: Path) -> None:
    """In plain transformers and torch, on the same weights and rows."""
    causal_model(load_config(spec.model), torch.bfloat16).save_pretrained(tmp_path / "model")
    weights = {
        "model.id": str(tmp_path / "model"),
        "model.weights": "pretrained",
        "model.tokenizer": spec.model.tokenizer or spec.model.id,
    }
    asked = with_values(spec, weights)
    run, code = train(asked, tmp_path / "runs")
    assert code == 0, log(run)
    ours = [step.loss for step in of_kind(run, StepRecord)]

    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    exact = [parameter.detach().float().clone() for parameter in model.parameters()]
    adam = torch.optim.AdamW(exact, lr=1e-3, weight_decay=0.0)
    losses = []
    rows = encoded(tokens.load_tokenizer(spec.model))
    for given in steps_of(batches_of(asked, tmp_path / "cache"), rows, STEPS):
        loss = model(**given).loss
        loss.backward()
        for master, parameter in zip(exact, model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(exact, 1.0)  # DeepSpeed's default
        adam.step()
        with torch.no_grad():
            for master, parameter in zip(exact, model.parameters(), strict=True):
                parameter.copy_(master)
        losses.append(loss.item())
    assert ours[0] == pytest.approx(losses[0], rel=1e-4)
    assert ours == pytest.approx(losses, rel=2e-3)
    assert losses[-1] < 0.9 * losses[0], "updates must show in the losses"


def test_padding_attends_to_nothing_with_kernels_that_take_boundaries(
    spec: RunSpec, tmp_path: Path
) -> None:
    """As with transformers' flash attention, which computes no padding: its result is 0 there, and
    own tokens do not change.
    """
    config = load_config(spec.model)
    (batch,) = batches_of(spec, tmp_path / "cache").micro_batches(1)
    causal = causal_model(config, torch.float32)
    losses = {}
    own = batch.real.flatten()
    for name in ("sdpa", attention.register(PLAIN)):
        causal.set_attn_implementation(name)
        hidden = causal.model(
            input_ids=batch.input_ids,
            use_cache=False,
            **attention.arguments(batch, name, causal.config, torch.float32),
        ).last_hidden_state.flatten(0, 1)
        losses[name] = hidden
        if name != "sdpa":
            padding = hidden[~own]
            assert torch.allclose(padding, padding[:1].expand_as(padding), atol=1e-5)
            loss = TrainedModel(causal, name)(batch, 1 / len(batch.targets))
            loss.backward()
            assert all(
                torch.isfinite(parameter.grad).all()
                for parameter in causal.parameters()
                if parameter.grad is not None
            )
    masked, kernels = losses.values()
    assert torch.allclose(masked[own], kernels[own], atol=1e-4)
    assert np.isfinite(kernels.detach().numpy()).all()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"data.packing": "true"}, "padded-packing"),
        ({"train.sequence_parallel": "2", "gpus": "2"}, "padded-sequence-parallel"),
    ],
)
def test_rows_that_cannot_be_filled_up_alone_are_refused(change: dict[str, str], code: str) -> None:
    with rejected(code):
        with_values(as_published(tiny()), change)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"pad_token": None, "eos_token": None}, "data-no-padding-token"),
        ({"pad_token": "<pad>", "padding_side": "left"}, "data-padding-side"),
    ],
)
def test_tokenizers_that_cannot_fill_rows_up_are_refused(
    spec: RunSpec, changes: dict[str, Any], code: str
) -> None:
    tokenizer = tokens.load_tokenizer(spec.model)
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    with rejected(code):
        documents.padding_of(tokenizer, spec.data)
