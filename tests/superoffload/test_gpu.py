"""The engine with CUDA: pinned memory, copies during computation, weights that arrive late."""

from __future__ import annotations

import gc
import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import superoffload
from so_tui.spec.run_spec import RunSpec
from superoffload.deepspeed_adapter.engine import sub_group_states
from superoffload.transfers import seconds_between, transfers_for
from tests.support import engine as support
from tests.support import rank_processes
from tests.support.reference_adamw import Reference, core_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        support.DEVICE.type != "cuda",
        reason="DeepSpeed runs on the CPU in this process: select these tests with -m gpu",
    ),
]

STEPS = 20
WIDTH = 256
"""Copies and Adam take longer than queueing them: 1.6 million parameters, matrices of 131072."""
SUB_GROUP = 300_000
BUCKET = 200_000
"""Elements: one matrix fills a bucket, which the next one overwrites."""


@contextmanager
def engine(run: RunSpec, **settings: Any) -> Iterator[Any]:
    torch.manual_seed(run.train.seed)
    model = support.Model(width=WIDTH)
    # Also the head: with torch's 1.0 the first losses would be in the hundreds.
    torch.nn.init.normal_(model.embedding.weight, std=0.02)
    with support.engine(run, model=model, bucket=BUCKET, **settings) as made:
        yield made


def spec(mode: support.Mode, ratio: float, **settings: Any) -> RunSpec:
    return support.spec(
        mode, ratio, sub_group_size=SUB_GROUP, **{"learning_rate": 1e-3, **settings}
    )


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    ("clipping", "speculation_bytes"),
    [(0.0, 0), (1e-3, 0), (1e6, 0), (1e-3, support.ALL), (1e6, support.ALL), (2.5, support.ALL)],
)
def test_twenty_steps_are_those_of_float32_adamw(
    clipping: float, speculation_bytes: int, accumulation: int
) -> None:
    """The host never waits for the GPU: the reference is stepped at the end."""
    data = [tokens.to(support.DEVICE) for tokens in support.batches(STEPS * accumulation)]
    rates = [1e-3 * (1 + step) / STEPS for step in range(STEPS)]
    run = spec("superoffload", 0.5, clipping=clipping, accumulation=accumulation)
    with engine(run, speculation_bytes=speculation_bytes) as made:
        reference = Reference(made, clipping)
        taken = []
        for step, rate in enumerate(rates):
            superoffload.set_learning_rate(made, rate)
            for tokens in data[step * accumulation : (step + 1) * accumulation]:
                made.backward(made(tokens))
                made.step()
            taken.append(reference.take())
        superoffload.synchronize(made)
        norms = [reference.step(*step) for step in zip(rates, taken, strict=True)]
        assert superoffload.gradient_norm(made) == pytest.approx(norms[-1], rel=1e-6)
        assert len({group.on_gpu for group in reference.core.sub_groups}) == 2
        torch.cuda.synchronize()  # the last weights, which no forward has waited for
        reference.assert_same_states(made)
        for state in sub_group_states(made):
            cast = state.master_weights.to(support.DEVICE, torch.bfloat16)
            assert torch.equal(state.weights, cast)


@pytest.mark.parametrize(
    ("clipping", "speculation_bytes", "copies_bytes"),
    [(0.0, 0, support.ALL), (2.5, support.ALL, 0), (2.5, support.ALL, support.ALL)],
)
def test_a_background_save_is_the_state_of_its_step(
    clipping: float, speculation_bytes: int, copies_bytes: int, tmp_path: Path
) -> None:
    """States on the GPU are copied behind its work, and written beside steps."""
    data = support.batches(STEPS)
    settings = {"speculation_bytes": speculation_bytes, "copies_bytes": copies_bytes}
    ends: list[tuple[bytes, bytes]] = []
    for copying in (False, True):
        with engine(spec("superoffload", 0.5, clipping=clipping), **settings) as made:
            support.train(made, data[:5])
            folder = tmp_path / str(copying)
            save = superoffload.begin_save(made, folder, copying=copying)
            assert bool(save.copies) == copying
            with ThreadPoolExecutor(1) as threads:
                finished = threads.submit(save.finish)
                support.train(made, data[5:])
                finished.result()
            superoffload.verify_state(folder)
            ends.append((support.saved_bytes(folder), support.states(made)))
    assert ends[0] == ends[1]


WIDE, SUB_GROUP_OF_WIDE = 2048, 20_000_000
"""100 million parameters, each block a sub-group."""


@pytest.mark.parametrize(("ratio", "clipping", "accumulation"), [(1.0, 1.0, 1), (0.5, 0.0, 2)])
def test_host_weights_take_no_gpu_memory_and_change_no_bit(
    ratio: float, clipping: float, accumulation: int
) -> None:
    data = support.batches(8 * accumulation)
    # cuBLAS allocates its workspace, 32 MiB for each thread that multiplies, at the first product
    # of a process and keeps it.
    support.Model().to(support.DEVICE, torch.bfloat16)(data[0].to(support.DEVICE)).backward()
    run: dict[str, Any] = {"clipping": clipping, "accumulation": accumulation}
    run |= {"sub_group_size": SUB_GROUP_OF_WIDE, "learning_rate": 1e-4}
    run |= {"bucket": SUB_GROUP_OF_WIDE, "speculation_bytes": support.ALL}
    ends, at_rest, moved = [], [], 0
    parameters: support.Parameters
    for parameters in ("none", "cpu"):
        torch.manual_seed(0)
        model = support.Model(width=WIDE)
        torch.nn.init.normal_(model.embedding.weight, std=0.02)
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        with support.offloading(ratio, model, parameters=parameters, **run) as made:
            losses = support.train(made, data)
            superoffload.synchronize(made)
            torch.cuda.synchronize()
            at_rest.append(torch.cuda.memory_allocated() - before)
            ends.append((losses, hashlib.sha256(support.states(made)).hexdigest()))
            groups = core_of(made).sub_groups
            for group in groups:
                on_host = group.weights.device.type == "cpu"
                assert on_host == (parameters == "cpu" and not group.on_gpu)
            moved = sum(group.weights.nbytes for group in groups if not group.on_gpu)
            del groups, group
        del made, model
    assert ends[0] == ends[1]
    assert moved > 90e6
    assert at_rest[0] - at_rest[1] == pytest.approx(moved, rel=0.05)


def test_waiting_early_or_late_gives_the_same_bits() -> None:
    data = support.batches(STEPS)
    ends = []
    for lazy in (True, False):
        with engine(spec("superoffload", 0.5, clipping=1.0)) as made:
            core_of(made).lazy_weights = lazy
            ends.append((support.train(made, data), support.states(made)))
    assert ends[0] == ends[1]


@contextmanager
def deepspeeds_own(run: RunSpec) -> Iterator[Any]:
    """Make an engine with DeepSpeed's SuperOffload; undo its change of cores, end its worker."""
    cores = os.sched_getaffinity(0)
    try:
        with engine(run) as made:
            worker = made.optimizer.superoffload_cpu_optimizer.cpuadam_process
            yield made
        assert not worker.is_alive()
    finally:
        os.sched_setaffinity(0, cores)


def test_losses_follow_deepspeeds_own_superoffload() -> None:
    """They may round the last bit of a master weight differently, and so a bf16 weight (2 ** -8
    apart): 2 % of the loss allows for that, but not for a lost, doubled or late update.
    """
    data = support.batches(1) * 15  # one batch, so that the loss falls if updates are made
    run = partial(spec, "superoffload", 1.0, learning_rate=3e-4)
    with deepspeeds_own(run(implementation="deepspeed")) as theirs:
        expected = support.train(theirs, data)
    with engine(run()) as ours:
        found = support.train(ours, data)
    assert found == pytest.approx(expected, rel=2e-2)
    assert found[-1] < 0.8 * found[0]


def test_a_killed_run_goes_on_bit_for_bit_in_a_new_process(tmp_path: Path) -> None:
    """In every mode. The worker must end with its rank."""
    script = Path(rank_processes.__file__).with_name("engine_ranks.py")
    start = partial(rank_processes.start, script, ranks=1, accelerator="cuda")
    (rank,) = start(["first", str(tmp_path)])
    worker = rank_processes.worker_of(rank)
    rank.kill()
    rank.communicate()
    assert rank_processes.gone([worker])
    rank_processes.finish(start(["second", str(tmp_path)]))


@pytest.mark.parametrize(("computed_s", "late_s"), [(0.6, 0.3), (0.2, 0.6), (0.0, 0.4)])
def test_waits_are_exposed_only_while_the_gpu_is_idle(computed_s: float, late_s: float) -> None:
    with engine(spec("superoffload", 1.0, clipping=1.0)) as made:
        data = [tokens.to(support.DEVICE) for tokens in support.batches(6)]
        support.train(made, data[:4])
        made.backward(made(data[4]))
        timer = support.suspend_worker(made, late_s)
        made.step()
        timer.start()
        transfers = transfers_for(support.DEVICE)
        begin = transfers.mark()
        spin(computed_s)
        loss = made(data[5])
        end = transfers.mark()
        made.backward(loss)
        made.step()
        exposed_s = superoffload.stats(made).exposed_in_forward_s
        assert exposed_s == pytest.approx(max(0.0, late_s - computed_s), abs=0.08)
        assert seconds_between(begin, end) - exposed_s == pytest.approx(computed_s, abs=0.1)


def spin(seconds: float) -> None:
    """Keep the current stream busy for about as long."""
    torch.cuda._sleep(int(seconds * torch.cuda.clock_rate() * 1e6))  # type: ignore[no-untyped-call]
