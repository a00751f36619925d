"""Packed documents, the chunked loss and its weights give what the plain computation gives, loss and gradients."""

import pytest
import torch
from launching import tiny
from test_batches import documents, spec
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from so_tui_trainer import loss as loss_module
from so_tui_trainer.batches import Batches
from so_tui_trainer.loss import HeadLoss
from so_tui_trainer.model import TrainedModel, expected_first_loss, load_config, parameter_groups


@pytest.fixture(params=[1, 7, 1000], ids=lambda tokens: f"chunks of {tokens}")
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "LOSS_CHUNK_LOGITS", 50 * request.param)


@pytest.mark.usefixtures("chunks")
def test_chunked_loss_is_cross_entropy() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(2, 20, 16, requires_grad=True)
    weight = nn.Parameter(torch.randn(50, 16))
    predictors, targets = torch.arange(3, 33), torch.randint(50, (30,))
    found = HeadLoss(weight)(hidden, predictors, targets, 1 / 30)
    gradients = torch.autograd.grad(found, (hidden, weight))
    expected = cross_entropy(hidden.flatten(0, 1)[predictors] @ weight.t(), targets)
    torch.testing.assert_close(found, expected)
    for one, other in zip(gradients, torch.autograd.grad(expected, (hidden, weight)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_without_trained_tokens_the_loss_is_zero_and_so_are_the_gradients() -> None:
    hidden, weight = torch.randn(1, 4, 8, requires_grad=True), nn.Parameter(torch.randn(10, 8))
    nothing = torch.zeros(0, dtype=torch.int64)
    loss = HeadLoss(weight)(hidden, nothing, nothing, 1.0)
    loss.backward()
    assert loss == 0
    assert not weight.grad.any()  # type: ignore[union-attr]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("tied", [False, True])
def test_packed_documents_train_as_if_each_were_alone(implementation: str, tied: bool) -> None:
    torch.manual_seed(0)
    config = load_config(tiny().model)
    config.tie_word_embeddings = tied
    causal = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=implementation)
    model = TrainedModel(causal, implementation)
    docs = documents(30)
    batches = Batches(docs, spec(data__sequence_length="128"), 0)
    batch = next(batches.micro_batches(1))
    assert len(batch.boundaries) > 6  # really packed
    packed = model(batch, 1 / len(batch.targets))
    packed.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in causal.named_parameters()}
    model.zero_grad()
    alone = torch.zeros(())
    for index in batches._indices(0, len(batch.input_ids)):
        for document in batches.sequences.of(int(index)):
            part = slice(docs.offsets[document], docs.offsets[document + 1])
            ids = torch.tensor(docs.tokens[part], dtype=torch.int64)[None]
            labels = torch.where(torch.tensor(docs.trained[part]), ids[0], -100)[1:]
            alone = alone + cross_entropy(causal(input_ids=ids).logits[0, :-1], labels, ignore_index=-100, reduction="sum")
    alone = alone / len(batch.targets)
    alone.backward()
    torch.testing.assert_close(packed, alone)
    for name, parameter in causal.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=2e-6, msg=name)


def test_micro_batches_weigh_their_tokens_not_themselves() -> None:
    """The mean over the step's tokens, however they fall on micro-batches."""
    torch.manual_seed(0)
    model = TrainedModel(AutoModelForCausalLM.from_config(load_config(tiny().model), dtype=torch.float32), "sdpa")
    losses = []
    for micro_batch, accumulation in (("6", "1"), ("2", "3")):
        shape = spec(gpus="1", train__micro_batch=micro_batch, train__gradient_accumulation=accumulation)
        batches = Batches(documents(), shape, 0)
        weight = 1 / batches.work(1).trained_tokens
        losses.append(sum(model(batch, weight).item() for batch in batches.micro_batches(1)))
    assert losses[0] == pytest.approx(losses[1])


def test_random_weights_start_where_they_must() -> None:
    torch.manual_seed(0)
    config = load_config(tiny().model)
    model = TrainedModel(AutoModelForCausalLM.from_config(config, dtype=torch.float32), "sdpa")
    batch = next(Batches(documents(), spec(), 0).micro_batches(1))
    assert model(batch, 1 / len(batch.targets)).item() == pytest.approx(expected_first_loss(config), abs=0.1)


def test_matrices_decay_and_norms_do_not_in_the_order_of_the_model() -> None:
    model = TrainedModel(AutoModelForCausalLM.from_config(load_config(tiny().model)), "sdpa")
    decay, rest = parameter_groups(model, tiny())
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.01, 0.0)
    assert all("norm" in name for name in rest["names"])
    assert not any("norm" in name for name in decay["names"])
    order = [name for name, _ in model.named_parameters()]
    assert decay["names"] == [name for name in order if name in set(decay["names"])]
    assert len(order) == len(decay["names"]) + len(rest["names"])
