"""Keep credentials out of what is recorded and shown.

Names cannot tell what is secret: ``SLURM_JWT`` and ``HF_PAT`` are, ``TOKENIZERS_PARALLELISM`` is not. So variables are recorded only if
their names are listed here, and their values without what looks like a credential.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

HIDDEN = "<hidden>"
_LONGEST = 4096

_LISTED = """
    CUBLAS_WORKSPACE_CONFIG CUDA_DEVICE_MAX_CONNECTIONS CUDA_DEVICE_ORDER CUDA_HOME CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING
    CUDA_MPS_ACTIVE_THREAD_PERCENTAGE CUDA_VISIBLE_DEVICES DS_ACCELERATOR DS_BUILD_OPS DS_SKIP_CUDA_CHECK HF_DATASETS_CACHE
    HF_DATASETS_OFFLINE HF_ENDPOINT HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE HUGGINGFACE_HUB_CACHE LD_LIBRARY_PATH LD_PRELOAD
    SLURM_CLUSTER_NAME SLURM_CPUS_ON_NODE SLURM_CPUS_PER_TASK SLURM_CPU_BIND SLURM_GPUS SLURM_GPUS_ON_NODE SLURM_GPUS_PER_NODE
    SLURM_GPUS_PER_TASK SLURM_JOB_GPUS SLURM_JOB_ID SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES SLURM_JOB_PARTITION SLURM_LOCALID
    SLURM_MEM_BIND SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE SLURM_NNODES SLURM_NODEID SLURM_NODELIST SLURM_NTASKS
    SLURM_NTASKS_PER_NODE SLURM_PROCID SLURM_RESTART_COUNT SLURM_STEP_ID TRANSFORMERS_CACHE TRANSFORMERS_OFFLINE
"""
_NAMES = frozenset(_LISTED.split())
_PREFIXES = ("NCCL_", "OMP_", "KMP_", "GOMP_", "MKL_", "PYTORCH_", "TORCH_", "FI_", "UCX_", "OFI_")
"""Settings of numeric and communication libraries, none of which takes a credential."""

_SECRET_WORDS = re.compile(
    r"SECRET|PASSWORD|PASSWD|PWD|CREDENTIAL|API_?KEY|JWT|_(?:TOKEN|KEY|PASS|PAT|CREDS|AUTH)$"
)
"""In names that begin like a listed library's: anybody may call a variable of their own ``TORCH_HUB_TOKEN``."""

_USER_INFO = re.compile(
    r"(?<=://)(?:"
    r"[^/\s@:\"'?#]*:(?!\d+(?:[/?#]|$))[^\s\"']*"  # user and password, which may contain every separator; but not a host and its port
    r"|[^/\s\"'?#]*"
    r")@"
)
_QUERY = re.compile(r"(\b[a-zA-Z][a-zA-Z0-9+.-]*://[^\s?#\"']*)[?#][^\s\"']*")
_TOKEN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|glpat-[\w-]{16,}|sk-[\w-]{16,}|AKIA[0-9A-Z]{12,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)


def without_credentials(text: str) -> str:
    """Return a text without user information and queries of URLs, and without tokens of well-known forms."""
    if "://" in text:
        text = _QUERY.sub(rf"\1?{HIDDEN}", _USER_INFO.sub(f"{HIDDEN}@", text))
    return _TOKEN.sub(HIDDEN, text)


def recordable(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that affect training and hold no secrets, by name, with values of bounded length."""
    return {
        name: without_credentials(environment[name])[:_LONGEST]
        for name in sorted(environment)
        if _is_listed(name)
    }


def _is_listed(name: str) -> bool:
    return name in _NAMES or (name.startswith(_PREFIXES) and not _SECRET_WORDS.search(name))
