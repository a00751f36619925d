"""Moments without gradients decay into denormal numbers, which count as zero and cost nothing."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt
import pytest
import torch

from superoffload import kernel
from superoffload.worker import Command, Kernel, MemorySize, Operation, Segment, layout

NUMEL = 3 * (1 << 16) + 77
"""More than one chunk for each of two threads, and a remainder."""
LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01
SMALLEST = np.float32(np.finfo(np.float32).smallest_normal)

Floats = npt.NDArray[np.float32]


class States:
    """One sub-group of fp32 weights in memory of its own, and the kernel that steps it."""

    def __init__(self, weights: Floats) -> None:
        size = MemorySize(((Segment(NUMEL),),), 4, accumulate=False)
        sizes = layout(size)
        memory = mmap.mmap(-1, sizes.bytes)
        with kernel.opened(kernel.library()) as descriptor:
            self._kernel = Kernel(kernel.loadable(descriptor), memory, size)
        starts = (sizes.staging, *sizes.states[0][:3])
        self.staging, self.weights, self.first, self.second = (
            np.frombuffer(memory, np.float32, NUMEL, start[0]) for start in starts
        )
        self.staging[:] = weights
        self._kernel.run(Command(Operation.INITIALIZE, 0))

    def step(self, number: int, gradient: Floats) -> None:
        self.staging[:] = gradient
        settings = {
            "learning_rate": LEARNING_RATE,
            "beta1": BETAS[0],
            "beta2": BETAS[1],
            "epsilon": EPSILON,
            "weight_decay": WEIGHT_DECAY,
        }
        self._kernel.run(Command(Operation.STEP, 0, number, **settings))  # type: ignore[arg-type]


@pytest.fixture
def weights() -> Floats:
    return np.random.default_rng(1).standard_normal(NUMEL, dtype=np.float32)


def test_moments_without_gradient_reach_zero_and_not_denormals(weights: Floats) -> None:
    states, zero = States(weights), np.zeros(NUMEL, np.float32)
    states.step(1, np.full(NUMEL, 1e-30, np.float32))
    assert states.first.min() > 0
    for number in range(2, 200):  # 1e-31 * 0.9 ** 198 is below the smallest normal number
        states.step(number, zero)
    assert not states.first.any()
    assert not ((states.second > 0) & (states.second < SMALLEST)).any()


def test_denormals_change_no_neighbour(weights: Floats) -> None:
    """Also that a denormal moment does not change its weight."""
    gradient = np.random.default_rng(2).standard_normal(NUMEL, dtype=np.float32)
    gradient[::3] = 0
    aged, fresh = States(weights), States(weights)
    for states in (aged, fresh):
        states.step(1000, gradient)
    aged.first[::3] = 5.6e-45
    for states in (aged, fresh):
        states.step(1001, gradient)
    assert (aged.weights == fresh.weights).all()
    assert (aged.first == fresh.first).all()


def test_the_arithmetic_of_the_calling_thread_stays_as_it_is(weights: Floats) -> None:
    States(weights).step(1, weights)
    assert np.float32(1e-40) * np.float32(1.0) != 0


def test_it_is_torchs_arithmetic_with_denormals_flushed(weights: Floats) -> None:
    """Gradients so small that second moments are denormal."""
    states = States(weights)
    parameter = torch.nn.Parameter(torch.from_numpy(weights.copy()))
    reference = torch.optim.AdamW(
        [parameter],
        lr=LEARNING_RATE,
        betas=BETAS,
        eps=EPSILON,
        weight_decay=WEIGHT_DECAY,
        foreach=False,
    )
    generator = np.random.default_rng(3)
    assert torch.set_flush_denormal(True)
    try:
        for number in range(1, 6):
            gradient = generator.standard_normal(NUMEL, dtype=np.float32) * np.float32(1e-19)
            states.step(number, gradient)
            parameter.grad = torch.from_numpy(gradient)
            reference.step()
    finally:
        torch.set_flush_denormal(False)
    kept = reference.state[parameter]
    assert np.allclose(states.weights, parameter.detach().numpy(), rtol=1e-6, atol=0)
    assert np.allclose(states.first, kept["exp_avg"].numpy(), rtol=1e-5, atol=float(SMALLEST))
    assert np.allclose(states.second, kept["exp_avg_sq"].numpy(), rtol=1e-5, atol=float(SMALLEST))
