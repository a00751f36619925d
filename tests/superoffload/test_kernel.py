"""The Adam kernel: how it is compiled and kept, how it rounds compact moments, and denormals."""

from __future__ import annotations

import mmap
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch

import superoffload
from so_tui.model.sharding import MOMENT_BLOCK, StatesFormat, state_bytes
from superoffload import kernel
from superoffload.worker import (
    BLOCK,
    Command,
    Kernel,
    MemorySize,
    Moments,
    Operation,
    Segment,
    layout,
)
from tests.support.problems import coded

Floats = npt.NDArray[np.float32]

NUMEL = 3 * (1 << 16) + 77
"""More than one chunk for each of two threads, and a remainder."""
PRECISION = {Moments.BF16: 2**-7, Moments.INT8: 2**-3}
"""Largest relative error of a moment that is rounded up or down."""
SETTINGS: dict[str, Any] = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.999}
SETTINGS |= {"epsilon": 1e-8, "weight_decay": 0.01}
SMALLEST = np.float32(np.finfo(np.float32).smallest_normal)


class States:
    """One sub-group in memory of its own, and the kernel that steps it. The weights are fp32 if
    they are given, and otherwise ones in bf16.
    """

    def __init__(
        self,
        moments: Moments = Moments.FP32,
        segments: Sequence[Segment] = (Segment(NUMEL, 0, 5),),
        *,
        weights: Floats | None = None,
        speculating: bool = False,
    ) -> None:
        weight, bytes_ = (np.uint16, 2) if weights is None else (np.float32, 4)
        size = MemorySize((tuple(segments),), bytes_, False, (0,) * speculating, moments)
        (self.numel,) = size.numels
        memory = mmap.mmap(-1, layout(size).bytes)
        with kernel.opened(kernel.library()) as descriptor:
            self.kernel = Kernel(kernel.loadable(descriptor), memory, size)
        own, (blocks,) = layout(size).states[0], size.blocks
        code = (np.float32, np.uint16, np.uint8)[moments]
        self.codes: list[Any] = [
            np.frombuffer(memory, code, self.numel, start[0])
            for start in (own.first_moment, own.second_moment)
        ]
        self.exponents = [
            np.frombuffer(memory, np.uint8, blocks, start[0])
            for start in (own.first_exponents, own.second_exponents)
        ]
        self._staging = np.frombuffer(memory, weight, self.numel, layout(size).staging[0])
        self.weights = [
            np.frombuffer(memory, np.float32, self.numel, states.master_weights[0])
            for states in layout(size).states[: 1 + speculating]
        ]
        self._staging[:] = 0x3F80 if weights is None else weights  # 1.0 in bf16
        self.kernel.run(Command(Operation.INITIALIZE, 0))

    def run(self, number: int, gradient: Floats, operation: Operation = Operation.STEP) -> None:
        if self._staging.itemsize == 2:
            gradient = (gradient.view(np.uint32) >> 16).astype(np.uint16)
        self._staging[:] = gradient
        self.kernel.run(Command(operation, 0, number, **SETTINGS))

    def found(self, which: int = 0) -> tuple[Floats, Floats, Floats]:
        first, second = np.empty(self.numel, np.float32), np.empty(self.numel, np.float32)
        self.kernel.decode(0, which, first.ctypes.data, second.ctypes.data)
        return self.weights[which].copy(), first, second

    def set_moments(self, first: Floats, second: Floats) -> None:
        self.kernel.encode(0, 0, first.ctypes.data, second.ctypes.data)


def gradients(numel: int = NUMEL, seed: int = 0) -> Floats:
    """Return gradients that bf16 holds exactly, over many orders of magnitude."""
    generator = np.random.default_rng(seed)
    scales = np.exp2(generator.integers(-9, 1, numel)).astype(np.float32)
    values = generator.standard_normal(numel, dtype=np.float32) * scales
    return cast(Floats, (values.view(np.uint32) & 0xFFFF0000).view(np.float32))


def same(found: tuple[Floats, ...], expected: tuple[Floats, ...]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.fixture
def weights() -> Floats:
    return np.random.default_rng(1).standard_normal(NUMEL, dtype=np.float32)


def test_moments_without_gradient_reach_zero_and_not_denormals(weights: Floats) -> None:
    states, zero = States(weights=weights), np.zeros(NUMEL, np.float32)
    first, second = states.codes
    states.run(1, np.full(NUMEL, 1e-30, np.float32))
    assert first.min() > 0
    for number in range(2, 200):  # 1e-31 * 0.9 ** 198 is below the smallest normal number
        states.run(number, zero)
    assert not first.any()
    assert not ((second > 0) & (second < SMALLEST)).any()


def test_denormals_change_no_neighbour_and_no_weight(weights: Floats) -> None:
    gradient = gradients()
    gradient[::3] = 0
    aged, fresh = States(weights=weights), States(weights=weights)
    for states in (aged, fresh):
        states.run(1000, gradient)
    aged.codes[0][::3] = 5.6e-45
    for states in (aged, fresh):
        states.run(1001, gradient)
    assert same(aged.found()[:2], fresh.found()[:2])
    assert np.float32(1e-40) * np.float32(1.0) != 0, "this thread's arithmetic stays as it is"


def test_it_is_torchs_arithmetic_with_denormals_flushed(weights: Floats) -> None:
    """Gradients so small that second moments are denormal."""
    states = States(weights=weights)
    parameter = torch.nn.Parameter(torch.from_numpy(weights.copy()))
    options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    reference = torch.optim.AdamW([parameter], foreach=False, **options)  # type: ignore[arg-type]
    assert torch.set_flush_denormal(True)
    try:
        for number in range(1, 6):
            gradient = gradients(seed=number) * np.float32(1e-19)
            states.run(number, gradient)
            parameter.grad = torch.from_numpy(gradient)
            reference.step()
    finally:
        torch.set_flush_denormal(False)
    kept = reference.state[parameter]
    found, first, second = states.found()
    assert np.allclose(found, parameter.detach().numpy(), rtol=1e-6, atol=0)
    assert np.allclose(first, kept["exp_avg"].numpy(), rtol=1e-5, atol=float(SMALLEST))
    assert np.allclose(second, kept["exp_avg_sq"].numpy(), rtol=1e-5, atol=float(SMALLEST))


def test_worker_and_planner_count_the_same_blocks() -> None:
    assert BLOCK == MOMENT_BLOCK
    shards = ((0, 5), (1, 127), (2, 127), (128, 0), (129, 0), (256, 64))
    assert [Segment(*shard).blocks for shard in shards] == [0, 1, 2, 1, 2, 3]


@pytest.mark.parametrize("states", ["fp32", "bf16-moments", "int8-moments"])
@pytest.mark.parametrize("accumulates", [False, True])
def test_the_memory_is_as_large_as_the_plan_says(states: StatesFormat, accumulates: bool) -> None:
    """The sub-group is as large as they are in practice."""
    numel = 100_000_000
    moments = {"fp32": Moments.FP32, "bf16-moments": Moments.BF16}.get(states, Moments.INT8)
    planned = state_bytes(2, states, accumulates=accumulates) * numel
    size = MemorySize(((Segment(numel),),), 2, accumulates, (), moments)
    assert layout(size).bytes == pytest.approx(planned, rel=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("moments", PRECISION)
def test_moments_round_to_a_neighbour_without_bias(moments: Moments) -> None:
    states, exact = States(moments), States()
    gradient = gradients()
    for each in (states, exact):
        each.run(1, gradient)
    for found, expected in zip(states.found()[1:], exact.found()[1:], strict=True):
        # Values below the reach of the codes are not tested here.
        sizeable = np.abs(gradient) > 2**-10
        error = (found - expected)[sizeable] / expected[sizeable]
        assert np.abs(error).max() < PRECISION[moments]
        assert abs(error.mean()) < 6 * error.std() / len(error) ** 0.5
        assert error.std() > 0.1 * PRECISION[moments]
    assert same(states.found()[:1], exact.found()[:1])  # from moments that were zero, and so exact


@pytest.mark.slow
@pytest.mark.parametrize("moments", PRECISION)
def test_small_changes_of_a_second_moment_are_not_lost(moments: Moments) -> None:
    """It decays by a thousandth a step: far less than the distance of two codes."""
    states, small = States(moments), np.full(NUMEL, 2.0**-9, np.float32)
    states.run(1, np.full(NUMEL, 1.0, np.float32))
    for number in range(2, 302):
        states.run(number, small)
    assert states.found()[2].mean() == pytest.approx(1e-3 * 0.999**300, rel=0.01)


@pytest.mark.slow
def test_only_zero_second_moments_are_rounded_to_zero() -> None:
    gradient = np.zeros(NUMEL, np.float32)
    gradient[::2] = 2.0**-40
    gradient[0::BLOCK] = 1.0
    states = States(Moments.INT8)
    states.run(1, gradient)
    weights, first, second = states.found()
    assert (second[::2] > 0).all()
    assert not first[1::2].any()
    assert not second[1::2].any()
    assert np.isfinite(weights).all()


@pytest.mark.slow
def test_every_code_is_decoded_and_encoded_exactly() -> None:
    """Alone in its block, and beside all others."""
    pairs = np.arange(256 * 256)
    states = States(Moments.INT8, [Segment(1)] * len(pairs) + [Segment(256)] * 256)
    for codes, exponents in zip(states.codes, states.exponents, strict=True):
        codes[:] = np.concatenate((pairs % 256, pairs % 256))
        exponents[:] = np.concatenate((pairs // 256, np.arange(512) // 2))
    _, first, second = states.found()
    assert ((second == 0) == (states.codes[1] == 0)).all()
    for moment in first, second:  # the largest exponent has codes that stand for no number
        moment[np.isnan(moment)] = np.inf
    states.set_moments(first, second)
    assert same(states.found()[1:], (first, second))


@pytest.mark.slow
@pytest.mark.parametrize("moments", PRECISION)
def test_extreme_moments_keep_what_they_are_and_change_no_other(moments: Moments) -> None:
    states, first = States(moments, (Segment(BLOCK),)), np.full(BLOCK, 0.5, np.float32)
    least, tiny = np.float32(2.0**-126), np.float32(1e-40)
    for extreme in (0.0, -0.0, tiny, -tiny, least, -least):
        first[7] = extreme
        states.set_moments(first, abs(first) if extreme else first)
        _, *found = states.found()
        for moment in found:
            assert (np.delete(moment, 7) == 0.5).all()
            assert abs(moment[7]) < 1e-9
        assert bool(found[1][7]) == bool(extreme)
    for extreme in (np.inf, 2.0**126):
        first[7] = extreme
        states.set_moments(-first, first)
        _, *found = states.found()
        assert (found[0][7], found[1][7]) == (-extreme, extreme)


@pytest.mark.slow
@pytest.mark.parametrize("moments", PRECISION)
@pytest.mark.parametrize("cut", [BLOCK * 100, (1 << 16) + 5 * BLOCK])
def test_shards_at_blocks_have_the_bits_of_the_whole(moments: Moments, cut: int) -> None:
    whole, one = States(moments), States(moments, (Segment(cut, 0, 5),))
    other = States(moments, (Segment(NUMEL - cut, cut, 5),))
    for number in range(1, 4):
        gradient = gradients(NUMEL, number)
        whole.run(number, gradient)
        one.run(number, gradient[:cut])
        other.run(number, gradient[cut:])
    joined = map(np.concatenate, zip(one.found(), other.found(), strict=True))
    assert same(tuple(joined), whole.found())


@pytest.mark.slow
def test_other_parameters_steps_and_elements_round_differently() -> None:
    gradient = np.full(NUMEL, 1 + 2.0**-7, np.float32)

    def first(random: int, number: int) -> Floats:
        states = States(Moments.BF16, (Segment(NUMEL, 0, random),))
        states.run(number, gradient)
        return states.found()[1]

    base = first(5, 1)
    assert 0.2 < (base == base[0]).mean() < 0.8
    for other in (first(6, 1), first(5, 2), np.roll(base, 1)):
        assert 0.3 < (other == base).mean() < 0.7


@pytest.mark.slow
def test_without_a_private_cache_a_kernel_is_of_one_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(kernel, "host_folder", lambda: tmp_path / "file")
    with coded(superoffload.OffloadError, "no-cache-folder"):
        kernel.library()
    monkeypatch.setattr(kernel, "host_folder", lambda: tmp_path / "host")
    built = kernel.library()
    assert "on this host only" in caplog.text
    assert built.parent == tmp_path / "host" / "compiled" / "kernels"
    assert stat.S_IMODE(built.parent.stat().st_mode) == 0o700
    assert kernel.library() == built


@pytest.mark.slow
def test_cached_kernels_need_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built = kernel.library()
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    assert kernel.library() == built
    built.rename(built.with_name(f"adam-{'0' * 16}-{'0' * 16}.so"))  # for another CPU
    with coded(superoffload.OffloadError, "no-compiler"):
        kernel.library()
