"""Which accelerator DeepSpeed takes: one per process, chosen when it is imported, so before any test is collected."""

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """CUDA for ``-m gpu`` where there is some, the CPU for everything else, on GPU machines too."""
    if config.getoption("markexpr") == "gpu":
        import torch

        if torch.cuda.is_available():
            os.environ["DS_ACCELERATOR"] = "cuda"
