"""The engine on this machine with an Adam worker for aarch64: its Python, its kernel and pages of
64 KiB, over the same shared memory.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.aarch64.environment import ENVIRONMENT, MissingError, emulated_python

pytest.importorskip("torch")
pytest.importorskip("deepspeed")

import torch

import superoffload
from superoffload import kernel
from tests.support import engine as support
from tests.support.reference_adamw import Reference

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(
        platform.machine() == "aarch64", reason="here tests/superoffload runs the worker natively"
    ),
]

COMPILER = "aarch64-linux-gnu-g++"
STEPS = 3


@pytest.fixture
def _worker_for_aarch64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the engine start its worker with the emulated Python, and with a kernel that was
    compiled for it.
    """
    if shutil.which(COMPILER) is None:
        pytest.skip(f"{COMPILER} is not installed: `apt-get install g++-aarch64-linux-gnu`")
    try:
        python = emulated_python(ENVIRONMENT)
    except MissingError as missing:
        pytest.skip(str(missing))
    library = tmp_path / "adam.so"
    flags = [flag for flag in kernel.FLAGS if flag != "-march=native"]
    compiled = subprocess.run(
        [COMPILER, *flags, "-march=armv8.2-a", "-o", str(library), str(kernel.SOURCE)], check=False
    )
    assert compiled.returncode == 0
    library.chmod(0o700)
    monkeypatch.setattr(kernel, "library", lambda: library)
    monkeypatch.setattr(sys, "executable", str(python))


@pytest.mark.usefixtures("_worker_for_aarch64")
@pytest.mark.parametrize(
    ("ratio", "clipping", "accumulation", "dtype"),
    [(1.0, 1e6, 2, torch.bfloat16), (0.5, 1e-3, 1, torch.float32)],
    ids=["speculating and accumulating", "held back"],
)
def test_steps_are_those_of_float32_adamw(
    ratio: float, clipping: float, accumulation: int, dtype: torch.dtype
) -> None:
    run = support.spec("superoffload", ratio, clipping=clipping, accumulation=accumulation)
    data = support.batches(STEPS * accumulation)
    with support.engine(run, dtype) as made:
        assert "qemu" in Path(f"/proc/{superoffload.worker_pid(made)}/exe").resolve().name
        reference = Reference(made, clipping)
        for step in range(STEPS):
            superoffload.set_learning_rate(made, 1e-2)
            support.train(made, data[step * accumulation : (step + 1) * accumulation])
            assert superoffload.gradient_norm(made) == pytest.approx(reference.step(1e-2), rel=1e-6)
        superoffload.synchronize(made)
        reference.assert_same_states(made)
