"""Our optimizer compared with float32 AdamW, and what goes wrong. One rank, on the CPU."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import superoffload
from so_tui.model.profile import ModelProfile
from so_tui.spec.run_spec import ParameterBlock, Tensor
from so_tui_trainer.model.build import _set_leaf_modules
from superoffload.deepspeed_adapter.engine import sub_group_states
from superoffload.gpu_states import Gradient
from tests.support import engine as support
from tests.support.problems import coded
from tests.support.reference_adamw import Reference, core_of, watch_gradients
from tests.support.small_training import SHAPE

WATCHDOG_TIMEOUT_S = 30.0
STEPS = 20


@pytest.mark.parametrize(("ratio", "clipping"), [(1.0, 0.0), (0.5, 1e-3)])
def test_twenty_steps_are_those_of_float32_adamw(ratio: float, clipping: float) -> None:
    with support.offloading(ratio, clipping=clipping) as made:
        reference = Reference(made, clipping)
        for step, tokens in enumerate(support.batches(STEPS), start=1):
            rate = 1e-2 * step / STEPS
            superoffload.set_learning_rate(made, rate)
            support.train(made, [tokens])
            assert superoffload.gradient_norm(made) == pytest.approx(reference.step(rate), rel=1e-6)
        superoffload.synchronize(made)
        reference.assert_same_states(made)
        for state in sub_group_states(made):
            assert torch.equal(state.weights, state.master_weights.bfloat16())


def test_buffers_keep_their_type() -> None:
    """Such as rotary frequencies, which bf16 would round. DeepSpeed 0.18.9 casts all of them."""
    model, frequencies = support.OddModel(), torch.rand(8)
    model.register_buffer("frequencies", frequencies.clone(), persistent=False)
    with support.offloading(model=model) as made:
        found = dict(made.module.named_buffers())["frequencies"]
        assert torch.equal(found.cpu(), frequencies)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("between", "exposed_s"), [("evaluation", 0.3), ("left out", 0.0), ("checkpoint", 0.0)]
)
def test_waits_between_steps_can_be_left_out_of_stats(between: str, exposed_s: float) -> None:
    """An evaluation or a checkpoint waits for the weights, and the next forward no more."""
    with support.offloading(clipping=1.0) as made:
        one, other = support.batches(2)
        # The Adam worker begins a step 0.3 s late. Clipping must hold it back until then.
        made.backward(made(one))
        timer = support.suspend_worker(made, 0.3)
        made.step()
        timer.start()
        if between == "checkpoint":
            superoffload.synchronize(made)
        else:
            with torch.no_grad():
                made(other)
        if between == "left out":
            superoffload.leave_out_waits(made)
        support.train(made, [other])
        found_s = superoffload.stats(made).exposed_in_forward_s
        assert found_s == pytest.approx(exposed_s, abs=0.1)


class Mixture(torch.nn.Module):
    """Two experts; the second never gets a token."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(
            torch.nn.Linear(support.WIDTH, support.WIDTH) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.experts[0](x)
        return x + added


@pytest.mark.slow
@pytest.mark.parametrize("clipping", [0.0, 1.0])
def test_an_expert_without_tokens_has_a_gradient_of_zero(clipping: float) -> None:
    from deepspeed.utils import safe_get_full_optimizer_state, set_z3_leaf_modules

    torch.manual_seed(0)
    model = support.Model()
    model.blocks.append(Mixture())
    set_z3_leaf_modules(model, [Mixture])
    with support.offloading(0.5, model, clipping=clipping, accumulation=2) as made:
        losses = support.train(made, support.batches(1) * 8)
        used, unused = made.module.blocks[-1].experts
        assert safe_get_full_optimizer_state(used.weight, "exp_avg_sq").max() > 0
        assert not safe_get_full_optimizer_state(unused.weight, "exp_avg_sq").any()
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_weights_read_between_steps_are_those_of_the_last_step() -> None:
    import deepspeed

    with support.offloading(clipping=1.0) as made:
        support.train(made, support.batches(1))
        weight = made.module.blocks[-1].down.weight
        with deepspeed.zero.GatheredParameters([weight]):
            gathered = weight.detach().clone().flatten()
        core = core_of(made)
        index, member = made.optimizer._member[weight.ds_id]
        begin = core.sub_groups[index].offsets[member]
        master_weights = core.state(index).master_weights[begin : begin + gathered.numel()]
        assert torch.equal(gathered, master_weights.bfloat16())


@pytest.mark.slow
def test_a_forward_waits_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is in the last sub-group: a forward pass that needs it first cannot overlap with
    Adam.
    """
    shape = SHAPE | {"vocab_size": 64, "num_hidden_layers": 4, "tie_word_embeddings": False}
    config = AutoConfig.for_model("qwen3", **shape)
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    _set_leaf_modules(model, support.spec("superoffload"))
    tokens = torch.arange(16)[None]
    with support.offloading(1.0, model, clipping=1.0) as made:
        # ZeRO-3 records the order of the modules first, and prefetches by it afterwards.
        for _ in range(2):
            made.backward(made(tokens, labels=tokens).loss)
            made.step()
        groups, wait = core_of(made).sub_groups, core_of(made).wait_for_weights
        order: list[int] = []

        def recording(sub_groups: Collection[int]) -> None:
            order.extend(sorted(set(sub_groups) - set(order)))
            wait(sub_groups)

        monkeypatch.setattr(core_of(made), "wait_for_weights", recording)
        made(tokens)
        assert order == sorted(order, key=lambda index: groups[index].first_use)
        assert "model.embed_tokens.weight" in groups[order[0]].names
        assert "lm_head.weight" in groups[order[-1]].names
        assert len(order) == len(groups) > 4


@pytest.mark.slow
def test_stats_are_those_of_one_step() -> None:
    with support.offloading() as made:
        # Weights that arrive late count in the interval after their step. Waiting for them makes
        # the figures those of one step.
        core_of(made).lazy_weights = False
        begun = time.monotonic()
        support.train(made, support.batches(3))
        superoffload.synchronize(made)
        took_s = time.monotonic() - begun
        stats = superoffload.stats(made)
        trainable = sum(
            parameter.ds_numel for parameter in made.module.parameters() if parameter.requires_grad
        )
        assert stats.d2h_bytes == stats.h2d_bytes == 2 * trainable
        assert stats.adam_bytes == 28 * trainable
        assert 0 < stats.adam_busy_s < took_s
        assert 0 < stats.exposed_wait_s < took_s


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ratio", "clipping", "accumulation"),
    [(1.0, 0.0, 1), (0.5, 0.0, 2), (0.0, 0.0, 1), (1.0, 0.0, 3), (1.0, 1.0, 3), (0.5, 1.0, 1)],
)
def test_a_state_poisoned_by_a_gradient_is_not_saved(
    ratio: float, clipping: float, accumulation: int
) -> None:
    """Clipping holds the step back, so that the states stay sound."""
    with support.offloading(ratio, clipping=clipping, accumulation=accumulation) as made:
        support.train(made, support.batches(accumulation))
        before = support.states(made)

        def spoil(gradient: Gradient) -> None:
            if (gradient.sub_group, gradient.member) == (2, 0):
                gradient.values.flatten()[7] = float("inf")

        watch_gradients(core_of(made), spoil)
        with pytest.raises(superoffload.NonFiniteGradientError) as caught:  # noqa: PT012
            support.train(made, support.batches(2 * accumulation))
            superoffload.gradient_norm(made)
        error = caught.value
        assert (error.step, error.sub_group, error.poisoned) == (2, 2, clipping == 0)
        if clipping:
            assert support.states(made) == before
        else:
            with pytest.raises(superoffload.NonFiniteGradientError):
                support.states(made)


@pytest.mark.slow
@pytest.mark.parametrize("clipping", [0.0, 1.0])
def test_a_killed_worker_is_reported_within_seconds(clipping: float) -> None:
    with support.offloading(clipping=clipping) as made:
        support.train(made, support.batches(2))
        os.kill(superoffload.worker_pid(made), signal.SIGKILL)  # type: ignore[arg-type]
        begin = time.monotonic()
        with coded(superoffload.WorkerLostError, "worker-ended", match=r"ended by SIGKILL"):
            support.train(made, support.batches(2))
            superoffload.synchronize(made)
        assert time.monotonic() - begin < WATCHDOG_TIMEOUT_S, "the watchdog did not have to find it"
        with pytest.raises(superoffload.WorkerLostError):
            support.states(made)


@pytest.mark.slow
def test_a_stopped_worker_is_reported_after_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    with support.offloading(watchdog_timeout_s=WATCHDOG_TIMEOUT_S) as made:
        support.train(made, support.batches(2))
        superoffload.synchronize(made)
        client = core_of(made).cpu._client
        # Only now: a busy machine may start the worker for longer.
        monkeypatch.setattr(client, "settings", replace(client.settings, watchdog_timeout_s=0.5))
        os.kill(superoffload.worker_pid(made), signal.SIGSTOP)  # type: ignore[arg-type]
        stuck = r"during step of sub-group .*stopped \(SIGSTOP"
        with coded(superoffload.WorkerLostError, "worker-stuck", match=stuck):
            support.train(made, support.batches(2))
            superoffload.synchronize(made)


@pytest.mark.slow
@pytest.mark.parametrize("in_tensor", [False, True])
def test_a_learning_rate_that_changes_too_late_is_refused(in_tensor: bool) -> None:
    with support.offloading() as made:
        rate = torch.tensor(1e-3)
        if in_tensor:
            superoffload.set_learning_rate(made, rate)  # type: ignore[arg-type]
        made.backward(made(support.batches(1)[0]))
        if in_tensor:
            rate.fill_(1e-2)
        else:
            superoffload.set_learning_rate(made, 1e-3)
        with coded(superoffload.OffloadError, "learning-rate-changed"):
            made.step()


@pytest.mark.slow
def test_a_step_keeps_the_learning_rate_of_its_tensor() -> None:
    """Most commands leave later, while the scheduler already writes the next step's rate."""
    found: list[bytes] = []
    for rate in (torch.tensor(0.5), 0.5):
        with support.offloading(clipping=1e-3) as made:
            superoffload.set_learning_rate(made, rate)  # type: ignore[arg-type]
            support.train(made, support.batches(1))
            if isinstance(rate, torch.Tensor):
                rate.fill_(0.25)
            found.append(support.states(made))
    assert found[0] == found[1]


@pytest.mark.slow
def test_sub_groups_are_those_of_the_plan() -> None:
    """Were they others, the planner would predict another optimizer's memory and speed."""
    run = support.spec("superoffload", 0.37)
    with support.engine(run, model=support.OddModel()) as made:
        tensors = [
            Tensor(name, tuple(parameter.ds_shape), len(parameter.ds_shape) >= 2, "linear")
            for name, parameter in made.module.named_parameters()
            if parameter.requires_grad
        ]
        blocks = (ParameterBlock(tensors=tuple(tensors)),)
        profile = ModelProfile(blocks, None, fused=True, eager_attention=False)  # type: ignore[arg-type]
        planned = profile.layout(1, run.offload)
        groups = core_of(made).sub_groups
    assert [(group.names, group.weights.numel(), group.on_gpu) for group in groups] == [
        (group.names, group.numel, group.device == "gpu") for group in planned.sub_groups
    ]
