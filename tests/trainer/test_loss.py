"""Packed documents and the loss in blocks give the loss and gradients of the plain computation."""

from __future__ import annotations

import inspect
import re
import weakref

import pytest
import torch
import transformers
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from so_tui.model import flops as model_loss
from so_tui_trainer.data.batches import Batches
from so_tui_trainer.model.config import load_config
from so_tui_trainer.model.loss import LOGIT_KEYS, HeadLoss, expected_first_loss
from so_tui_trainer.model.trained import TrainedModel, parameter_groups
from tests.support.documents import documents, spec
from tests.support.launching import tiny
from tests.support.models import causal_model


@pytest.mark.parametrize("block", [30, 7 * 30, 10**6], ids=lambda logits: f"blocks of {logits}")
@pytest.mark.parametrize("kept", [0, 20 * 30, 10**6], ids=lambda logits: f"{logits} kept")
def test_the_loss_in_blocks_is_cross_entropy(
    block: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_loss, "LOSS_BLOCK_LOGITS", block)
    monkeypatch.setattr(model_loss, "LOSS_KEPT_LOGITS", kept)
    torch.manual_seed(0)
    hidden = torch.randn(2, 20, 16, requires_grad=True)
    weight = nn.Parameter(3 * torch.randn(50, 16))
    predictors, targets = torch.arange(3, 33), torch.randint(50, (30,))
    found = HeadLoss(weight)(hidden, predictors, targets, 1 / 30)
    gradients = torch.autograd.grad(found, (hidden, weight))
    expected = cross_entropy(hidden.flatten(0, 1)[predictors] @ weight.t(), targets)
    torch.testing.assert_close(found, expected)
    for one, other in zip(gradients, torch.autograd.grad(expected, (hidden, weight)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(HeadLoss(weight)(hidden, predictors, targets, 1 / 30), expected)


@pytest.mark.parametrize("block", [7 * 30, 10**6], ids=lambda logits: f"blocks of {logits}")
def test_logits_that_the_model_scales_and_caps(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_loss, "LOSS_BLOCK_LOGITS", block)
    torch.manual_seed(0)
    hidden = torch.randn(2, 20, 16, requires_grad=True)
    weight = nn.Parameter(3 * torch.randn(50, 16))
    predictors, targets = torch.arange(3, 33), torch.randint(50, (30,))
    head = HeadLoss(weight, factor=0.25, cap=2.0)
    logits = 2.0 * (0.25 * hidden.flatten(0, 1)[predictors] @ weight.t() / 2.0).tanh()
    torch.testing.assert_close(head(hidden, predictors, None), logits)
    found, expected = head(hidden, predictors, targets, 1 / 30), cross_entropy(logits, targets)
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        *(torch.autograd.grad(loss, (hidden, weight)) for loss in (found, expected)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_in_bf16_the_gradients_are_as_good_as_bf16_can_be() -> None:
    """Each row of the head's gradient is one sum in fp32, rounded once."""
    torch.manual_seed(0)
    hidden = torch.randn(1, 4000, 32, dtype=torch.bfloat16, requires_grad=True)
    weight = nn.Parameter(torch.randn(300, 32, dtype=torch.bfloat16) / 6)
    predictors, targets = torch.arange(4000), torch.randint(300, (4000,))
    found = torch.autograd.grad(
        HeadLoss(weight)(hidden, predictors, targets, 1 / 4000), (hidden, weight)
    )
    exact = cross_entropy(hidden[0].double() @ weight.double().t(), targets)
    for one, other in zip(found, torch.autograd.grad(exact, (hidden, weight)), strict=True):
        assert (one - other).norm() < 0.005 * other.norm()


class PeakBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Peak of the bytes of storages that operations made while it was on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
        given = {
            tensor.untyped_storage().data_ptr()
            for tensor in tree_leaves((arguments, keywords))
            if isinstance(tensor, torch.Tensor)
        }
        result = operation(*arguments, **(keywords or {}))
        for tensor in tree_leaves(result):
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.untyped_storage().data_ptr() not in given | self._known
            ):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        place, size = storage.data_ptr(), storage.nbytes()
        self._known.add(place)
        self.now += size
        self.peak = max(self.peak, self.now)

        def forget() -> None:
            self._known.discard(place)
            self.now -= size

        weakref.finalize(storage, forget)


@pytest.mark.parametrize(
    ("block", "kept"), [(2**14, 0), (2**14, 2**16), (2**14, 2**30), (2**30, 2**30)]
)
def test_the_loss_takes_the_memory_that_the_plan_says(
    block: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_loss, "LOSS_BLOCK_LOGITS", block)
    monkeypatch.setattr(model_loss, "LOSS_KEPT_LOGITS", kept)
    tokens, vocabulary, size = 64, 5000, 32
    hidden = torch.randn(1, tokens, size, dtype=torch.bfloat16, requires_grad=True)
    weight = nn.Parameter(torch.randn(vocabulary, size, dtype=torch.bfloat16))
    head, predictors, targets = (
        HeadLoss(weight),
        torch.arange(tokens),
        torch.randint(vocabulary, (tokens,)),
    )
    with PeakBytes() as measured:
        head(hidden, predictors, targets, 1.0)
    beyond = measured.peak - 2 * vocabulary * size
    said = model_loss.loss_bytes(tokens, vocabulary, size)
    vectors = 16 * 8 * tokens
    assert 0.7 * said < beyond <= said + vectors


def test_the_loss_of_a_large_vocabulary_stays_below_two_gib() -> None:
    assert model_loss.loss_bytes(16_384, 151_936, 2560) < 2 * 2**30
    assert model_loss.recomputed_logits(16_384, 151_936) == 16_384 * 151_936 - 2**29
    assert model_loss.recomputed_logits(3000, 151_936) == 0


def test_without_trained_tokens_loss_and_gradients_are_zero() -> None:
    hidden, weight = torch.randn(1, 4, 8, requires_grad=True), nn.Parameter(torch.randn(10, 8))
    nothing = torch.zeros(0, dtype=torch.int64)
    loss = HeadLoss(weight)(hidden, nothing, nothing, 1.0)
    torch.autograd.backward(loss)
    assert loss == 0
    assert not weight.grad.any()  # type: ignore[union-attr]


def test_micro_batches_weigh_their_tokens_not_themselves() -> None:
    """The mean over the step's tokens, however they fall on micro-batches."""
    torch.manual_seed(0)
    model = TrainedModel(causal_model(load_config(tiny().model), dtype=torch.float32), "sdpa")
    losses = []
    for micro_batch, accumulation in (("6", "1"), ("2", "3")):
        shape = spec(
            gpus="1", train__micro_batch=micro_batch, train__gradient_accumulation=accumulation
        )
        batches = Batches(documents(), shape, 0)
        weight = 1 / batches.counts(1).trained_tokens
        losses.append(sum(model(batch, weight).item() for batch in batches.micro_batches(1)))
    assert losses[0] == pytest.approx(losses[1])


def test_random_weights_start_where_they_must() -> None:
    torch.manual_seed(0)
    config = load_config(tiny().model)
    model = TrainedModel(causal_model(config, dtype=torch.float32), "sdpa")
    batch = next(Batches(documents(), spec(), 0).micro_batches(1))
    assert model(batch, 1 / len(batch.targets)).item() == pytest.approx(
        expected_first_loss(config), abs=0.1
    )


def test_matrices_decay_and_norms_do_not() -> None:
    model = TrainedModel(causal_model(load_config(tiny().model)), "sdpa")
    decay, rest = parameter_groups(model, tiny())
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.01, 0.0)
    assert all("norm" in name for name in rest["names"])
    assert not any("norm" in name for name in decay["names"])
    order = [name for name, _ in model.named_parameters()]
    assert decay["names"] == [name for name in order if name in set(decay["names"])]
    assert len(order) == len(decay["names"]) + len(rest["names"])


CHANGES = re.compile(
    r"self\.(?:config\.(?:text_config\.)?)?(\w*(?:logits?_s|logits_mup|multiplier|cap(?:ping)?\b|"
    r"unpadded)\w*)"
)
"""What a forward pass reads that scales, caps or cuts logits."""
READ_ALREADY = {"logit_softcap"}
"""A module that is made of a configuration key which is known."""
OTHER_NAMES = {
    "granite": "logits_scaling",
    "gemma2": "final_logit_softcapping",
    "cohere": "logit_scale",
}


def keys_read(kind: str) -> set[str]:
    """Return the configuration keys with which a model's forward pass changes its logits."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    model_class = getattr(transformers, names if isinstance(names, str) else names[0])
    return set(CHANGES.findall(inspect.getsource(model_class.forward)))


@pytest.mark.parametrize("kind", OTHER_NAMES)
def test_keys_are_found_in_the_source(kind: str) -> None:
    assert keys_read(kind) == {OTHER_NAMES[kind]}


def test_every_key_that_changes_logits_is_known() -> None:
    """A model with one that is not would be trained with a wrong loss."""
    unknown = {
        kind: keys - {*LOGIT_KEYS, *READ_ALREADY}
        for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if (keys := keys_read(kind))
    }
    assert not {kind: keys for kind, keys in unknown.items() if keys}
