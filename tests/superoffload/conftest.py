"""Select DeepSpeed's accelerator, one per process, before any test is collected."""

import os
from collections.abc import Iterator

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Select CUDA for ``-m gpu`` if there is a device, and the CPU for all other tests."""
    if config.getoption("markexpr") == "gpu":
        import torch

        if torch.cuda.is_available():
            os.environ["DS_ACCELERATOR"] = "cuda"


@pytest.fixture(scope="package", autouse=True)
def _process_group_of_its_own() -> Iterator[None]:
    """Remove the process group that the tests in this folder share, and its variables."""
    import torch.distributed as dist

    before = dict(os.environ)
    yield
    if dist.is_initialized():
        import deepspeed.comm

        # torch's own leaves DeepSpeed with groups that no longer exist
        deepspeed.comm.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)
