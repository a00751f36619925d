"""Moments in bf16 and 8 bits: how close they are to fp32. Weights in host memory: the same bits.

On the CPU the Adam worker writes them where DeepSpeed gathers them from.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.utils import (
    safe_get_full_optimizer_state,
    safe_set_full_optimizer_state,
    set_z3_leaf_modules,
)
from torch.utils.checkpoint import checkpoint

import superoffload
from so_tui.model.sharding import StatesFormat
from superoffload.checkpoint import Rounded, saved_states
from superoffload.deepspeed_adapter.engine import sub_group_states
from superoffload.shared_states import WEIGHTS_MEMORY_NAME
from tests.support import engine as support
from tests.support import rank_processes
from tests.support.engine import ALL
from tests.support.problems import coded
from tests.support.reference_adamw import core_of, record_gradients

pytestmark = pytest.mark.slow

FORMATS: dict[StatesFormat, float] = {"bf16-moments": 2**-8, "int8-moments": 2**-4}
"""With the largest relative error of a moment that is rounded to the nearest."""


def trained(
    states: StatesFormat, data: list[torch.Tensor], skipped: int = 0, **settings: Any
) -> tuple[Any, ...]:
    """Train and return losses, states and stats; one step after ``skipped`` ones is not finite."""
    settings |= {"states": states, "max_skipped_steps": 1}
    with support.offloading(0.8, clipping=10.7, **settings) as made:
        losses = support.train(made, data[:skipped])
        if skipped:
            support.skip_step(made, support.batches(1, seed=9))
        losses += support.train(made, data[skipped:])
        return losses, support.states(made), superoffload.stats(made)


@pytest.mark.parametrize("states", FORMATS)
def test_compact_runs_are_close_to_fp32(states: StatesFormat) -> None:
    """Steps are kept, redone and skipped. The bits are those of steps that are held back."""
    data = support.batches(2) * 10
    exact, held = trained("fp32", data), trained(states, data)
    early = trained(states, data, 10, speculation_bytes=support.ALL)
    assert early[:2] == held[:2]
    assert min(early[2].kept_steps, early[2].redone_steps) >= 2
    assert held[0] != exact[0]
    assert exact[0][-1] < 0.7 * exact[0][0]
    assert held[0][-1] == pytest.approx(exact[0][-1], rel=0.1)


@pytest.mark.parametrize("states", FORMATS)
def test_a_state_of_one_format_continues_in_another(states: StatesFormat, tmp_path: Path) -> None:
    """From fp32 and back: the moments are rounded once, and the weights are not."""
    with support.offloading() as made:
        support.train(made, support.batches(2))
        superoffload.save_state(made, tmp_path / "fp32")
        with support.offloading(states=states) as other:
            superoffload.load_state(other, tmp_path / "fp32")
            superoffload.save_state(other, tmp_path / "compact")
        superoffload.load_state(made, tmp_path / "compact")
        superoffload.save_state(made, tmp_path / "back")
    assert support.by_name(tmp_path / "back") == support.by_name(tmp_path / "compact")
    exact, compact = (dict(saved_states(tmp_path / name)) for name in ("fp32", "compact"))
    for name, (weights, *moments) in exact.items():
        assert torch.equal(compact[name][0], weights)
        for found, wanted in zip(compact[name][1:], moments, strict=True):
            sizeable = wanted.abs() > wanted.abs().max() * 2**-12
            rtol = FORMATS[states] * 1.01
            assert torch.allclose(found[sizeable], wanted[sizeable], rtol=rtol, atol=0)


@pytest.mark.parametrize("states", FORMATS)
def test_moments_from_the_gpu_are_rounded_once(states: StatesFormat, tmp_path: Path) -> None:
    with support.offloading(0.5, states=states) as made:
        support.train(made, support.batches(1))
        superoffload.save_state(made, tmp_path)
        groups = core_of(made).sub_groups
        on_gpu = sum(group.weights.numel() for group in groups if group.on_gpu)
        assert on_gpu
        assert superoffload.load_state(made, tmp_path) == Rounded(blocks=0, numel=0)
    for ratio, numel in ((1.0, on_gpu), (0.0, 0)):
        with support.offloading(ratio, states=states) as made:
            assert superoffload.load_state(made, tmp_path) == Rounded(blocks=0, numel=numel)


@pytest.mark.parametrize("states", FORMATS)
def test_moments_that_no_run_can_have_are_refused(states: StatesFormat, tmp_path: Path) -> None:
    """A negative one would be the largest of its block, and a NaN could become a number."""
    with support.offloading() as made:
        support.train(made, support.batches(1))
        superoffload.save_state(made, tmp_path)
        numel = sub_group_states(made)[0].master_weights.numel()
    written = np.memmap(tmp_path / "rank_00000.states", np.float32, "r+")
    with support.offloading(states=states) as made:
        for element, value in ((numel, np.nan), (2 * numel, np.nan), (2 * numel, -1e-30)):
            kept, written[element] = written[element].copy(), value
            with coded(superoffload.OffloadError, "impossible-moments"):
                superoffload.load_state(made, tmp_path)
            written[element] = kept
        superoffload.load_state(made, tmp_path)


def test_the_seed_selects_the_random_bits() -> None:
    one, other = (trained("int8-moments", support.batches(1), seed=seed) for seed in (1, 2))
    assert one[0] == other[0]
    assert one[1] != other[1]


def test_moments_in_host_memory_are_read_and_not_set_one_by_one() -> None:
    with support.offloading(0.5, states="bf16-moments") as made:
        support.train(made, support.batches(1))
        parameters = dict(made.module.named_parameters())
        for group in core_of(made).sub_groups:
            parameter = parameters[group.names[0]]
            moment = safe_get_full_optimizer_state(parameter, "exp_avg")
            assert moment.abs().max() > 0
            if group.on_gpu:
                safe_set_full_optimizer_state(parameter, 2 * moment, "exp_avg")
                assert torch.equal(safe_get_full_optimizer_state(parameter, "exp_avg"), 2 * moment)
                continue
            with coded(superoffload.OffloadError, "compact-moments"):
                safe_set_full_optimizer_state(parameter, 2 * moment, "exp_avg")


STEPS = 12


def recomputed() -> support.Model:
    """Return a model whose blocks are recomputed in backward."""
    model = support.Model()
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    return model


def gathered_whole() -> support.Model:
    """Return a model whose blocks are all-gathered whole, as blocks of experts are."""
    model = support.Model()
    set_z3_leaf_modules(model, [support.Block])
    return model


def in_host_memory(weights: torch.Tensor) -> bool:
    """Return whether weights are in the memory that the Adam worker shares."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= weights.data_ptr() < end:
            return WEIGHTS_MEMORY_NAME in line
    return False


def trained_with(
    parameters: support.Parameters,
    ratio: float = 0.5,
    model: Callable[[], support.Model] = support.Model,
    **settings: Any,
) -> tuple[Any, ...]:
    torch.manual_seed(0)
    settings = {"clipping": 9.0, "parameters": parameters, **settings}
    with support.offloading(ratio, model(), **settings) as made:
        gradients = record_gradients(made)
        losses = support.train(made, support.batches(STEPS * settings.get("accumulation", 1)))
        superoffload.synchronize(made)
        for group in core_of(made).sub_groups:
            assert in_host_memory(group.weights) == (parameters == "cpu" and not group.on_gpu)
        for state in sub_group_states(made):
            assert torch.equal(state.weights, state.master_weights.to(state.weights.dtype))
        assert len(gradients) >= STEPS
        return losses, gradients, support.states(made)


@pytest.mark.parametrize(
    "settings",
    [
        {"clipping": 0.0, "ratio": 1.0, "accumulation": 3},
        {"speculation_bytes": ALL, "accumulation": 3, "clipping": 7.0},
        {"speculation_bytes": ALL, "states": "int8-moments", "ratio": 1.0},
        {"speculation_bytes": ALL, "dtype": torch.float32},
        {"speculation_bytes": 20_000, "model": support.OddModel, "ratio": 1.0},
        {"model": recomputed, "clipping": 0.0},
        {"model": gathered_whole, "clipping": 0.0},
        {"ratio": 0.0},
    ],
)
def test_losses_gradients_and_states_are_the_same(settings: dict[str, Any]) -> None:
    assert trained_with("cpu", **settings) == trained_with("none", **settings)


def test_two_ranks(tmp_path: Path) -> None:
    """Also: states with weights in host memory are loaded without, and the reverse."""
    script = Path(rank_processes.__file__).with_name("engine_ranks.py")
    rank_processes.finish(rank_processes.start(script, ["host_weights", str(tmp_path)], 2))
    saved = support.by_name(tmp_path / "cpu")
    for parameters in ("none", "cpu"):
        run = {"clipping": 9.0, "parameters": parameters}
        with support.offloading(0.5, support.OddModel(), **run) as made:
            superoffload.load_state(made, tmp_path / "cpu")
            superoffload.save_state(made, tmp_path / f"one-{parameters}")
            assert support.by_name(tmp_path / f"one-{parameters}") == saved
            support.train(made, support.batches(2))


def test_states_for_which_there_is_no_memory_are_refused() -> None:
    given: dict[str, Any] = {"parameters": "cpu", "available_bytes": lambda: 1000}
    with coded(superoffload.OffloadError, "host-memory"), support.offloading(**given):
        pass
