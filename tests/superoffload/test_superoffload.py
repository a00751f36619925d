"""Our optimizer compared with float32 AdamW, and what goes wrong. One rank, on the CPU."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import superoffload
from so_tui.model.shape import Parameter
from so_tui_trainer.data.batches import Batch
from so_tui_trainer.engine_settings import engine_settings
from so_tui_trainer.model.build import _set_leaf_modules
from so_tui_trainer.model.trained import TrainedModel
from superoffload.deepspeed_adapter.engine import sub_group_states
from superoffload.optimizer import SuperOffload
from superoffload.transfers import Event, Transfers
from tests.support import engine as support
from tests.support.layouts import layout_of
from tests.support.problems import coded
from tests.support.reference_adamw import Reference, core_of
from tests.support.small_training import SHAPE

WATCHDOG_TIMEOUT_S = 30.0

STEPS = 20


@pytest.mark.parametrize(
    ("ratio", "clipping", "accumulation", "dtype"),
    [
        (1.0, 0.0, 1, torch.bfloat16),
        pytest.param(0.0, 1e-3, 1, torch.bfloat16, marks=pytest.mark.slow),
        (0.5, 1e-3, 1, torch.bfloat16),
        pytest.param(0.5, 1e-3, 3, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(1.0, 1e6, 2, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_twenty_steps_are_those_of_float32_adamw(
    ratio: float, clipping: float, accumulation: int, dtype: torch.dtype
) -> None:
    run = support.spec("superoffload", ratio, clipping=clipping, accumulation=accumulation)
    data = support.batches(STEPS * accumulation)
    with support.engine(run, dtype) as made:
        reference = Reference(made, clipping)
        for step in range(STEPS):
            rate = 1e-2 * (1 + step) / STEPS
            superoffload.set_learning_rate(made, rate)
            support.train(made, data[step * accumulation : (step + 1) * accumulation])
            assert superoffload.gradient_norm(made) == pytest.approx(reference.step(rate), rel=1e-6)
        superoffload.synchronize(made)
        on_gpu = sum(group.on_gpu for group in reference.core.sub_groups)
        assert on_gpu == {1.0: 0, 0.5: 3, 0.0: len(reference.core.sub_groups)}[ratio]
        reference.assert_same_states(made)
        for state in sub_group_states(made):
            assert torch.equal(state.weights, state.master_weights.to(dtype))


def train_late(made: Any, tokens: torch.Tensor) -> None:
    """Take a step that the Adam worker begins 0.3 s late. Clipping must hold it back until then."""
    made.backward(made(tokens))
    timer = support.suspend_worker(made, 0.3)
    made.step()
    timer.start()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("between", "exposed_s"), [("evaluation", 0.3), ("left out", 0.0), ("checkpoint", 0.0)]
)
def test_waits_between_steps_can_be_left_out_of_stats(between: str, exposed_s: float) -> None:
    """An evaluation or a checkpoint waits for the weights, and the next forward no more."""
    with support.engine(support.spec("superoffload", 1.0, clipping=1.0)) as made:
        one, other = support.batches(2)
        train_late(made, one)
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


@pytest.mark.slow
def test_waits_are_measured_in_the_stream_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed all-gathers in a stream of its own, which tells nothing of the computation."""
    streams: list[object] = []
    mark = Transfers.mark

    def recording(self: Transfers, stream: object = None) -> Event:
        streams.append(stream)
        return mark(self)

    monkeypatch.setattr(Transfers, "stream", lambda self: "computing")
    monkeypatch.setattr(Transfers, "mark", recording)
    with support.engine(support.spec("superoffload", 1.0, clipping=1.0)) as made:
        one, other = support.batches(2)
        train_late(made, one)
        streams.clear()
        made(other)
        assert "computing" in streams


def record_waits(core: SuperOffload, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which every sub-group is added when its weights are waited for."""
    waits: list[int] = []
    wait = core.wait_for_weights

    def recording(sub_groups: Collection[int]) -> None:
        waits.extend(sorted(sub_groups))
        wait(sub_groups)

    monkeypatch.setattr(core, "wait_for_weights", recording)
    return waits


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

    run = support.spec("superoffload", 0.5, clipping=clipping, accumulation=2)
    torch.manual_seed(run.train.seed)
    model = support.Model()
    model.blocks.append(Mixture())
    set_z3_leaf_modules(model, [Mixture])
    with support.engine(run, model=model) as made:
        losses = support.train(made, support.batches(1) * 8)
        used, unused = made.module.blocks[-1].experts
        assert safe_get_full_optimizer_state(used.weight, "exp_avg_sq").max() > 0
        assert not safe_get_full_optimizer_state(unused.weight, "exp_avg_sq").any()
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_waiting_for_weights_early_or_late_gives_the_same_bits(tmp_path: Path) -> None:
    run = support.spec("superoffload", 0.8, clipping=1.0)
    data = support.batches(1) * 12
    with support.engine(run) as lazy:
        losses = support.train(lazy, data)
        end = support.states(lazy, tmp_path / "lazy")
    with support.engine(run) as eager:
        core_of(eager).lazy_weights = False
        assert support.train(eager, data) == losses
        assert support.states(eager, tmp_path / "eager") == end
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.slow
def test_weights_read_between_steps_are_those_of_the_last_step() -> None:
    import deepspeed

    with support.engine(support.spec("superoffload", 1.0, clipping=1.0)) as made:
        support.train(made, support.batches(1))
        weight = made.module.blocks[-1].down.weight
        with deepspeed.zero.GatheredParameters([weight]):
            gathered = weight.detach().clone().flatten()
        core = core_of(made)
        index, member = made.optimizer._member[weight.ds_id]
        begin = core.sub_groups[index].offsets[member]
        assert torch.equal(
            gathered, core.state(index).master_weights[begin : begin + gathered.numel()].bfloat16()
        )


@pytest.mark.slow
def test_sub_groups_return_in_the_order_of_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    with support.engine(support.spec("superoffload", 1.0, clipping=1.0)) as made:
        core = core_of(made)
        used = record_waits(core, monkeypatch)
        support.train(made, support.batches(1))
        order = list(dict.fromkeys(used))
        assert (
            sorted(range(len(core.sub_groups)), key=lambda index: core.sub_groups[index].first_use)
            == order
        )
        # The group without weight decay is the last, and the first layer begins with a norm.
        norms = len(core.sub_groups) - 1
        assert order.index(norms) == 1


@pytest.mark.slow
def test_stats_are_those_of_one_step() -> None:
    with support.engine(support.spec("superoffload", 1.0)) as made:
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
        assert 0 < stats.adam_busy_s < took_s
        assert stats.adam_bytes == 28 * trainable
        assert 0 < stats.exposed_wait_s < took_s
        assert superoffload.uses_worker(made)


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_stops_before_a_step(tmp_path: Path) -> None:
    with support.engine(support.spec("superoffload", 0.8, clipping=1.0, accumulation=2)) as made:
        support.train(made, support.batches(4))
        before = support.states(made, tmp_path / "before")
        support.poison(made)
        with pytest.raises(superoffload.NonFiniteGradientError) as caught:
            support.train(made, support.batches(2))
        assert (caught.value.step, caught.value.sub_group, caught.value.poisoned) == (3, 0, False)
        assert support.states(made, tmp_path / "after") == before


@pytest.mark.slow
@pytest.mark.parametrize(("ratio", "accumulation"), [(1.0, 1), (0.5, 2), (0.0, 1)])
def test_a_poisoned_state_is_not_saved(ratio: float, accumulation: int, tmp_path: Path) -> None:
    with support.engine(
        support.spec("superoffload", ratio, clipping=0.0, accumulation=accumulation)
    ) as made:
        support.train(made, support.batches(2 * accumulation))
        support.poison(made)
        with pytest.raises(superoffload.NonFiniteGradientError) as caught:  # noqa: PT012
            support.train(made, support.batches(3 * accumulation))
            superoffload.gradient_norm(made)
        assert (caught.value.step, caught.value.poisoned) == (3, True)
        with pytest.raises(superoffload.NonFiniteGradientError):
            superoffload.save_state(made, tmp_path)
        assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("clipping", [0.0, 1.0])
def test_a_killed_worker_is_reported_within_seconds(clipping: float, tmp_path: Path) -> None:
    with support.engine(support.spec("superoffload", 1.0, clipping=clipping)) as made:
        support.train(made, support.batches(2))
        os.kill(superoffload.worker_pid(made), signal.SIGKILL)  # type: ignore[arg-type]
        begin = time.monotonic()
        with coded(superoffload.WorkerLostError, "worker-ended", match=r"ended by SIGKILL"):
            support.train(made, support.batches(2))
            superoffload.synchronize(made)
        assert time.monotonic() - begin < WATCHDOG_TIMEOUT_S, "the watchdog did not have to find it"
        with pytest.raises(superoffload.WorkerLostError):
            superoffload.save_state(made, tmp_path)


@pytest.mark.slow
def test_a_stopped_worker_is_reported_after_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    with support.engine(
        support.spec("superoffload", 1.0), watchdog_timeout_s=WATCHDOG_TIMEOUT_S
    ) as made:
        support.train(made, support.batches(2))
        superoffload.synchronize(made)
        client = core_of(made).cpu._client
        # Only now: a busy machine may start the worker for longer.
        monkeypatch.setattr(client, "settings", replace(client.settings, watchdog_timeout_s=0.5))
        os.kill(superoffload.worker_pid(made), signal.SIGSTOP)  # type: ignore[arg-type]
        with coded(
            superoffload.WorkerLostError,
            "worker-stuck",
            match=r"during step of sub-group .*stopped \(SIGSTOP",
        ):
            support.train(made, support.batches(2))
            superoffload.synchronize(made)


@pytest.mark.slow
def test_a_parameter_without_gradient_is_named() -> None:
    class Unused(support.Model):
        def __init__(self) -> None:
            super().__init__()
            self.spare = torch.nn.Linear(support.WIDTH, support.WIDTH)

    torch.manual_seed(0)
    with (
        support.engine(support.spec("superoffload", 0.5), model=Unused()) as made,
        coded(superoffload.OffloadError, "missing-gradient", match=r"spare\.weight, spare\.bias"),
    ):
        support.train(made, support.batches(1))


@pytest.mark.slow
def test_weights_on_an_nvme_disk_are_refused(tmp_path: Path) -> None:
    """DeepSpeed's config may ask for it; weights in host memory are what our optimizer can have."""
    support.ensure_process_group()
    run = support.spec("superoffload", 1.0)
    config = support.ds_config(run)
    nvme = {"device": "nvme", "nvme_path": str(tmp_path), "pin_memory": False}
    config["zero_optimization"]["offload_param"] = nvme
    model = support.Model().to(support.DEVICE, torch.bfloat16)
    settings = engine_settings(run, support.binding())
    with coded(superoffload.OffloadError, "offload-param", match=r"nvme.*device \"cpu\""):
        superoffload.initialize(model, support.parameter_groups(model), settings, config)
    # Nothing is left of it.
    with support.engine(support.spec("superoffload", 1.0, parameters="cpu")) as made:
        assert support.train(made, support.batches(1))


@pytest.mark.slow
@pytest.mark.parametrize("in_tensor", [False, True])
def test_a_learning_rate_that_changes_too_late_is_refused(in_tensor: bool) -> None:
    with support.engine(support.spec("superoffload", 1.0)) as made:
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
def test_a_step_keeps_the_learning_rate_of_its_tensor(tmp_path: Path) -> None:
    """Most commands leave later, while the scheduler already writes the next step's rate."""
    found: list[bytes] = []
    for rate in (torch.tensor(0.5), 0.5):
        with support.engine(support.spec("superoffload", 1.0, clipping=1e-3)) as made:
            superoffload.set_learning_rate(made, rate)  # type: ignore[arg-type]
            support.train(made, support.batches(1))
            if isinstance(rate, torch.Tensor):
                rate.fill_(0.25)
            found.append(support.states(made, tmp_path / str(len(found))))
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [0.0, 0.37, 1.0])
def test_sub_groups_are_those_of_the_plan(ratio: float) -> None:
    """Were they others, the planner would predict another optimizer's memory and speed."""
    run = support.spec("superoffload", ratio)
    with support.engine(run, model=support.OddModel()) as made:
        parameters = [
            Parameter(name, parameter.ds_numel, len(parameter.ds_shape) >= 2)
            for name, parameter in made.module.named_parameters()
            if parameter.requires_grad
        ]
        planned = layout_of(parameters, 1, run.offload.sub_group_size, ratio)
        core = core_of(made)
        assert [
            (group.names, group.weights.numel(), group.on_gpu) for group in core.sub_groups
        ] == [(group.names, group.numel, group.device == "gpu") for group in planned.sub_groups]


@pytest.mark.slow
def test_a_forward_waits_for_the_head_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the last sub-group: a forward pass that needs it first cannot overlap with Adam."""
    shape = SHAPE | {"vocab_size": 64, "num_hidden_layers": 4, "tie_word_embeddings": False}
    config = AutoConfig.for_model("qwen3", **shape)
    run = support.spec("superoffload", 1.0, clipping=1.0)
    causal = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    _set_leaf_modules(causal, run)
    tokens = torch.arange(16)[None]
    batch = Batch(
        input_ids=tokens,
        position_ids=tokens,
        real=torch.ones_like(tokens, dtype=torch.bool),
        boundaries=torch.tensor([0, 16], dtype=torch.int32),
        predictors=torch.arange(15),
        targets=torch.arange(1, 16),
        longest=16,
    )
    with support.engine(run, model=TrainedModel(causal, "sdpa")) as made:
        core = core_of(made)
        # ZeRO-3 records the order of the modules first, and prefetches by it afterwards.
        for _ in range(2):
            made.backward(made(batch, 1.0))
            made.step()
        used = record_waits(core, monkeypatch)
        made(batch, 1.0)
        order = list(dict.fromkeys(used))
        assert "causal.model.embed_tokens.weight" in core.sub_groups[order[0]].names
        assert "causal.lm_head.weight" in core.sub_groups[order[-1]].names
        assert len(order) == len(core.sub_groups) > 4
