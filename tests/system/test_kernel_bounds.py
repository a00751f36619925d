"""The CPU Adam kernel under the sanitizers of the compiler: no access outside its arrays, and
nothing undefined, whatever the sizes.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

DRIVER = Path(__file__).with_name("adam_bounds.cpp")


def test_the_kernel_stays_within_its_arrays(tmp_path: Path) -> None:
    """Sub-groups of 0 to 70,000 elements, whose parameters begin and end inside blocks, in arrays
    that begin at odd addresses.
    """
    pytest.importorskip("torch")  # which the package of the kernel imports
    from superoffload.kernel import FLAGS, SOURCE

    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    program = tmp_path / "adam_bounds"
    flags = [flag for flag in FLAGS if flag not in ("-O3", "-shared", "-fPIC")]
    sanitizers = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    compiled = subprocess.run(
        [compiler, *flags, *sanitizers, f"-I{SOURCE.parent}", "-o", str(program), str(DRIVER)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert compiled.returncode == 0, compiled.stderr[-2000:]
    done = subprocess.run([program], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
