"""Select DeepSpeed's accelerator. There is one per process, chosen on import, so this happens
before any test is collected.
"""

import os
from collections.abc import Iterator

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Select CUDA for ``-m gpu`` if there is a device, and the CPU for all other tests, even on
    machines with GPUs.
    """
    if config.getoption("markexpr") == "gpu":
        import torch

        if torch.cuda.is_available():
            os.environ["DS_ACCELERATOR"] = "cuda"


@pytest.fixture(scope="package", autouse=True)
def _process_group_of_its_own() -> Iterator[None]:
    """Remove the process group of one rank that the tests in this folder share, and the environment
    variables that it set.
    """
    import torch.distributed as dist

    before = dict(os.environ)
    yield
    if dist.is_initialized():
        import deepspeed.comm

        # torch's own leaves DeepSpeed with groups that no longer exist
        deepspeed.comm.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)
