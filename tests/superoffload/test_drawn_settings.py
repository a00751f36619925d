"""Engines with drawn settings, compared with plain AdamW. One rank, on the CPU."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch

import superoffload
from tests.support import engine as support

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


class Drawn:
    """A run of drawn settings; the same one from the same seed."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)

        def power(least: float, most: float) -> float:
            return float(10 ** draw.uniform(least, most))

        self.seed = seed
        self.shapes = tuple(
            tuple(draw.randint(1, 20) for _ in range(draw.randint(1, 3)))
            for _ in range(draw.randint(1, 7))
        )
        self.settings = superoffload.Settings(
            ratio=draw.choice((0.0, 1.0, 1.0, draw.random(), draw.random())),
            speculation_bytes=draw.choice((0, draw.randint(1, 50_000), support.ALL)),
            learning_rate=1.0,
            beta1=draw.choice((0.0, 0.8, 0.9)),
            beta2=draw.choice((0.9, 0.95, 0.999)),
            epsilon=power(-9, -6),
            weight_decay=draw.choice((0.0, 0.1)),
        )
        self.steps: list[tuple[float, list[float]]] = []
        """Learning rate, and the magnitude of each parameter's gradients."""
        for _ in range(draw.randint(3, 7)):
            size = power(-1, 1)
            sizes = [draw.choice((0.0, size, size, size * power(-2, 1))) for _ in self.shapes]
            self.steps.append((draw.choice((0.0, power(-5, -1), power(-3, -1))), sizes))
        self.decays = [draw.choice((None, 0.0, 0.05, 0.5)) for _ in self.shapes]
        """For each parameter's group; None where the settings decide."""
        self.accumulation = draw.choice((1, 1, 2, 3, 4))
        self.clipping = draw.choice((0.0, power(-3, 0), power(0, 2), power(1, 2), power(1, 2), 1e6))
        self.dtype = draw.choice((torch.bfloat16, torch.float32))
        on_host: dict[str, Any] = {"device": "cpu"}
        offload = {"offload_optimizer": on_host | {"ratio": 0.3}}, {"offload_param": on_host}
        self.ds_config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clipping,
            "bf16": {"enabled": self.dtype == torch.bfloat16},
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": draw.choice((1, draw.randint(1, 500), draw.randint(1, 3000))),
                "reduce_bucket_size": draw.randint(1, 3000),
                "stage3_prefetch_bucket_size": draw.randint(0, 3000),
                "stage3_param_persistence_threshold": draw.randint(0, 200),
                "stage3_max_live_parameters": draw.randint(0, 10_000),
                "overlap_comm": draw.random() < 0.5,
                **draw.choice(({}, *offload)),
            },
        }

    def model(self) -> Products:
        torch.manual_seed(self.seed)
        return Products(self.shapes).to(self.dtype)

    def groups(self, parameters: list[torch.Tensor]) -> list[dict[str, Any]]:
        found: dict[float | None, dict[str, Any]] = {}
        for decay, parameter in zip(self.decays, parameters, strict=True):
            alone = {} if decay is None else {"weight_decay": decay}
            found.setdefault(decay, {"params": [], **alone})["params"].append(parameter)
        return list(found.values())

    def factors(self) -> Iterator[tuple[float, list[Factors]]]:
        """Yield the learning rate of each step, and the factors of its micro-batches."""
        generator = torch.Generator().manual_seed(self.seed)
        for rate, magnitudes in self.steps:
            sizes = list(zip(self.shapes, magnitudes, strict=True))
            drawn = (
                [size * torch.randn(shape, generator=generator) for shape, size in sizes]
                for _ in range(self.accumulation)
            )
            yield rate, list(drawn)


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


@pytest.mark.slow
def test_drawn_runs_are_those_of_plain_adamw_with_clipping() -> None:
    support.ensure_process_group()
    kept = redone = 0
    for seed in range(20):
        try:
            stats = try_run(Drawn(seed))
        except BaseException as error:
            error.add_note(f"drawn from seed {seed}")
            raise
        kept, redone = kept + stats.kept_steps, redone + stats.redone_steps
    assert min(kept, redone) > 10
