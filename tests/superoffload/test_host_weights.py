"""Weights in host memory: losses, gradients, weights and states as on the GPU, bit for bit.

On the CPU the Adam worker writes them where DeepSpeed gathers them from.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import set_z3_leaf_modules
from torch.utils.checkpoint import checkpoint

import superoffload
from superoffload.deepspeed_adapter.engine import sub_group_states
from superoffload.shared_states import WEIGHTS_MEMORY_NAME
from tests.support import engine as support
from tests.support import rank_processes
from tests.support.engine import ALL
from tests.support.problems import coded
from tests.support.reference_adamw import core_of, record_gradients

pytestmark = pytest.mark.slow

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


def trained(
    parameters: support.Parameters,
    ratio: float = 0.5,
    model: Callable[[], support.Model] = support.Model,
    **settings: Any,
) -> tuple[Any, ...]:
    """Train and return all losses, gradients and states."""
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
    assert trained("cpu", **settings) == trained("none", **settings)


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
