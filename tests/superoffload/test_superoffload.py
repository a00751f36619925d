"""Our SuperOffload optimizer against plain float32 AdamW, and what it does when something goes wrong. One rank, on the CPU."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import superoffload
from so_tui.model.layout import Parameter, layout_of
from so_tui.plan.types import MemoryPolicy
from so_tui_trainer import binding
from so_tui_trainer.data.batches import Batch
from so_tui_trainer.model.build import TrainedModel, set_leaf_modules
from superoffload.deepspeed_adapter.engine import sub_group_states, super_offload
from superoffload.transfers import HostTransfers, Transfer
from tests.support import engine as support
from tests.support.reference_adamw import Reference, distance

STEPS = 20


@pytest.mark.parametrize(
    ("ratio", "clipping", "accumulation", "dtype"),
    [
        (1.0, 0.0, 1, torch.bfloat16),
        (0.5, 0.0, 1, torch.float32),
        (0.0, 1e-3, 1, torch.bfloat16),
        (0.5, 1e-3, 1, torch.bfloat16),
        (1.0, 1e6, 1, torch.float32),
        (0.5, 0.0, 3, torch.bfloat16),
        (0.5, 1e-3, 3, torch.bfloat16),
        (1.0, 1e6, 2, torch.float32),
    ],
)
def test_twenty_steps_are_those_of_float32_adamw(ratio: float, clipping: float, accumulation: int, dtype: torch.dtype) -> None:
    run = support.spec("superoffload", ratio, clipping=clipping, accumulation=accumulation)
    data = support.batches(STEPS * accumulation)
    with support.engine(run, dtype) as made:
        reference = Reference(made, clipping)
        for step in range(STEPS):
            rate = 1e-2 * (1 + step) / STEPS  # another one every step
            superoffload.set_learning_rate(made, rate)
            support.train(made, data[step * accumulation : (step + 1) * accumulation])
            assert superoffload.gradient_norm(made) == pytest.approx(reference.step(rate), rel=1e-6)
        superoffload.synchronize(made)
        on_gpu = sum(group.on_gpu for group in reference.core.sub_groups)
        assert on_gpu == {1.0: 0, 0.5: 3, 0.0: len(reference.core.sub_groups)}[ratio]
        for state, expected in zip(sub_group_states(made), reference.masters, strict=True):
            assert distance(state.master, expected.detach()) < 1e-6
            assert distance(state.exp_avg, reference.optimizer.state[expected]["exp_avg"]) < 1e-6
            assert distance(state.exp_avg_sq, reference.optimizer.state[expected]["exp_avg_sq"]) < 1e-6
            assert torch.equal(state.weights, state.master.to(dtype))


@pytest.mark.parametrize("left_out", [False, True])
def test_waiting_between_steps_can_be_kept_out_of_the_next_ones_figures(left_out: bool) -> None:
    """A checkpoint or an evaluation meets the weights before the next forward does, which then has nothing to wait for."""
    with support.engine(support.spec("superoffload", 1.0, clipping=1.0)) as made:
        one, other = support.batches(2)
        support.train(made, [one])
        superoffload.synchronize(made)
        if left_out:
            superoffload.leave_out_waits(made)
        support.train(made, [other])
        assert (superoffload.stats(made).exposed_in_forward_s == 0.0) == left_out


@pytest.mark.parametrize(("ratio", "accumulation"), [(0.37, 8), (1.0, 1)])
def test_so_are_odd_sizes_clipped_now_and_then(ratio: float, accumulation: int) -> None:
    """A parameter larger than a sub-group, one of a single element, and a limit that some norms exceed; a step with learning rate 0."""
    run = support.spec("superoffload", ratio, clipping=18.0, accumulation=accumulation)
    torch.manual_seed(run.train.seed)
    with support.engine(run, model=support.OddModel()) as made:
        reference = Reference(made, run.train.gradient_clipping)
        assert max(group.weights.numel() for group in reference.core.sub_groups) > 2 * run.offload.sub_group_size
        norms = []
        for step, rate in enumerate((1e-2, 3e-2, 0.0, 1e-3, 1e-2, 1e-2)):
            superoffload.set_learning_rate(made, rate)
            support.train(made, support.batches(accumulation, seed=step))
            norms.append(reference.step(rate))
            assert superoffload.gradient_norm(made) == pytest.approx(norms[-1], rel=1e-6)
        assert min(norms) < run.train.gradient_clipping < max(norms)
        superoffload.synchronize(made)
        for state, expected in zip(sub_group_states(made), reference.masters, strict=True):
            assert distance(state.master, expected.detach()) < 1e-6
            assert distance(state.exp_avg, reference.optimizer.state[expected]["exp_avg"]) < 1e-6
            assert distance(state.exp_avg_sq, reference.optimizer.state[expected]["exp_avg_sq"]) < 1e-6


class Mixture(torch.nn.Module):
    """Two experts, of which the second never gets a token."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(support.WIDTH, support.WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.experts[0](x)
        return x + added


@pytest.mark.parametrize("clipping", [0.0, 1.0])
def test_an_expert_without_tokens_in_a_leaf_module_has_a_gradient_of_zero(clipping: float) -> None:
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


def test_the_loss_falls_and_waiting_early_or_late_gives_the_same_bits(tmp_path: Path) -> None:
    run = support.spec("superoffload", 0.8, clipping=1.0)
    data = support.batches(1) * 12
    with support.engine(run) as lazy:
        losses = support.train(lazy, data)
        end = support.states(lazy, tmp_path / "lazy")
    with support.engine(run) as eager:
        super_offload(eager).lazy_weights = False  # type: ignore[union-attr]
        assert support.train(eager, data) == losses
        assert support.states(eager, tmp_path / "eager") == end
    assert losses[-1] < 0.8 * losses[0]


def test_what_reads_weights_between_steps_sees_those_of_the_last_step() -> None:
    import deepspeed

    with support.engine(support.spec("superoffload", 1.0, clipping=1.0)) as made:
        support.train(made, support.batches(1))
        weight = made.module.blocks[-1].down.weight
        with deepspeed.zero.GatheredParameters([weight]):
            gathered = weight.detach().clone().flatten()
        core = super_offload(made)
        index, member = made.optimizer._member[weight.ds_id]
        begin = core.sub_groups[index].offsets[member]
        assert torch.equal(gathered, core.master(index)[begin : begin + gathered.numel()].bfloat16())


def test_what_was_held_for_the_norm_comes_back_in_the_order_in_which_forward_wants_it() -> None:
    with support.engine(support.spec("superoffload", 1.0, clipping=1.0)) as made:
        core = super_offload(made)
        asked_for: list[int] = []
        wait = core.wait_for_weights
        core.wait_for_weights = lambda sub_groups: (asked_for.extend(sorted(sub_groups)), wait(sub_groups))  # type: ignore[func-returns-value]
        support.train(made, support.batches(1))
        wanted = list(dict.fromkeys(asked_for))
        assert sorted(range(len(core.sub_groups)), key=lambda index: core.sub_groups[index].first_use) == wanted
        norms = len(core.sub_groups) - 1  # the group without weight decay is the last, and the first layer begins with a norm
        assert wanted.index(norms) == 1


def test_the_cost_of_a_step_is_told() -> None:
    with support.engine(support.spec("superoffload", 1.0)) as made:
        # Weights that land late count in the interval after their step: waiting for them makes the figures those of one step.
        super_offload(made).lazy_weights = False  # type: ignore[union-attr]
        begun = time.monotonic()
        support.train(made, support.batches(3))
        superoffload.synchronize(made)
        took_s = time.monotonic() - begun
        told = superoffload.stats(made)
        trainable = sum(parameter.ds_numel for parameter in made.module.parameters() if parameter.requires_grad)
        assert told.to_host_bytes == told.to_gpu_bytes == 2 * trainable
        assert 0 < told.adam_busy_s < took_s
        assert 0 < told.exposed_wait_s < took_s
        assert superoffload.uses_worker(made)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_gradient_that_is_not_finite_stops_before_anything_is_stepped(accumulation: int, tmp_path: Path) -> None:
    with support.engine(support.spec("superoffload", 0.8, clipping=1.0, accumulation=accumulation)) as made:
        support.train(made, support.batches(2 * accumulation))
        before = support.states(made, tmp_path / "before")
        support.poison(made)
        with pytest.raises(superoffload.NonFiniteGradientError, match="Step 3: the gradient of sub-group 0") as caught:
            support.train(made, support.batches(accumulation))
        assert (caught.value.step, caught.value.sub_group, caught.value.poisoned) == (3, 0, False)
        assert support.states(made, tmp_path / "after") == before


@pytest.mark.parametrize(("ratio", "accumulation"), [(1.0, 1), (0.5, 1), (1.0, 2), (0.0, 1)])
def test_a_poisoned_state_is_not_saved(ratio: float, accumulation: int, tmp_path: Path) -> None:
    with support.engine(support.spec("superoffload", ratio, clipping=0.0, accumulation=accumulation)) as made:
        support.train(made, support.batches(2 * accumulation))
        support.poison(made)
        with pytest.raises(superoffload.NonFiniteGradientError, match=r"Step 3: .*resume from the last checkpoint") as caught:  # noqa: PT012
            support.train(made, support.batches(3 * accumulation))
            superoffload.gradient_norm(made)
        assert caught.value.poisoned
        with pytest.raises(superoffload.NonFiniteGradientError):
            superoffload.save_state(made, tmp_path)
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("clipping", [0.0, 1.0])
def test_a_killed_worker_is_reported_at_once(clipping: float, tmp_path: Path) -> None:
    with support.engine(support.spec("superoffload", 1.0, clipping=clipping)) as made:
        support.train(made, support.batches(2))
        os.kill(superoffload.worker_pid(made), signal.SIGKILL)  # type: ignore[arg-type]
        begin = time.monotonic()
        with pytest.raises(superoffload.WorkerLostError, match=r"ended by SIGKILL"):  # noqa: PT012
            support.train(made, support.batches(2))
            superoffload.synchronize(made)
        assert time.monotonic() - begin < 5
        with pytest.raises(superoffload.WorkerLostError):
            superoffload.save_state(made, tmp_path)


def test_a_stopped_worker_is_reported_after_the_silence_limit() -> None:
    with support.engine(support.spec("superoffload", 1.0), watchdog_timeout_s=0.5) as made:
        support.train(made, support.batches(2))
        os.kill(superoffload.worker_pid(made), signal.SIGSTOP)  # type: ignore[arg-type]
        with pytest.raises(superoffload.WorkerLostError, match=r"no progress for .* s in step of sub-group .*stopped \(SIGSTOP"):  # noqa: PT012
            support.train(made, support.batches(2))
            superoffload.synchronize(made)


def test_a_parameter_without_gradient_is_named() -> None:
    class Unused(support.Model):
        def __init__(self) -> None:
            super().__init__()
            self.spare = torch.nn.Linear(support.WIDTH, support.WIDTH)

    torch.manual_seed(0)
    with (
        support.engine(support.spec("superoffload", 0.5), model=Unused()) as made,
        pytest.raises(
            superoffload.OffloadError, match=r"2 trainable parameters got no gradient in step 1, micro-step 1: spare\.weight, spare\.bias"
        ),
    ):
        support.train(made, support.batches(1))


def test_a_learning_rate_set_too_late_is_refused() -> None:
    with support.engine(support.spec("superoffload", 1.0)) as made:
        loss = made(support.batches(1)[0])
        made.backward(loss)
        superoffload.set_learning_rate(made, 1e-3)
        with pytest.raises(superoffload.OffloadError, match="set it before the step's last backward"):
            made.step()


def test_nothing_is_left_behind() -> None:
    before = set(Path("/dev/shm").iterdir())
    with support.engine(support.spec("superoffload", 1.0)) as made:
        support.train(made, support.batches(1))
        pid = superoffload.worker_pid(made)
        assert pid is not None
        assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
    assert not Path(f"/proc/{pid}").exists()
    gc.collect()
    assert "so-tui-offload" not in Path("/proc/self/maps").read_text()
    assert set(Path("/dev/shm").iterdir()) == before
    superoffload.close(made)  # twice does no harm


def test_the_worker_computes_on_its_own_cores() -> None:
    with support.engine(support.spec("superoffload", 1.0)) as made:
        pid = superoffload.worker_pid(made)
        assert pid is not None
        assert os.sched_getaffinity(pid) == set(support.binding().adam_cpus)


def test_its_memory_is_that_of_the_rank() -> None:
    """The worker touches the pages first, so they lie where the policy that it inherits says."""
    policy = MemoryPolicy(mode="bind", nodes=(0,))
    unbound = binding.memory_policy()
    bound = binding.bind(msgspec.structs.replace(support.binding(), memory_policy=policy))
    if bound.problem or unbound != "default":
        pytest.skip(bound.problem or f"the memory policy here is {unbound}, which cannot be set again")
    try:
        with support.engine(support.spec("superoffload", 1.0)) as made:
            maps = Path(f"/proc/{superoffload.worker_pid(made)}/numa_maps").read_text().splitlines()
            (shared,) = [line for line in maps if "so-tui-offload" in line]
            assert "bind:0" in shared
            assert "N0=" in shared
    finally:
        binding.bind(support.binding())


@pytest.mark.parametrize("ratio", [0.0, 0.37, 1.0])
def test_its_sub_groups_are_those_of_the_plan(ratio: float) -> None:
    """Names, sizes and devices: otherwise what the planner says of memory and speed is about another optimizer."""
    run = support.spec("superoffload", ratio)
    with support.engine(run, model=support.OddModel()) as made:
        trainable = [(name, parameter) for name, parameter in made.module.named_parameters() if parameter.requires_grad]
        parameters = [Parameter(name, parameter.ds_numel, len(parameter.ds_shape) >= 2) for name, parameter in trainable]
        planned = layout_of(parameters, 1, run.offload.sub_group_size, ratio, "so-tui")
        core = super_offload(made)
        assert core is not None
        assert [(group.names, group.weights.numel(), group.on_gpu) for group in core.sub_groups] == [
            (group.names, group.numel, group.device == "gpu") for group in planned.sub_groups
        ]


def test_a_forward_waits_for_the_head_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is in the last sub-group: were it wanted at the start, nothing of a forward could run beside Adam."""
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = AutoConfig.for_model("qwen3", **shape, num_key_value_heads=1, head_dim=16, tie_word_embeddings=False)
    run = support.spec("superoffload", 1.0, clipping=1.0)
    causal = AutoModelForCausalLM.from_config(config)
    set_leaf_modules(causal, run)
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
        core = super_offload(made)
        for _ in range(2):  # ZeRO-3 first learns the order of the modules, then gathers ahead
            made.backward(made(batch, 1.0))
            made.step()
        wanted: list[int] = []
        wait = core.wait_for_weights
        monkeypatch.setattr(core, "wait_for_weights", lambda groups: (wanted.extend(sorted(groups)), wait(groups)))
        made(batch, 1.0)
        order = list(dict.fromkeys(wanted))
        assert "causal.model.embed_tokens.weight" in core.sub_groups[order[0]].names
        assert "causal.lm_head.weight" in core.sub_groups[order[-1]].names
        assert len(order) == len(core.sub_groups) > 4


def test_weights_are_brought_by_threads_that_were_attached_to_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    attached, brought = {threading.get_ident()}, set[int]()
    copy = HostTransfers.weights_to_gpu

    def noted(self: HostTransfers, *tensors: torch.Tensor) -> Transfer:
        brought.add(threading.get_ident())
        return copy(self, *tensors)

    monkeypatch.setattr(HostTransfers, "attach", lambda self: attached.add(threading.get_ident()))
    monkeypatch.setattr(HostTransfers, "weights_to_gpu", noted)
    with support.engine(support.spec("superoffload", 1.0)) as made:
        support.train(made, support.batches(2))
        superoffload.synchronize(made)
    assert brought
    assert brought <= attached
