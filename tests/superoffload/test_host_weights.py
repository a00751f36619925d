"""Weights in host memory: losses, gradients, weights and states as on the GPU, bit for bit.

On the CPU the Adam worker writes them where DeepSpeed gathers them from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from deepspeed.utils import set_z3_leaf_modules
from torch.utils.checkpoint import checkpoint

import superoffload
from superoffload.deepspeed_adapter.engine import sub_group_states
from superoffload.shared_states import WEIGHTS_MEMORY_NAME
from tests.support import engine as support
from tests.support import rank_processes
from tests.support.problems import coded
from tests.support.reference_adamw import core_of, record_gradients

pytestmark = pytest.mark.slow

STEPS = 12


class Recomputed(support.Model):
    """A model whose blocks are recomputed in backward."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits = self.head(x * self.frozen)
        return torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
        )


def gathered_whole() -> support.Model:
    """Return a model whose blocks are all-gathered whole, as blocks of experts are."""
    model = support.Model()
    set_z3_leaf_modules(model, [support.Block])
    return model


MODELS: dict[str, Callable[[], support.Model]] = {
    "plain": support.Model,
    "odd": support.OddModel,
    "recomputed": Recomputed,
    "leaf": gathered_whole,
}
ALL = 1 << 30
"""Bytes that let every sub-group of the small model speculate, or be copied."""
Parameters = Literal["none", "cpu"]


@contextmanager
def engine(
    parameters: Parameters,
    *,
    mode: support.Mode = "superoffload",
    ratio: float = 0.5,
    clipping: float = 9.0,
    accumulation: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    model: str = "plain",
    **settings: Any,
) -> Iterator[Any]:
    run = support.spec(
        mode, ratio, clipping=clipping, accumulation=accumulation, parameters=parameters
    )
    torch.manual_seed(run.train.seed)
    with support.engine(run, dtype, MODELS[model](), **settings) as made:
        yield made


def in_host_memory(weights: torch.Tensor) -> bool:
    """Return whether weights are in the memory that the Adam worker shares."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= weights.data_ptr() < end:
            return WEIGHTS_MEMORY_NAME in line
    return False


def trained(parameters: Parameters, folder: Path, **settings: Any) -> tuple[Any, ...]:
    """Train and return all losses, gradients and states."""
    with engine(parameters, **settings) as made:
        gradients = record_gradients(made)
        losses = support.train(made, support.batches(STEPS * settings.get("accumulation", 1)))
        superoffload.synchronize(made)
        places = [in_host_memory(group.weights) for group in core_of(made).sub_groups]
        assert places == [
            parameters == "cpu" and not group.on_gpu for group in core_of(made).sub_groups
        ]
        for state in sub_group_states(made):
            assert torch.equal(state.weights, state.master_weights.to(state.weights.dtype))
        assert len(gradients) >= STEPS
        return losses, gradients, support.states(made, folder / parameters)


@pytest.mark.parametrize(
    "settings",
    [
        {"clipping": 0.0, "ratio": 1.0, "accumulation": 3},
        {},
        {"speculation_bytes": ALL, "accumulation": 3, "clipping": 7.0},
        {"speculation_bytes": ALL, "states": "int8-moments", "ratio": 1.0},
        {"speculation_bytes": ALL, "dtype": torch.float32},
        {"speculation_bytes": 20_000, "model": "odd", "ratio": 1.0},
        {"model": "recomputed", "clipping": 0.0},
        {"model": "leaf", "clipping": 0.0},
        {"ratio": 0.0},
    ],
)
def test_losses_gradients_and_states_are_the_same(settings: dict[str, Any], tmp_path: Path) -> None:
    here = trained("none", tmp_path, **settings)
    there = trained("cpu", tmp_path, **settings)
    assert there == here


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_with_deepspeeds_zero_offload_too(ratio: float, tmp_path: Path) -> None:
    found = []
    for parameters in ("none", "cpu"):
        with engine(parameters, mode="zerooffload", ratio=ratio, clipping=1.0) as made:
            assert made.optimizer.offload_param == (parameters == "cpu")
            found.append(
                (
                    support.train(made, support.batches(STEPS)),
                    support.states(made, tmp_path / parameters),
                )
            )
    assert found[0] == found[1]


def test_two_ranks(tmp_path: Path) -> None:
    """Also: states with weights in host memory are loaded without, and the reverse."""
    script = Path(rank_processes.__file__).with_name("engine_ranks.py")
    rank_processes.finish(rank_processes.start(script, ["host_weights", str(tmp_path)], 2))
    saved = support.by_name(tmp_path / "cpu")
    for parameters in ("none", "cpu"):
        with engine(parameters, model="odd") as made:
            superoffload.load_state(made, tmp_path / "cpu")
            superoffload.save_state(made, tmp_path / f"one-{parameters}")
            assert support.by_name(tmp_path / f"one-{parameters}") == saved
            support.train(made, support.batches(2))


@pytest.mark.parametrize(
    ("parameters", "speculation_bytes"), [("cpu", 0), ("cpu", ALL), ("none", ALL)]
)
def test_a_skipped_step_leaves_the_weights(
    parameters: Parameters, speculation_bytes: int, tmp_path: Path
) -> None:
    data = support.batches(8)
    with engine("none", ratio=1.0) as made:
        expected = support.train(made, data), support.states(made, tmp_path / "expected")
    with engine(
        parameters, ratio=1.0, speculation_bytes=speculation_bytes, max_skipped_steps=1
    ) as made:
        losses = support.train(made, data[:4])
        superoffload.synchronize(made)
        before = [group.weights.clone() for group in core_of(made).sub_groups]
        hook = support.poison(made)
        support.train(made, support.batches(1, seed=9))
        hook.remove()
        assert made.skipped_steps == 1
        superoffload.synchronize(made)
        assert all(
            torch.equal(*pair)
            for pair in zip(
                before, (group.weights for group in core_of(made).sub_groups), strict=True
            )
        )
        losses += support.train(made, data[4:])
        assert (losses, support.states(made, tmp_path / "found")) == expected


@pytest.mark.parametrize(("first", "second"), [("none", "cpu"), ("cpu", "none")])
def test_a_run_resumes_with_weights_elsewhere(
    first: Parameters, second: Parameters, tmp_path: Path
) -> None:
    data = support.batches(STEPS)
    with engine(first, ratio=0.8, speculation_bytes=ALL) as made:
        support.train(made, data[:6])
        superoffload.save_state(made, tmp_path / "saved")
        expected = support.train(made, data[6:]), support.states(made, tmp_path / "expected")
    with engine(second, ratio=0.8) as made:
        # What was trained before must have no effect.
        support.train(made, support.batches(3, seed=5))
        superoffload.load_state(made, tmp_path / "saved")
        assert (support.train(made, data[6:]), support.states(made, tmp_path / "found")) == expected


@pytest.mark.parametrize("speculation_bytes", [0, ALL])
def test_a_state_is_written_while_training_goes_on(speculation_bytes: int, tmp_path: Path) -> None:
    data, ends = support.batches(STEPS), []
    for copying in (False, True):
        with engine(
            "cpu", ratio=1.0, copies_bytes=ALL, speculation_bytes=speculation_bytes
        ) as made:
            support.train(made, data[:6])
            save = superoffload.begin_save(made, tmp_path / str(copying), copying=copying)
            with ThreadPoolExecutor(1) as threads:
                finished = threads.submit(save.finish)
                support.train(made, data[6:])
                finished.result()
            ends.append(
                (
                    (tmp_path / str(copying) / "rank_00000.states").read_bytes(),
                    support.states(made, tmp_path / f"end-{copying}"),
                )
            )
    assert ends[0] == ends[1]


def test_deepspeeds_own_checkpoints_load(tmp_path: Path) -> None:
    data = support.batches(12)
    with engine("cpu") as made:
        support.train(made, data[:6])
        made.save_checkpoint(str(tmp_path), tag="six")
        expected = support.train(made, data[6:])
    with engine("cpu") as made:
        support.train(made, support.batches(2, seed=3))
        made.load_checkpoint(str(tmp_path), tag="six")
        assert support.train(made, data[6:]) == expected


def test_a_change_by_hand_lasts() -> None:
    with engine("cpu") as made:
        support.train(made, support.batches(2))
        superoffload.synchronize(made)
        for group in core_of(made).sub_groups:
            group.weights.zero_()
        made.optimizer.refresh_fp32_params()
        assert all(
            not core_of(made).state(index).master_weights.any()
            for index in range(len(core_of(made).sub_groups))
        )


def test_states_for_which_there_is_no_memory_are_refused() -> None:
    with (
        coded(superoffload.OffloadError, "host-memory"),
        engine("cpu", available_bytes=lambda: 1000),
    ):
        pass
