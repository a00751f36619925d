"""Engines with drawn settings, compared with plain AdamW. One rank, on the CPU.

``SO_TUI_FUZZ_S=600`` draws new runs for ten minutes; by default the same few are drawn.
"""

from __future__ import annotations

import copy
import os
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch

import superoffload
from tests.support import engine as support

pytestmark = pytest.mark.slow

LONG_S = float(os.environ.get("SO_TUI_FUZZ_S", "0"))
RUNS = 20
ON_HOST: dict[str, Any] = {"device": "cpu"}
WEIGHTS_ON_HOST = {"offload_param": ON_HOST}


Factors = list[torch.Tensor]
"""Of each parameter."""


class Product(torch.nn.Module):
    """The sum of a parameter's products with given factors, which are its gradient."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(shape))

    def forward(self, factors: torch.Tensor) -> torch.Tensor:
        return (self.weight.float() * factors).sum()


class Products(torch.nn.Module):
    def __init__(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(Product(shape) for shape in shapes)

    def forward(self, factors: Factors) -> torch.Tensor:
        products = [part(each) for part, each in zip(self.parts, factors, strict=True)]
        return torch.stack(products).sum()


@dataclass(frozen=True)
class Drawn:
    shapes: tuple[tuple[int, ...], ...]
    decays: tuple[float | None, ...]
    """Weight decay of each parameter's group; None for a group that leaves it to the settings."""
    steps: tuple[tuple[float, tuple[float, ...]], ...]
    """Learning rate, and the magnitude of each parameter's gradients."""
    accumulation: int
    clipping: float
    dtype: torch.dtype
    settings: superoffload.Settings
    zero: dict[str, Any]
    seed: int

    @property
    def ds_config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clipping,
            "bf16": {"enabled": self.dtype == torch.bfloat16},
            "zero_optimization": {"stage": 3, **copy.deepcopy(self.zero)},
        }

    def model(self) -> Products:
        torch.manual_seed(self.seed)
        return Products(self.shapes).to(self.dtype)

    def groups(self, parameters: list[torch.Tensor]) -> list[dict[str, Any]]:
        """Return the parameters grouped by their decay."""
        found: dict[float | None, list[torch.Tensor]] = {}
        for decay, parameter in zip(self.decays, parameters, strict=True):
            found.setdefault(decay, []).append(parameter)
        return [
            {"params": members} if decay is None else {"params": members, "weight_decay": decay}
            for decay, members in found.items()
        ]

    def factors(self) -> Iterator[tuple[float, list[Factors]]]:
        """Yield the learning rate of each step, and the factors of its micro-batches."""
        generator = torch.Generator().manual_seed(self.seed)
        for learning_rate, magnitudes in self.steps:
            sizes = list(zip(self.shapes, magnitudes, strict=True))
            yield (
                learning_rate,
                [
                    [size * torch.randn(shape, generator=generator) for shape, size in sizes]
                    for _ in range(self.accumulation)
                ],
            )


def drawn(seed: int) -> Drawn:
    """Draw a run; the same one from the same seed."""
    draw = random.Random(seed)

    def power(least: float, most: float) -> float:
        return float(10 ** draw.uniform(least, most))

    shapes = tuple(
        tuple(draw.randint(1, 20) for _ in range(draw.randint(1, 3)))
        for _ in range(draw.randint(1, 7))
    )
    made = superoffload.Settings(
        ratio=draw.choice((0.0, 1.0, 1.0, draw.random(), draw.random())),
        speculation_bytes=draw.choice((0, draw.randint(1, 50_000), support.ALL)),
        learning_rate=1.0,
        beta1=draw.choice((0.0, 0.8, 0.9)),
        beta2=draw.choice((0.9, 0.95, 0.999)),
        epsilon=power(-9, -6),
        weight_decay=draw.choice((0.0, 0.1)),
    )
    steps = []
    for _ in range(draw.randint(3, 7)):
        size = power(-1, 1)
        magnitudes = tuple(draw.choice((0.0, size, size, size * power(-2, 1))) for _ in shapes)
        steps.append((draw.choice((0.0, power(-5, -1), power(-3, -1))), magnitudes))
    return Drawn(
        shapes=shapes,
        decays=tuple(draw.choice((None, 0.0, 0.05, 0.5)) for _ in shapes),
        steps=tuple(steps),
        accumulation=draw.choice((1, 1, 2, 3, 4)),
        clipping=draw.choice((0.0, power(-3, 0), power(0, 2), power(1, 2), power(1, 2), 1e6)),
        dtype=draw.choice((torch.bfloat16, torch.float32)),
        settings=made,
        zero={
            "sub_group_size": draw.choice((1, draw.randint(1, 500), draw.randint(1, 3000))),
            "reduce_bucket_size": draw.randint(1, 3000),
            "stage3_prefetch_bucket_size": draw.randint(0, 3000),
            "stage3_param_persistence_threshold": draw.randint(0, 200),
            "stage3_max_live_parameters": draw.randint(0, 10_000),
            "overlap_comm": draw.random() < 0.5,
            **draw.choice(({}, {"offload_optimizer": ON_HOST | {"ratio": 0.3}}, WEIGHTS_ON_HOST)),
        },
        seed=seed,
    )


class Plain:
    """Float32 AdamW with clipping over the parameters of a model, without DeepSpeed."""

    def __init__(self, run: Drawn) -> None:
        self.run, self.model = run, run.model()
        self.weights = [each.detach().float().clone() for each in self.model.parameters()]
        made = run.settings
        self.optimizer = torch.optim.AdamW(
            run.groups(list(self.weights)),
            lr=made.learning_rate,
            betas=(made.beta1, made.beta2),
            eps=made.epsilon,
            weight_decay=made.weight_decay,
            foreach=False,
        )
        self.largest = [0.0 for _ in self.weights]
        """Magnitude of each parameter's gradients so far."""

    def step(self, learning_rate: float, micro_batches: list[Factors]) -> float:
        """Step and return the norm before clipping. Gradients are summed in float32."""
        sums = [torch.zeros_like(weights) for weights in self.weights]
        for factors in micro_batches:
            (self.model(factors) / self.run.accumulation).backward()
            for total, parameter in zip(sums, self.model.parameters(), strict=True):
                assert parameter.grad is not None
                total += parameter.grad.float()
                parameter.grad = None
        norm = float(torch.stack([total.double().square().sum() for total in sums]).sum().sqrt())
        scale = min(1.0, self.run.clipping / (norm + 1e-6)) if self.run.clipping else 1.0
        for index, (weights, total) in enumerate(zip(self.weights, sums, strict=True)):
            weights.grad = total * scale
            self.largest[index] = max(self.largest[index], float(weights.grad.abs().max()))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        return norm


def try_run(run: Drawn) -> superoffload.OffloadStats:
    """Compare norms, states and weights with and without the engine; return its stats."""
    plain, model = Plain(run), run.model()
    names, parameters = zip(*model.named_parameters(), strict=True)
    groups = run.groups(list(parameters))
    made, *_ = superoffload.initialize(model, groups, run.settings, run.ds_config)
    try:
        for learning_rate, micro_batches in run.factors():
            superoffload.set_learning_rate(made, learning_rate)
            for factors in micro_batches:
                made.backward(made(factors))
                made.step()
            expected_norm = plain.step(learning_rate, micro_batches)
            assert superoffload.gradient_norm(made) == pytest.approx(expected_norm, rel=1e-6)
        stats = superoffload.stats(made)
        with tempfile.TemporaryDirectory() as folder:
            superoffload.save_state(made, Path(folder))
            saved = support.by_name(Path(folder))
        with deepspeed.zero.GatheredParameters(list(parameters)):
            weights = [each.detach().flatten().clone() for each in parameters]
    finally:
        superoffload.close(made)
    assert saved.keys() == set(names)
    taken = sum(learning_rate for learning_rate, _ in run.steps)
    for index, name in enumerate(names):
        steps, found = saved[name]
        assert steps == len(run.steps)
        master, first, second = (np.frombuffer(each, dtype=np.float32) for each in found)
        assert torch.equal(weights[index], torch.from_numpy(master.copy()).to(run.dtype)), name
        expected, state = plain.weights[index], plain.optimizer.state[plain.weights[index]]
        assert_close(master, expected, atol=1e-5 * taken)
        assert_close(first, state["exp_avg"], atol=1e-6 * plain.largest[index])
        assert_close(second, state["exp_avg_sq"], atol=1e-6 * plain.largest[index] ** 2)
    return stats


def assert_close(found: np.ndarray[Any, Any], expected: torch.Tensor, atol: float) -> None:
    """Assert that values agree to 1e-6, or to what cancels out of them."""
    np.testing.assert_allclose(found, expected.detach().flatten().numpy(), rtol=1e-6, atol=atol)


def seeds() -> Iterator[int]:
    """Yield the seeds of the fixed runs, or of new ones for as long as the environment says."""
    yield from range(0 if LONG_S else RUNS)
    end = time.monotonic() + LONG_S
    while time.monotonic() < end:
        yield random.randrange(1 << 32)


def test_drawn_runs_are_those_of_plain_adamw_with_clipping() -> None:
    support.ensure_process_group()
    kept = redone = 0
    for seed in seeds():
        try:
            stats = try_run(drawn(seed))
        except BaseException as error:
            error.add_note(f"drawn from seed {seed}")
            raise
        kept, redone = kept + stats.kept_steps, redone + stats.redone_steps
    assert min(kept, redone) > 10
