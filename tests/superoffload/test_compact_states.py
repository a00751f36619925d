"""Moments in bf16 and 8 bits: how they round, whatever ranks, threads and speculation are."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state

import superoffload
from so_tui.model.sharding import MOMENT_BLOCK, StatesFormat, state_bytes
from superoffload import kernel
from superoffload.checkpoint import Manifest, Rounded, SubGroupRecord, _rounded
from superoffload.deepspeed_adapter.engine import sub_group_states
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
from tests.support import engine as support
from tests.support.problems import coded
from tests.support.reference_adamw import core_of

pytestmark = pytest.mark.slow

Floats = npt.NDArray[np.float32]

FORMATS: tuple[StatesFormat, ...] = ("bf16-moments", "int8-moments")
EACH_FORMAT = ["bf16-moments", "int8-moments"]
ALL = 1 << 30
NUMEL = 3 * (1 << 16) + 77
PRECISION = {Moments.BF16: 2**-7, Moments.INT8: 2**-3}
"""Largest relative error of a moment that is rounded up or down."""


class States:
    """One sub-group of bf16 weights in memory of its own, and the kernel that steps it."""

    def __init__(
        self,
        moments: Moments,
        segments: Sequence[Segment] = (Segment(NUMEL, 0, 5),),
        *,
        speculating: bool = False,
    ) -> None:
        size = MemorySize((tuple(segments),), 2, False, (0,) if speculating else (), moments)
        (self.numel,) = size.numels
        memory = mmap.mmap(-1, layout(size).bytes)
        with kernel.opened(kernel.library()) as descriptor:
            self.kernel = Kernel(kernel.loadable(descriptor), memory, size)
        own, (blocks,) = layout(size).states[0], size.blocks
        self.codes = [
            np.frombuffer(memory, np.uint8, self.numel, start[0])
            for start in (own.first_moment, own.second_moment)
        ]
        self.exponents = [
            np.frombuffer(memory, np.uint8, blocks, start[0])
            for start in (own.first_exponents, own.second_exponents)
        ]
        self._staging = np.frombuffer(memory, np.uint16, self.numel, layout(size).staging[0])
        self._weights = [
            np.frombuffer(memory, np.float32, self.numel, states.master_weights[0])
            if not which or speculating
            else np.empty(0)
            for which, states in enumerate(layout(size).states[:2])
        ]
        self._staging[:] = 0x3F80  # 1.0
        self.kernel.run(Command(Operation.INITIALIZE, 0))

    def run(self, number: int, gradient: Floats, operation: Operation = Operation.STEP) -> None:
        self._staging[:] = (gradient.view(np.uint32) >> 16).astype(np.uint16)
        settings: dict[str, float] = {
            "learning_rate": 1e-3,
            "beta1": 0.9,
            "beta2": 0.999,
            "epsilon": 1e-8,
            "weight_decay": 0.01,
        }
        self.kernel.run(Command(operation, 0, number, **cast(Any, settings)))

    def found(self, which: int = 0) -> tuple[Floats, Floats, Floats]:
        """Return copies of weights and moments."""
        first, second = np.empty(self.numel, np.float32), np.empty(self.numel, np.float32)
        self.kernel.decode(0, which, first.ctypes.data, second.ctypes.data)
        return cast(Floats, self._weights[which].copy()), first, second

    def set_moments(self, first: Floats, second: Floats) -> None:
        self.kernel.encode(0, 0, first.ctypes.data, second.ctypes.data)


def gradients(numel: int = NUMEL, seed: int = 0) -> Floats:
    """Return gradients that bf16 holds exactly, over many orders of magnitude."""
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(numel, dtype=np.float32) * np.exp2(
        generator.integers(-9, 1, numel)
    ).astype(np.float32)
    return cast(Floats, (values.view(np.uint32) & 0xFFFF0000).view(np.float32))


def same(found: tuple[Floats, ...], expected: tuple[Floats, ...]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


def test_worker_and_planner_count_the_same_blocks() -> None:
    assert BLOCK == MOMENT_BLOCK
    segments = [
        Segment(numel, place)
        for numel, place in ((0, 5), (1, 127), (2, 127), (128, 0), (129, 0), (256, 64))
    ]
    assert [segment.blocks for segment in segments] == [0, 1, 2, 1, 2, 3]


@pytest.mark.parametrize("moments", PRECISION)
def test_moments_round_to_a_neighbour_without_bias(moments: Moments) -> None:
    states, exact = States(moments), States(Moments.FP32)
    gradient = gradients()
    for each in (states, exact):
        each.run(1, gradient)
    for found, expected in zip(states.found()[1:], exact.found()[1:], strict=True):
        # What is smaller than the codes reach is not tested here.
        sizeable = np.abs(gradient) > 2**-10
        error = (found - expected)[sizeable] / expected[sizeable]
        assert np.abs(error).max() < PRECISION[moments]
        assert abs(error.mean()) < 6 * error.std() / len(error) ** 0.5
        assert error.std() > 0.1 * PRECISION[moments]
    assert same(states.found()[:1], exact.found()[:1])  # from moments that were zero, and so exact


@pytest.mark.parametrize("moments", PRECISION)
def test_small_changes_of_a_second_moment_are_not_lost(moments: Moments) -> None:
    """It decays by a thousandth a step: far less than the distance of two codes."""
    states, large, small = (
        States(moments),
        np.full(NUMEL, 1.0, np.float32),
        np.full(NUMEL, 2.0**-9, np.float32),
    )
    states.run(1, large)
    for number in range(2, 302):
        states.run(number, small)
    expected = 1e-3 * 0.999**300
    assert states.found()[2].mean() == pytest.approx(expected, rel=0.01)


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


@pytest.mark.parametrize("moments", PRECISION)
@pytest.mark.parametrize("place", [0, 77])
def test_what_was_decoded_is_encoded_without_rounding(moments: Moments, place: int) -> None:
    states = States(
        moments, (Segment(1000, place, 1), Segment(333, 0, 2), Segment(NUMEL, place, 3))
    )
    for number in range(1, 4):
        states.run(number, gradients(states.numel, number))
    before = states.found()
    states.set_moments(*(np.zeros(states.numel, np.float32) for _ in range(2)))
    assert not states.found()[1].any()
    states.set_moments(*before[1:])
    assert same(states.found(), before)


def test_every_code_is_decoded_and_encoded_exactly() -> None:
    """Alone in its block, and beside all others."""
    pairs = np.arange(256 * 256)
    states = States(Moments.INT8, [Segment(1)] * len(pairs) + [Segment(256)] * 256)
    for codes, exponents in zip(states.codes, states.exponents, strict=True):
        codes[:] = np.concatenate((pairs % 256, pairs % 256))
        exponents[:] = np.concatenate((pairs // 256, np.arange(512) // 2))
    _, first, second = states.found()
    assert (second[states.codes[1] == 0] == 0).all()
    assert (second[states.codes[1] != 0] != 0).all()
    for moment in first, second:  # the largest exponent has codes that stand for no number
        moment[np.isnan(moment)] = np.inf
    states.set_moments(first, second)
    assert same(states.found()[1:], (first, second))


@pytest.mark.parametrize("moments", PRECISION)
def test_extreme_moments_keep_what_they_are_and_change_no_other(moments: Moments) -> None:
    states, least, tiny = (
        States(moments, (Segment(BLOCK),)),
        np.float32(2.0**-126),
        np.float32(1e-40),
    )
    for extreme in (0.0, -0.0, tiny, -tiny, least, -least):
        first = np.full(BLOCK, 0.5, np.float32)
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


@pytest.mark.parametrize("moments", PRECISION)
def test_a_speculative_step_has_the_bits_of_a_step_in_place(moments: Moments) -> None:
    segments = (Segment(1000, 77, 1), Segment(NUMEL, 0, 3))
    states = States(moments, segments, speculating=True)
    for number in range(1, 4):
        states.run(number, gradients(states.numel, number))
    before = states.found()
    states.run(4, gradients(states.numel, 4), Operation.SPECULATE)
    speculated = states.found(1)
    assert same(states.found(), before)
    states.run(4, gradients(states.numel, 4))
    assert same(states.found(), speculated)
    assert not same(states.found(), before)


@pytest.mark.parametrize("moments", PRECISION)
@pytest.mark.parametrize("cut", [BLOCK * 100, (1 << 16) + 5 * BLOCK])
def test_shards_at_blocks_have_the_bits_of_the_whole(moments: Moments, cut: int) -> None:
    whole = States(moments)
    parts = States(moments, (Segment(cut, 0, 5),)), States(moments, (Segment(NUMEL - cut, cut, 5),))
    for number in range(1, 4):
        gradient = gradients(NUMEL, number)
        whole.run(number, gradient)
        for part, values in zip(parts, (gradient[:cut], gradient[cut:]), strict=True):
            part.run(number, values)
    joined = tuple(
        np.concatenate(arrays) for arrays in zip(*(part.found() for part in parts), strict=True)
    )
    assert same(joined, whole.found())


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


def test_the_number_of_threads_changes_nothing() -> None:
    script = (
        "import hashlib; from tests.superoffload.test_compact_states import *\n"
        "for moments in PRECISION:\n"
        "    s = States(moments)\n"
        "    for number in (1, 2, 3): s.run(number, gradients(NUMEL, number))\n"
        "    print(hashlib.sha256(b''.join(array.tobytes() for array in s.found())).hexdigest())"
    )
    found = [
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"OMP_NUM_THREADS": threads},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()[-2:]
        for threads in ("1", "3")
    ]
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


@pytest.mark.parametrize("states", ["fp32", *FORMATS])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_memory_is_as_large_as_the_plan_says(states: StatesFormat, accumulation: int) -> None:
    """Of a sub-group as large as they are in practice."""
    numel = 100_000_000
    moments = {"fp32": Moments.FP32, "bf16-moments": Moments.BF16, "int8-moments": Moments.INT8}[
        states
    ]
    size = MemorySize(((Segment(numel),),), 2, accumulation > 1, (), moments)
    assert layout(size).bytes == pytest.approx(
        state_bytes(2, states, accumulates=accumulation > 1) * numel, rel=0.005
    )


def trained(
    states: StatesFormat, data: list[torch.Tensor], folder: Path, poisoned: int = 0, **settings: Any
) -> tuple[Any, ...]:
    """Train and return losses, states and stats; one step after ``poisoned`` ones is not finite."""
    with support.engine(
        support.spec("superoffload", 0.8, clipping=10.7),
        states=states,
        max_skipped_steps=1,
        **settings,
    ) as made:
        losses = support.train(made, data[:poisoned])
        if poisoned:
            hook = support.poison(made)
            support.train(made, support.batches(1, seed=9))
            hook.remove()
            assert made.skipped_steps == 1
        losses += support.train(made, data[poisoned:])
        return losses, support.states(made, folder), superoffload.stats(made)


@pytest.mark.parametrize("states", EACH_FORMAT)
def test_compact_runs_are_close_to_fp32(states: StatesFormat, tmp_path: Path) -> None:
    """Steps are kept, redone and skipped. The bits are those of steps that are held back."""
    data = support.batches(2) * 10
    exact = trained("fp32", data, tmp_path / "fp32")
    held = trained(states, data, tmp_path / "held")
    early = trained(states, data, tmp_path / "early", 10, speculation_bytes=ALL)
    assert early[:2] == held[:2]
    assert min(early[2].kept_steps, early[2].redone_steps) >= 2
    assert held[0] != exact[0]
    assert exact[0][-1] < 0.7 * exact[0][0]
    assert held[0][-1] == pytest.approx(exact[0][-1], rel=0.1)


def test_a_state_of_one_format_continues_in_another(tmp_path: Path) -> None:
    """In both directions, from fp32 and back: the moments are rounded once, the weights are not."""
    run = support.spec("superoffload", 1.0)
    with support.engine(run) as made:
        support.train(made, support.batches(2))
        superoffload.save_state(made, tmp_path / "fp32")
        exact = [state.moments() for state in sub_group_states(made) if state.moments]
        weights = [state.master_weights.clone() for state in sub_group_states(made)]
        for states, precision in zip(FORMATS, (2**-8, 2**-4), strict=True):
            with support.engine(run, states=states) as other:
                superoffload.load_state(other, tmp_path / "fp32")
                for state, moments, expected in zip(
                    sub_group_states(other), exact, weights, strict=True
                ):
                    assert state.moments is not None
                    assert torch.equal(state.master_weights, expected)
                    for found, wanted in zip(state.moments(), moments, strict=True):
                        sizeable = wanted.abs() > wanted.abs().max() * 2**-12
                        assert torch.allclose(
                            found[sizeable], wanted[sizeable], rtol=precision * 1.01, atol=0
                        )
                superoffload.save_state(other, tmp_path / states)
                rounded = [state.moments() for state in sub_group_states(other) if state.moments]
            superoffload.load_state(made, tmp_path / states)
            for state, kept in zip(sub_group_states(made), rounded, strict=True):
                assert state.moments is not None
                assert all(
                    torch.equal(found, wanted)
                    for found, wanted in zip(state.moments(), kept, strict=True)
                )


@pytest.mark.parametrize("states", EACH_FORMAT)
def test_moments_from_the_gpu_are_rounded_once(states: StatesFormat, tmp_path: Path) -> None:
    with support.engine(support.spec("superoffload", 0.5), states=states) as made:
        support.train(made, support.batches(1))
        superoffload.save_state(made, tmp_path)
        on_gpu = [
            state.master_weights.numel()
            for state in sub_group_states(made)
            if state.device == "gpu"
        ]
        assert on_gpu
        assert superoffload.load_state(made, tmp_path) == Rounded(blocks=0, numel=0)
    with support.engine(support.spec("superoffload", 1.0), states=states) as made:
        assert superoffload.load_state(made, tmp_path) == Rounded(blocks=0, numel=sum(on_gpu))
    with support.engine(support.spec("superoffload", 0.0), states=states) as made:
        assert superoffload.load_state(made, tmp_path) == Rounded(blocks=0, numel=0)


def test_blocks_are_counted_if_both_runs_have_them_on_host(tmp_path: Path) -> None:
    def manifest(rank: int, ranks: int, *devices: str) -> Manifest:
        groups = [
            SubGroupRecord(1200 // ranks, device, 1, True, (name,), (1200,))
            for name, device in zip("ab", devices, strict=True)
        ]
        return Manifest(
            deepspeed="",
            mode="",
            engine="",
            ratio=1.0,
            rank=rank,
            ranks=ranks,
            sub_groups=tuple(groups),
        )

    for before, now, expected in (
        (("cpu", "cpu"), ("cpu", "cpu"), Rounded(blocks=2, numel=0)),
        (("cpu", "cpu"), ("gpu", "cpu"), Rounded(blocks=1, numel=0)),
        (("gpu", "cpu"), ("cpu", "cpu"), Rounded(blocks=1, numel=1200)),
        (("gpu", "cpu"), ("gpu", "gpu"), Rounded(blocks=0, numel=0)),
    ):
        assert (
            _rounded([manifest(rank, 2, *before) for rank in range(2)], manifest(0, 1, *now))
            == expected
        )


@pytest.mark.parametrize("states", EACH_FORMAT)
def test_moments_that_no_run_can_have_are_refused(states: StatesFormat, tmp_path: Path) -> None:
    """A negative one would be the largest of its block, and a NaN could become a number."""
    run = support.spec("superoffload", 1.0)
    with support.engine(run) as made:
        support.train(made, support.batches(1))
        superoffload.save_state(made, tmp_path)
        numel = sub_group_states(made)[0].master_weights.numel()
    saved = np.memmap(tmp_path / "rank_00000.states", np.float32, "r+")
    with support.engine(run, states=states) as made:
        for element, value in ((numel, np.nan), (2 * numel, np.nan), (2 * numel, -1e-30)):
            kept, saved[element] = saved[element].copy(), value
            with coded(superoffload.OffloadError, "impossible-moments"):
                superoffload.load_state(made, tmp_path)
            saved[element] = kept
        superoffload.load_state(made, tmp_path)


def test_the_seed_selects_the_random_bits(tmp_path: Path) -> None:
    one, other = (
        trained("int8-moments", support.batches(1), tmp_path / str(seed), seed=seed)
        for seed in (1, 2)
    )
    assert one[0] == other[0]
    assert one[1] != other[1]


def test_moments_in_host_memory_are_read_and_not_set_one_by_one() -> None:
    with support.engine(support.spec("superoffload", 0.5), states="bf16-moments") as made:
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
