"""The CPU Adam kernel on aarch64, which superchips are: compiled for NEON and SVE2, compared with
numpy. Elsewhere, qemu-user runs it.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

NATIVE = platform.machine() == "aarch64"
COMPILER = "g++" if NATIVE else "aarch64-linux-gnu-g++"
EMULATOR = () if NATIVE else ("qemu-aarch64", "-cpu", "max")
DRIVER = Path(__file__).with_name("adam_step.cpp")
NUMEL = 2 * (1 << 16) + 333
"""Three chunks, the last one short."""


@pytest.mark.parametrize("architecture", ["armv8.2-a", "armv9-a+sve2"], ids=["neon", "sve2"])
@pytest.mark.parametrize(
    ("moments", "precision"), [(0, 0.0), (1, 2**-7), (2, 2**-3)], ids=["fp32", "bf16", "int8"]
)
def test_kernel_computes_adamw_on_aarch64(
    architecture: str, moments: int, precision: float, tmp_path: Path
) -> None:
    """With compact moments: from those that the format holds, to one of the two neighbours of the
    exact result.
    """
    for tool in (COMPILER, *EMULATOR[:1]):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    if NATIVE and architecture.endswith("sve2") and "sve2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has no SVE2")
    numpy = pytest.importorskip("numpy")
    pytest.importorskip("torch")  # which the package of the kernel imports
    from superoffload.kernel import FLAGS, SOURCE
    from superoffload.worker import Command, Operation, _adamw_scalars

    program = tmp_path / "adam_step"
    flags = [flag for flag in FLAGS if flag not in ("-march=native", "-shared", "-fPIC")]
    target = [f"-march={architecture}", "-static", f"-I{SOURCE.parent}", "-o", str(program)]
    command = [COMPILER, *flags, *target, str(DRIVER)]
    compiled = subprocess.run(command, capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr

    generator = numpy.random.default_rng(0)
    weights, first, gradient = (
        generator.standard_normal(NUMEL, dtype=numpy.float32) for _ in range(3)
    )
    second = first * first
    if moments == 1:
        first, second = (
            (array.view(numpy.uint32) & 0xFFFF0000).view(numpy.float32) for array in (first, second)
        )
    if moments == 2:  # powers of two within the reach of the codes
        first, second = (
            numpy.exp2(numpy.clip(numpy.round(numpy.log2(abs(array) + 1e-9)), -6, 2)).astype("f4")
            for array in (first, second)
        )
    first[::2] = 1e-40  # denormal, without gradient
    gradient[::2] = 0
    step = Command(Operation.STEP, 0, 10, beta1=0.9, beta2=0.999, epsilon=1e-8)
    step = step._replace(learning_rate=1e-3, weight_decay=0.01)
    head = NUMEL.to_bytes(8, "little") + moments.to_bytes(8, "little")
    arrays = (array.tobytes() for array in (weights, first, second, gradient))
    given = b"".join((head, bytes(_adamw_scalars(step)), *arrays))
    done = subprocess.run(
        [*EMULATOR, str(program)], input=given, capture_output=True, check=True, timeout=120
    )
    new_weights, new_first, new_second = numpy.frombuffer(done.stdout, "f4").reshape(3, NUMEL)

    first[::2] = 0
    wide = [array.astype(numpy.float64) for array in (weights, first, second, gradient)]
    expected_first = 0.9 * wide[1] + 0.1 * wide[3]
    expected_second = 0.999 * wide[2] + 0.001 * wide[3] ** 2
    denominator = numpy.sqrt(expected_second / (1 - 0.999**10)) + 1e-8
    expected = wide[0] * (1 - 1e-3 * 0.01) - 1e-3 / (1 - 0.9**10) * expected_first / denominator
    assert not new_first[::2].any()
    numpy.testing.assert_allclose(
        new_first, expected_first, rtol=precision + 2e-5, atol=1e-7 if not precision else 2**-12
    )
    numpy.testing.assert_allclose(new_second, expected_second, rtol=precision + 2e-6)
    numpy.testing.assert_allclose(new_weights, expected, rtol=2e-6, atol=1e-7)
