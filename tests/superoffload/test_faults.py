"""Our optimizer started, used or ended in the wrong way: a clear error, and nothing stays."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import superoffload
from superoffload import worker
from superoffload.gpu_states import SubGroup
from superoffload.optimizer import SuperOffload
from superoffload.settings import HostRoom
from superoffload.shared_states import STATES_MEMORY_NAME
from tests.support import engine as support
from tests.support.problems import coded, raising
from tests.support.reference_adamw import core_of

pytestmark = pytest.mark.slow


@contextmanager
def no_engine(code: str, match: str | None = None) -> Iterator[None]:
    """Expect that no engine can be made, and that nothing of it stays."""
    kind = superoffload.WorkerLostError if code == "worker-ended" else superoffload.OffloadError
    with coded(kind, code, match=match):
        yield
    assert not traces()


def traces() -> list[str]:
    """Return what an engine has left in this process: shared memory, Adam workers, threads."""
    gc.collect()
    memory = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    memory += Path("/proc/self/maps").read_text().splitlines()
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    workers = [pid for pid in children if b"worker.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    names = [thread.name for thread in threading.enumerate()]
    threads = [name for name in names if name.startswith("adam-worker")]
    return [line for line in memory if STATES_MEMORY_NAME in line] + workers + threads


def make_engine() -> None:
    with support.offloading():
        pass


def test_an_engine_that_cannot_start_says_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, no_engine("deepspeed-version"):
        patch.setattr("deepspeed.__version__", "0.19.9")
        make_engine()
    with monkeypatch.context() as patch, no_engine("worker-ended", "code 1 during initialize"):
        (tmp_path / "worker.py").write_text("raise SystemExit(1)")
        patch.setattr(worker, "__file__", str(tmp_path / "worker.py"))
        make_engine()
    nonsense, config = {"scheduler": {"type": "Nonsense"}}, support.ds_config
    with monkeypatch.context() as patch:
        patch.setattr(support, "ds_config", lambda *given: config(*given) | nonsense)
        with pytest.raises(Exception, match="Nonsense"):
            make_engine()
    assert not traces()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with monkeypatch.context() as patch, no_engine("no-compiler"):
        patch.setenv("PATH", str(tmp_path))
        patch.delenv("CXX", raising=False)
        make_engine()
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'unrecognized option -fopenmp' >&2; exit 1\n")
    compiler.chmod(0o755)
    with monkeypatch.context() as patch, no_engine("compiler-failed", "unrecognized option"):
        patch.setenv("CXX", str(compiler))
        make_engine()
    assert not list(tmp_path.rglob("*.so"))


def test_weights_that_the_kernel_cannot_read_are_refused() -> None:
    weights = torch.zeros(10, dtype=torch.float16)
    group = SubGroup(weights, 0, ("weight",), (0,), on_gpu=False, places=(0,), first_use=0)
    adamw = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(10))])
    settings, room = superoffload.Settings(learning_rate=1e-3), HostRoom(frozenset(), ())
    config: dict[str, Any] = {"gradient_accumulation_steps": 1, "clipping": 0.0}
    config |= {"device": torch.device("cpu"), "all_reduce": lambda _: None}
    with coded(superoffload.OffloadError, "dtype", match="float16"):
        SuperOffload([group], adamw, settings, room, **config)
    assert not traces()


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_an_engine_that_is_closed_says_so(ratio: float, tmp_path: Path) -> None:
    with support.offloading(ratio) as made:
        support.train(made, support.batches(2))
        core = core_of(made)
        superoffload.close(made)
        superoffload.close(made)
        save = partial(superoffload.save_state, made, tmp_path)
        for use in (core.synchronize, core.gradient_norm, core.step, save):
            with coded(superoffload.OffloadError, "closed"):
                use()
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("clipping", "accumulation"), [(0.0, 1), (1.0, 1), (1.0, 3)])
def test_no_save_or_load_within_a_step(clipping: float, accumulation: int, tmp_path: Path) -> None:
    """A save would lose gradients that have arrived; a load would apply them elsewhere."""
    with support.offloading(clipping=clipping, accumulation=accumulation) as made:
        support.train(made, support.batches(accumulation))
        superoffload.save_state(made, tmp_path)
        made.backward(made(support.batches(1)[0]))
        for use in (superoffload.save_state, superoffload.load_state):
            with coded(superoffload.OffloadError, "middle-of-step"):
                use(made, tmp_path)
        made.step()
        support.train(made, support.batches(accumulation - 1))
        superoffload.save_state(made, tmp_path)


@pytest.mark.parametrize("clipping", [0.0, 1.0])
def test_an_end_within_a_step_is_clean(clipping: float, capfd: pytest.CaptureFixture[str]) -> None:
    run: dict[str, Any] = {"clipping": clipping, "sub_group_size": 1}
    with support.offloading(**run) as made:
        expected = support.train(made, support.batches(2))
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="in the model"), support.offloading(**run) as made:  # noqa: PT012
        support.train(made, support.batches(1))
        support.spoil(made, raising(RuntimeError("something in the model")))
        support.train(made, support.batches(1))
    assert time.monotonic() - begun < 30, "the watchdog did not have to find it"
    assert not traces()
    with support.offloading(**run) as made:
        assert support.train(made, support.batches(2)) == expected
        made.backward(made(support.batches(1)[0]))
    assert not traces()
    assert "Traceback" not in capfd.readouterr().err  # of the worker, when its connection is closed


def test_the_worker_ignores_signals_to_the_whole_process_group() -> None:
    """Otherwise a run that is asked to stop would fail because of a lost worker."""
    with support.offloading() as made:
        pid = superoffload.worker_pid(made)
        assert pid is not None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(pid, number)
        time.sleep(0.1)
        support.train(made, support.batches(2))
        superoffload.synchronize(made)


@pytest.mark.parametrize("parameters", ["none", "cpu"])
def test_changed_weights_are_copied_to_master_weights(parameters: support.Parameters) -> None:
    import deepspeed
    from deepspeed.utils import (
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
    )

    with support.offloading(learning_rate=0.0, parameters=parameters) as made:
        support.train(made, support.batches(1))
        weight = made.module.blocks[0].up.weight
        with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
            weight.data.fill_(0.5)
        made.optimizer.refresh_fp32_params()
        support.train(made, support.batches(1))
        assert safe_get_full_fp32_param(weight).eq(0.5).all()
        with deepspeed.zero.GatheredParameters([weight]):
            assert weight.eq(0.5).all()
        assert safe_get_full_optimizer_state(weight, "exp_avg_sq").max() > 0
        with coded(superoffload.OffloadError, "no-stored-gradients"):
            safe_get_full_grad(weight)
