"""Make text from elsewhere safe to show: no control sequence reaches the terminal, and no invisible
character reorders a line.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Mapping

_UNSAFE = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f"  # C0 but tab and newline; a carriage return overwrites its line
    "\x80-\x9f"  # C1: one character of these begins a control sequence
    # bidirectional controls, invisible characters, separators of lines
    "\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\U000e0000-\U000e007f"  # annotations, tags
    "\xad\u180e\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"  # of hyphenation, scripts and music
    "\ud800-\udfff"  # surrogates, which stand for bytes that are not UTF-8
    "]"
)
_BREAKS = re.compile("[\t\n]")
_UNSAFE_IN_LINE = re.compile(f"{_UNSAFE.pattern[:-1]}\t\n]")
_LONGEST_MESSAGE = 4000
"""Characters of a message that are read; half as many are shown. Reasons and warnings of so-tui
have a few hundred.
"""
REPLACED = "\ufffd"
"""Stands for a character that is not shown."""


def printable(text: str) -> str:
    """Return a text with every control, bidirectional and invisible character spelled out
    (``\\x1b``). Tabs and newlines stay.
    """
    return (
        text if text.isprintable() else _UNSAFE.sub(_spelled, text)
    )  # nothing unsafe counts as printable, and this is ten times faster


def printable_line(text: str) -> str:
    """Return a text as one line that is safe to show: like ``printable``, with tabs and newlines
    spelled out too.
    """
    return _BREAKS.sub(_spelled, printable(text))


def brief_line(text: str, most: int = 80) -> str:
    """Return a text as one line of at most about ``most`` characters that is safe to show; what is
    cut off ends in an ellipsis.
    """
    line = printable_line(text[: most + 1])
    return line if len(line) <= most else line[: most - 1] + "…"


def brief_message(text: str) -> str:
    """Return a message of any length and shape as one line that is safe to show, with single spaces
    for line ends and runs of spaces.
    """
    return brief_line(" ".join(text[:_LONGEST_MESSAGE].split()), _LONGEST_MESSAGE // 2)


def bounded(value: float | None) -> float:
    """Return a number from a file of somebody else whose text is short, and at least 0."""
    return min(max(value, 0.0), 1e15) if value is not None and math.isfinite(value) else 0.0


def printable_source(text: str) -> str:
    """Return JSON or TOML with unsafe characters escaped in that format, so that programs read the
    same values.
    """
    return text if text.isprintable() else _UNSAFE.sub(_escaped, text)


def same_cells(text: str, width: Callable[[str], int]) -> str:
    """Return a line that is already laid out, with each unsafe character replaced by as many cells
    as it takes.

    Args:
        width: Returns the cells of a character.
    """
    return (
        text
        if text.isprintable()
        else _UNSAFE_IN_LINE.sub(lambda match: REPLACED * width(match[0]), text)
    )


def quoted(*arguments: str) -> str:
    """Return arguments as a command that can be copied into a shell, whatever they contain, and is
    safe to show.
    """
    return " ".join(map(_quoted, arguments))


def so_tui_command(verb: str, argument: str, *options: str) -> str:
    """Return a command of so-tui for copying. An argument that begins with a dash is not read as an
    option.
    """
    return (
        quoted("so-tui", verb, *options, "--", argument)
        if argument.startswith("-")
        else quoted("so-tui", verb, argument, *options)
    )


def _quoted(argument: str) -> str:
    plain = printable_line(argument)
    if plain == argument:
        return shlex.quote(argument)
    # bash's $'...' spells what cannot be shown, byte by byte.
    data = argument.encode("utf-8", errors="surrogateescape")
    return (
        "$'"
        + "".join(
            chr(byte) if 32 <= byte < 127 and byte not in b"'\\" else f"\\x{byte:02x}"
            for byte in data
        )
        + "'"
    )


def _spelled(match: re.Match[str]) -> str:
    return repr(match[0])[1:-1]


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


# Keep credentials out of what is recorded and shown.
#
# Names cannot tell what is secret: ``SLURM_JWT`` and ``HF_PAT`` are, ``TOKENIZERS_PARALLELISM`` is
# not. So variables are recorded only if their names are listed here, and their values without what
# looks like a credential.


HIDDEN = "<hidden>"
_LONGEST = 4096

_LISTED = """
    CUBLAS_WORKSPACE_CONFIG CUDA_DEVICE_MAX_CONNECTIONS CUDA_DEVICE_ORDER CUDA_HOME
    CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING CUDA_MPS_ACTIVE_THREAD_PERCENTAGE CUDA_VISIBLE_DEVICES
    DS_ACCELERATOR DS_BUILD_OPS DS_SKIP_CUDA_CHECK HF_DATASETS_CACHE HF_DATASETS_OFFLINE HF_ENDPOINT
    HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE HUGGINGFACE_HUB_CACHE LD_LIBRARY_PATH LD_PRELOAD
    SLURM_CLUSTER_NAME SLURM_CPUS_ON_NODE SLURM_CPUS_PER_TASK SLURM_CPU_BIND SLURM_GPUS
    SLURM_GPUS_ON_NODE SLURM_GPUS_PER_NODE SLURM_GPUS_PER_TASK SLURM_JOB_GPUS SLURM_JOB_ID
    SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES SLURM_JOB_PARTITION SLURM_LOCALID SLURM_MEM_BIND
    SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE SLURM_NNODES SLURM_NODEID SLURM_NODELIST
    SLURM_NTASKS SLURM_NTASKS_PER_NODE SLURM_PROCID SLURM_RESTART_COUNT SLURM_STEP_ID
    TRANSFORMERS_CACHE TRANSFORMERS_OFFLINE
"""
_NAMES = frozenset(_LISTED.split())
_PREFIXES = ("NCCL_", "OMP_", "KMP_", "GOMP_", "MKL_", "PYTORCH_", "TORCH_", "FI_", "UCX_", "OFI_")
"""Settings of numeric and communication libraries, none of which takes a credential."""

_SECRET_WORDS = re.compile(
    r"SECRET|PASSWORD|PASSWD|PWD|CREDENTIAL|API_?KEY|JWT|_(?:TOKEN|KEY|PASS|PAT|CREDS|AUTH)$"
)
"""In names that begin like a listed library's: anybody may call a variable of their own
``TORCH_HUB_TOKEN``.
"""

_USER_INFO = re.compile(
    r"(?<=://)(?:"
    # user and password, which may contain every separator; but not a host and its port
    r"[^/\s@:\"'?#]*:(?!\d+(?:[/?#]|$))[^\s\"']*"
    r"|[^/\s\"'?#]*"
    r")@"
)
_QUERY = re.compile(r"(\b[a-zA-Z][a-zA-Z0-9+.-]*://[^\s?#\"']*)[?#][^\s\"']*")
_TOKEN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|glpat-[\w-]{16,}|sk-[\w-]{16,}|"
    r"AKIA[0-9A-Z]{12,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)


def without_credentials(text: str) -> str:
    """Return a text without user information and queries of URLs, and without tokens of well-known
    forms.
    """
    if "://" in text:
        text = _QUERY.sub(rf"\1?{HIDDEN}", _USER_INFO.sub(f"{HIDDEN}@", text))
    return _TOKEN.sub(HIDDEN, text)


def recordable(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that affect training and hold no secrets, by name, with values of
    bounded length.
    """
    return {
        name: without_credentials(environment[name])[:_LONGEST]
        for name in sorted(environment)
        if name in _NAMES or (name.startswith(_PREFIXES) and not _SECRET_WORDS.search(name))
    }
