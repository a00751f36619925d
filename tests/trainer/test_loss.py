"""Packed documents and the loss in blocks give the loss and gradients of the plain computation."""

from __future__ import annotations

import inspect
import re
import weakref
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from so_tui.model import flops as model_loss
from so_tui_trainer.data.batches import Batches
from so_tui_trainer.model.config import load_config
from so_tui_trainer.model.loss import LOGIT_KEYS, HeadLoss
from so_tui_trainer.model.trained import TrainedModel, parameter_groups
from tests.support.documents import documents, spec
from tests.support.launching import tiny
from tests.support.models import causal_model
from tests.support.small_training import Watching


def tokens() -> tuple[Tensor, nn.Parameter, Tensor, Tensor]:
    """Return hidden states, the head's weight, and 30 predictors and their targets."""
    hidden = torch.randn(2, 20, 16, requires_grad=True)
    weight = nn.Parameter(3 * torch.randn(50, 16))
    return hidden, weight, torch.arange(3, 33), torch.randint(50, (30,))


@pytest.mark.parametrize("block", [30, 7 * 30, 10**6], ids="blocks of {}".format)
@pytest.mark.parametrize(
    ("kept", "factor", "cap"),
    [(0, 1.0, 0.0), (20 * 30, 1.0, 0.0), (10**6, 1.0, 0.0), (2**29, 0.25, 2.0)],
)
def test_the_loss_in_blocks_is_cross_entropy(
    block: int, kept: int, factor: float, cap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of logits that the model scales and caps."""
    monkeypatch.setattr(model_loss, "LOSS_BLOCK_LOGITS", block)
    monkeypatch.setattr(model_loss, "LOSS_KEPT_LOGITS", kept)
    hidden, weight, predictors, targets = tokens()
    head = HeadLoss(weight, factor, cap)
    logits = factor * hidden.flatten(0, 1)[predictors] @ weight.t()
    logits = cap * (logits / cap).tanh() if cap else logits
    found, expected = head(hidden, predictors, targets, 1 / 30), cross_entropy(logits, targets)
    torch.testing.assert_close(found, expected)
    ours, theirs = (torch.autograd.grad(loss, (hidden, weight)) for loss in (found, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(head(hidden, predictors, targets, 1 / 30), expected)
        torch.testing.assert_close(head(hidden, predictors, None), logits)


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


class PeakBytes:
    """Peak of the bytes of storages that operations made."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __call__(self, _operation: Any, arguments: Any, result: Any) -> None:
        given, made = (
            {each.untyped_storage() for each in tree_leaves(tree) if isinstance(each, Tensor)}
            for tree in (arguments, result)
        )
        known = self._known | {storage.data_ptr() for storage in given}
        for storage in made:
            if storage.data_ptr() not in known:
                self._known.add(storage.data_ptr())
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._forget, storage.data_ptr(), storage.nbytes())

    def _forget(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.now -= size


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
    measured = PeakBytes()
    with Watching(measured):
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


def test_every_key_that_changes_logits_is_known() -> None:
    """A model with one that is not would be trained with a wrong loss."""
    found: dict[str, set[str]] = {}
    for kind, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        model_class = getattr(transformers, names if isinstance(names, str) else names[0])
        found[kind] = set(CHANGES.findall(inspect.getsource(model_class.forward)))
    assert (found["granite"], found["cohere"]) == ({"logits_scaling"}, {"logit_scale"})
    assert set().union(*found.values()) <= {*LOGIT_KEYS, *READ_ALREADY}
