"""Our optimizer started, used or ended in the wrong way: a clear error, and nothing stays."""

from __future__ import annotations

import gc
import os
import signal
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import superoffload
from so_tui.folders import kernel_folder
from superoffload import kernel, worker
from superoffload.gpu_states import Gradient, SubGroup
from superoffload.optimizer import SuperOffload
from superoffload.settings import HostRoom
from superoffload.shared_states import STATES_MEMORY_NAME
from tests.support import engine as support
from tests.support.problems import coded
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
    threads = [
        thread.name for thread in threading.enumerate() if thread.name.startswith("adam-worker")
    ]
    return [line for line in memory if STATES_MEMORY_NAME in line] + workers + threads


def test_without_a_private_cache_a_kernel_is_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    with coded(superoffload.OffloadError, "no-cache-folder"):
        kernel.library()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.warns(UserWarning, match="this process only"):
        built = kernel.library()
    assert (built.parent.parent, stat.S_IMODE(built.parent.stat().st_mode)) == (tmp_path, 0o700)
    assert kernel.library() == built


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "HOME"])
def test_the_cache_folder_is_the_one_in_which_the_doctor_looks(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    assert kernel._cache_folder() == kernel_folder(os.environ)
    assert kernel._cache_folder().is_relative_to(tmp_path)


def test_cached_kernels_need_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with coded(superoffload.OffloadError, "no-compiler"):
        kernel.library()
    monkeypatch.setenv("PATH", path)
    built = kernel.library()
    monkeypatch.setenv("PATH", "/nowhere")
    assert kernel.library() == built
    other = built.with_name(f"adam-{'0' * 16}-{'0' * 16}.so")
    built.rename(other)
    with coded(superoffload.OffloadError, "no-compiler"):
        kernel.library()


def make_engine() -> None:
    with support.engine(support.spec("superoffload")):
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


def test_nothing_stays_when_deepspeed_fails_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    nonsense, config = {"scheduler": {"type": "Nonsense"}}, support.ds_config
    monkeypatch.setattr(support, "ds_config", lambda *given: config(*given) | nonsense)
    with pytest.raises(Exception, match="Nonsense"):
        make_engine()
    assert not traces()


def test_weights_that_the_kernel_cannot_read_are_refused() -> None:
    weights = torch.zeros(10, dtype=torch.float16)
    group = SubGroup(weights, 0, ("weight",), (0,), on_gpu=False, places=(0,), first_use=0)
    adamw = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(10))])
    with coded(superoffload.OffloadError, "dtype", match="float16"):
        SuperOffload(
            [group],
            adamw,
            superoffload.Settings(learning_rate=1e-3),
            HostRoom(frozenset(), ()),
            device=torch.device("cpu"),
            gradient_accumulation_steps=1,
            clipping=0.0,
            all_reduce=lambda _: None,
        )
    assert not traces()


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_an_engine_that_is_closed_says_so(ratio: float, tmp_path: Path) -> None:
    with support.engine(support.spec("superoffload", ratio)) as made:
        support.train(made, support.batches(2))
        core = core_of(made)
        superoffload.close(made)
        superoffload.close(made)
        for use in (
            core.synchronize,
            core.gradient_norm,
            core.step,
            lambda: superoffload.save_state(made, tmp_path),
        ):
            with coded(superoffload.OffloadError, "closed"):
                use()
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("clipping", "accumulation"), [(0.0, 1), (1.0, 1), (1.0, 3)])
def test_no_save_or_load_within_a_step(clipping: float, accumulation: int, tmp_path: Path) -> None:
    """A save would lose gradients that have arrived; a load would apply them elsewhere."""
    run = support.spec("superoffload", 1.0, clipping=clipping, accumulation=accumulation)
    with support.engine(run) as made:
        support.train(made, support.batches(accumulation))
        superoffload.save_state(made, tmp_path)
        made.backward(made(support.batches(1)[0]))
        for use in (superoffload.save_state, superoffload.load_state):
            with coded(superoffload.OffloadError, "middle-of-step"):
                use(made, tmp_path)
        made.step()
        support.train(made, support.batches(accumulation - 1))
        superoffload.save_state(made, tmp_path)


class Failing(torch.autograd.Function):
    """The identity with a backward that fails."""

    @staticmethod
    def forward(context: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: object, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("something in the model")


@pytest.mark.parametrize("clipping", [0.0, 1.0])
def test_an_end_within_a_step_is_clean(clipping: float, capfd: pytest.CaptureFixture[str]) -> None:
    run = support.spec("superoffload", 1.0, clipping=clipping, sub_group_size=1)
    with support.engine(run) as made:
        expected = support.train(made, support.batches(2))
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="something in the model"), support.engine(run) as made:  # noqa: PT012
        support.train(made, support.batches(1))
        made.module.blocks[2].register_forward_hook(
            lambda module, inputs, output: Failing.apply(output)  # type: ignore[no-untyped-call]
        )
        support.train(made, support.batches(1))
    assert time.monotonic() - begun < 30, "the watchdog did not have to find it"
    assert not traces()
    with support.engine(run) as made:
        assert support.train(made, support.batches(2)) == expected
        made.backward(made(support.batches(1)[0]))
    assert not traces()
    assert "Traceback" not in capfd.readouterr().err  # of the worker, when its connection is closed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_the_worker_ignores_signals_to_the_whole_process_group(number: signal.Signals) -> None:
    """Otherwise a run that is asked to stop would fail because of a lost worker."""
    with support.engine(support.spec("superoffload", 1.0)) as made:
        pid = superoffload.worker_pid(made)
        assert pid is not None
        os.kill(pid, number)
        time.sleep(0.1)
        support.train(made, support.batches(2))
        superoffload.synchronize(made)


@pytest.mark.parametrize("clipping", [0.0, 1.0])
def test_an_infinite_value_in_a_micro_batch_is_found(clipping: float) -> None:
    with support.engine(
        support.spec("superoffload", 1.0, clipping=clipping, accumulation=3)
    ) as made:
        core = core_of(made)
        receive = core.receive

        def spoiling(gradients: Sequence[Gradient], *, boundary: bool) -> None:
            for gradient in gradients:
                if (made.micro_steps, gradient.sub_group, gradient.member) == (4, 2, 0):
                    gradient.values.flatten()[7] = float("inf")
            receive(gradients, boundary=boundary)

        core.receive = spoiling  # type: ignore[method-assign]
        with pytest.raises(superoffload.NonFiniteGradientError) as caught:  # noqa: PT012
            support.train(made, support.batches(6))
            superoffload.synchronize(made)
        assert (caught.value.step, caught.value.sub_group, caught.value.poisoned) == (
            2,
            2,
            clipping == 0,
        )


def test_changed_weights_are_copied_to_master_weights() -> None:
    import deepspeed
    from deepspeed.utils import (
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
    )

    with support.engine(support.spec("superoffload", 1.0, learning_rate=0.0)) as made:
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
