"""Which accelerator DeepSpeed takes: one per process, chosen when it is imported, so before any test is collected."""

import os
from collections.abc import Iterator

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """CUDA for ``-m gpu`` where there is some, the CPU for everything else, on GPU machines too."""
    if config.getoption("markexpr") == "gpu":
        import torch

        if torch.cuda.is_available():
            os.environ["DS_ACCELERATOR"] = "cuda"


@pytest.fixture(scope="package", autouse=True)
def _process_group_of_its_own() -> Iterator[None]:
    """The tests in this folder share a group of one rank; the next ones must not find it, or what it set in the environment."""
    import torch.distributed as dist

    before = dict(os.environ)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)
